"""What the device tests train: small models, a store that copies from pinned memory, records of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_core
from tests.integration.zero_core import toys
from tests.integration.zero_core.swapping import LateArrival, SwappingStore
from tests.reference import Reference

STEPS = 3
BLOCKS = 6  # buffers that blocks take in turns are used again, under whatever has not finished with them


class Wide(nn.Module):
    """Residual blocks of 8 * width * width elements; nothing else of weight."""

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).float().square().mean()


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def plain() -> toys.Stack:
    return toys.Stack(BLOCKS)


def checkpointed() -> toys.Stack:
    return toys.Checkpointed(False, blocks=BLOCKS)


def reentrant() -> toys.Stack:
    return toys.Checkpointed(True, segment=2, blocks=BLOCKS)


def batch(step: int, rank: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return toys.data(step, rank).to(device, dtype)


def distance(
    make: Callable[[], nn.Module], device: torch.device, micro: int, dtype: torch.dtype, **options: Any
) -> tuple[float, float]:
    """STEPS steps beside `tests.reference` on the same device: how far apart the norms and the updates ended.

    Both relative, the worst of all steps and tensors. The gradients of micro-batches are averaged, by a power of two.
    """
    rank, size = toys.world()
    torch.manual_seed(1)
    dense = make().to(device)
    torch.manual_seed(1)
    model = make().to(device)
    first = [p.detach().float().clone() for p in dense.parameters()]
    reference = Reference(dense, toys.sgd, param_dtype=dtype, max_grad_norm=0.5)
    options = {"param_dtype": dtype, "reduce_dtype": torch.float32, "max_grad_norm": 0.5, **options}
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()), **options)
    norm = update = 0.0
    for step in range(STEPS):
        for m in range(micro):
            (loss_of(model, batch(step * micro + m, rank, device, dtype)) / micro).backward()
        optimizer.step()
        optimizer.zero_grad()
        batches = [batch(step * micro + m, r, device, dtype) for r in range(size) for m in range(micro)]
        reference.step(batches, loss_of)
        norm = max(norm, abs(optimizer.grad_norm - reference.grad_norm) / reference.grad_norm)
    with zero_core.gathered(model, master=True):
        for ours, theirs, start in zip(model.parameters(), reference.masters, first, strict=True):
            moved = float((theirs.detach() - start).norm())
            update = max(update, float((ours.detach() - theirs.detach()).norm()) / max(moved, 1e-6))
    optimizer.close()
    return norm, update


def history(
    make: Callable[[], nn.Module], device: torch.device, *, store: Any = None, build: Any = fused, **options: Any
) -> list[Tensor]:
    """Everything a run shows, on the CPU: losses, norms, outputs without a graph, masters."""
    rank, _ = toys.world()
    torch.manual_seed(1)
    model, seen = make().to(device), []
    options = {"max_grad_norm": 0.5, **options}
    optimizer = zero_core.shard(model, build(model.parameters()), store=store, **options)
    dtype = options.get("param_dtype", torch.float32)
    for step in range(STEPS):
        for m in range(2):
            loss = loss_of(model, batch(2 * step + m, rank, device, dtype))
            loss.backward()
            seen.append(loss.detach().cpu())
        optimizer.step()
        optimizer.zero_grad()
        seen.append(torch.tensor(optimizer.grad_norm))
        with torch.no_grad():
            seen.append(model(batch(90 + step, rank, device, dtype)).cpu())
    with zero_core.gathered(model, master=True):
        seen += [p.detach().cpu().clone() for p in model.parameters()]
    optimizer.close()
    return seen


def differing(ours: list[Tensor], theirs: list[Tensor]) -> list[int]:
    """Places at which two histories have other bits."""
    assert len(ours) == len(theirs)
    return [k for k, (a, b) in enumerate(zip(ours, theirs, strict=True)) if not torch.equal(a, b)]


class PinnedArrival(LateArrival):
    """Copied on the store's own stream, late; what was not waited for is NaN."""

    def __init__(self, store: PinnedStore, i: int, out: Tensor) -> None:
        super().__init__(store, i, out)
        self._module = torch.get_device_module(out.device)
        store.copies.wait_stream(self._module.current_stream(out.device))
        with self._module.stream(store.copies):
            if store.late_cycles:
                self._module._sleep(store.late_cycles)
            out.copy_(store.pinned[i], non_blocking=True)
            self._there = self._module.Event()
            self._there.record()

    def wait(self) -> None:
        self._end("waited")
        self._follow()

    def drop(self) -> None:
        self._end("dropped")
        self._follow()

    def _follow(self) -> None:
        self._module.current_stream(self._out.device).wait_event(self._there)


class PinnedStore(SwappingStore):
    """Parameters come from pinned memory, after `late_cycles` of the device's clock; states stay on the device."""

    arrival = PinnedArrival

    def __init__(self, late_cycles: int = 0) -> None:
        super().__init__()
        self.late_cycles = late_cycles

    def attach(self, *args: Any, **options: Any) -> None:
        super().attach(*args, **options)
        device = self._context.device
        self._module = torch.get_device_module(device)
        self.copies = self._module.Stream(device)
        self.pinned = [torch.empty(s.spec.numel, dtype=s.spec.dtype, pin_memory=True) for s in self._shards]
        self._keep()

    def _keep(self) -> None:
        """Behind the copies: one that is under way, perhaps of a unit that is not updated, still reads this memory."""
        self._module.current_stream(self._context.device).wait_stream(self.copies)
        for pinned, shard in zip(self.pinned, self._shards, strict=True):
            if shard.parameter is not None and shard.parameter.untyped_storage().nbytes():  # else it was given up
                pinned.copy_(shard.parameter, non_blocking=True)

    def update(self, *args: Any) -> None:
        super().update(*args)
        self._keep()

    def write_state(self, *args: Any) -> None:
        super().write_state(*args)
        self._keep()


def swapping(device: torch.device, late_cycles: int = 0) -> SwappingStore:
    """A store that swaps in, on that device."""
    return SwappingStore() if device.type == "cpu" else PinnedStore(late_cycles)


class NormMayWait:
    """An observer under which a synchronisation raises, but for the norm's."""

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device)
        self._module = module if hasattr(module, "set_sync_debug_mode") else None
        self.norms = 0

    @contextmanager
    def refusing(self) -> Iterator[None]:
        """Inside, the host must not wait for the device."""
        self._set("error")
        try:
            yield
        finally:
            self._set("default")

    @contextmanager
    def span(self, kind: str, unit: str) -> Iterator[None]:
        if kind != "norm":
            yield
            return
        self.norms += 1
        before = self._module.get_sync_debug_mode() if self._module is not None else 0
        self._set("default")
        try:
            yield
        finally:
            self._set(before)

    def _set(self, mode: str | int) -> None:
        if self._module is not None:
            self._module.set_sync_debug_mode(mode)


def device_of_rank(kind: str) -> torch.device:
    """This rank's device in a pool of `device_ranks`."""
    return torch.device(kind) if kind == "cpu" else torch.device(kind, dist.get_rank())
