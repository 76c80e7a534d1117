"""Drives a ShardStore as zero-core does, on small shards, with gradients that depend on the parameters.

Tiles have `tests.chunks.TILE` elements, so whoever uses these does so inside `small_chunks`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.chunks import TILE
from zero_core.store import GroupStep, NullObserver, Observer, Segment, ShardSpec, StoreContext
from zero_offload import MemoryByteStore, TieredStore, TorchStep

from . import simulated

# Units of several tiles, with short last ones; a small one, frozen by default; and one of less than a tile.
NUMELS = TILE + 640, 2 * TILE + 384, 896, TILE // 2


def make_specs(dtype: torch.dtype, numels: Sequence[int] = NUMELS, frozen: Sequence[int] = (2,)) -> list[ShardSpec]:
    specs = []
    for i, numel in enumerate(numels):
        middle = numel // 2 // 128 * 128
        groups = (None, None) if i in frozen else (0, 1)
        segments = (Segment(0, middle, groups[0], f"u{i}.a"), Segment(middle, numel - 5, groups[1], f"u{i}.b"))
        specs.append(ShardSpec(f"u{i}", numel, dtype, segments))
    return specs


@dataclass
class Driver:
    """A training loop over a store. `losses` and `norms` record what a user would see."""

    store: TieredStore
    dtype: torch.dtype = torch.bfloat16
    reduce_dtype: torch.dtype = torch.bfloat16
    numels: Sequence[int] = NUMELS
    frozen: Sequence[int] = (2,)
    prefetch_bytes: int = 0
    observer: Observer = field(default_factory=NullObserver)
    optimizer_class: Any = torch.optim.AdamW
    options: dict[str, Any] = field(default_factory=lambda: {"lr": 1e-2, "weight_decay": 0.1})
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    step_number: int = 0
    max_norm: float = 50.0

    def __post_init__(self) -> None:
        self.specs = make_specs(self.dtype, self.numels, self.frozen)
        one, two = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
        self.optimizer = self.optimizer_class([{"params": [one]}, {"params": [two], "lr": 2e-2}], **self.options)
        generator = torch.Generator().manual_seed(0)
        self.initial = [torch.randn(numel, generator=generator) for numel in self.numels]
        context = StoreContext(
            torch.device("cpu"),
            reduce_dtype=self.reduce_dtype,
            prefetch_bytes=self.prefetch_bytes,
            observer=self.observer,
        )
        self.store.attach(self.specs, self.optimizer, lambda i: self.initial[i].clone(), context=context)

    @property
    def units(self) -> range:
        return range(len(self.numels))

    def groups(self) -> list[GroupStep]:
        return [GroupStep({k: v for k, v in group.items() if k != "params"}) for group in self.optimizer.param_groups]

    def forward(self) -> None:
        total = 0.0
        for i in self.units:
            if i + 1 < len(self.numels):
                self.store.prefetch(i + 1)
            total += float(self.store.parameters(i)[::997].double().sum())
            self.store.release(i)
        self.losses.append(total)

    def gradient(self, i: int, micro_batch: int = 0) -> Tensor:
        values = self.store.parameters(i).float()
        wave = torch.arange(self.numels[i]).remainder(101) * 0.01
        result = (torch.sin(values * 3 + self.step_number + micro_batch) * 0.3 + wave).to(self.reduce_dtype)
        self.store.release(i)
        return result

    def backward(self, micro_batch: int = 0) -> None:
        for i in reversed(self.units):
            if i in self.frozen:
                self.store.parameters(i)
                self.store.release(i)
                continue
            gradient = self.gradient(i, micro_batch)
            lent = self.store.gradient_buffer(i)
            if lent is not None:
                gradient = lent.copy_(gradient)
            self.store.accept_gradient(i, gradient)

    def forward_backward(self, micro_batch: int = 0) -> None:
        self.forward()
        self.backward(micro_batch)

    def update(self, order: Sequence[int] | None = None) -> None:
        self.step_number += 1
        squared = float(self.store.gradient_norm_squared())
        self.norms.append(squared)
        steps = [[self.step_number] * len(spec.segments) for spec in self.specs]
        order = self.units if order is None else order
        self.store.update(self.groups(), min(1.0, self.max_norm / (squared**0.5 + 1e-6)), order, steps)

    def updated(self, i: int) -> int:
        """How many tiles of unit i the store has updated since it was attached, by the spans of its timeline."""
        events = self.store.timeline.events()
        return sum(event.kind == "update" and event.unit.endswith(f" of u{i}") for event in events)

    def behind(self, i: int) -> bool:
        """Whether tiles of unit i are still to be updated, where every update() so far had a gradient of it."""
        return self.updated(i) < self.step_number * len(self.store.describe().units[i].tiles)

    def step(self, accumulate: int = 1) -> None:
        for micro_batch in range(accumulate):
            self.forward_backward(micro_batch)
        self.update()

    def everything(self) -> list[Tensor]:
        """Every logical value and every parameter, in order."""
        found = [
            self.store.read_state(i, name, 0, self.numels[i]) for i in self.units for name in self.store.state_names()
        ]
        for i in self.units:
            found.append(self.store.parameters(i).float())
            self.store.release(i)
        return found


class WaitingStep(TorchStep):
    """Its updates wait for `go`, which is set, as attach() steps tiles of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.begun = threading.Event(), threading.Event()
        self.go.set()

    def update(self, tile: Any, segments: Any, scale: float) -> None:
        self.begun.set()
        self.go.wait()
        super().update(tile, segments, scale)


class LateStep(TorchStep):
    """A step that can start. What was started is updated when it is waited for, after what was started before it."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.under_way: deque[_Late] = deque()
        self.most = 0  # under way at once
        self.in_a_row = True

    def start(self, tile: Any, segments: Any, scale: float) -> _Late:
        late = _Late(self, lambda: self.update(tile, segments, scale))
        self.under_way.append(late)
        self.most = max(self.most, len(self.under_way))
        return late


@dataclass(eq=False)
class _Late:
    step: LateStep
    update: Callable[[], None]

    def done(self) -> bool:
        return self not in self.step.under_way

    def wait(self) -> None:
        while not self.done():
            self.step.under_way[0].update()
            self.step.under_way.popleft()


def make(
    placement: Any = "host", nvme: Any = None, *, driver: dict[str, Any] | None = None, **arguments: Any
) -> Driver:
    """A driver over a fresh store with `placement` for all three kinds, or a mapping by kind."""
    kinds = ("parameters", "gradients", "optimizer")
    by_kind = (
        placement if isinstance(placement, dict) and set(placement) & set(kinds) else dict.fromkeys(kinds, placement)
    )
    arguments.setdefault("tile_numel", TILE)
    nvme = MemoryByteStore() if nvme is None else nvme or None  # False: none
    store = TieredStore(nvme=nvme, streams=simulated.streams(), **by_kind, **arguments)
    return Driver(store, **(driver or {}))


def only_close_works(driver: Driver, error: type[BaseException]) -> None:
    store = driver.store
    calls = [
        lambda: store.prefetch(0),
        lambda: store.parameters(0),
        lambda: store.release(0),
        lambda: store.gradient_buffer(0),
        lambda: store.accept_gradient(0, torch.zeros(driver.numels[0], dtype=torch.bfloat16)),
        store.discard_gradients,
        store.gradient_norm_squared,
        lambda: store.update(driver.groups(), 1.0, [0], [[1, 1]] * 2),
        store.wait,
        lambda: store.read_state(0, "master", 0, 1),
        lambda: store.read_gradient(0, 0, 1),
        lambda: store.write_gradient(0, 0, torch.zeros(1)),
        lambda: store.write_state(0, "master", 0, torch.zeros(1)),
    ]
    for call in calls:
        with pytest.raises(error):
            call()
    store.close()
    store.close()


def threads(name: str) -> set[threading.Thread]:
    """The running threads of this name."""
    return {thread for thread in threading.enumerate() if thread.name == name}


def same(left: Sequence[Tensor], right: Sequence[Tensor]) -> bool:
    """Bit for bit."""
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def until(true: Callable[[], bool]) -> None:
    """Wait for what another thread does; it fails after a minute."""
    end = time.monotonic() + 60
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)
