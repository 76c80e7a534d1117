"""The host reads one thing from the device in a step: the norm. A GPU would have run dry at every other.

Held on the CPU by refusing the calls that would wait: values read out, and tensors made of Python numbers where memory
is not pinned. Optimizers whose step counts are on the device are used; the others read theirs on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import zero_core
from tests.integration.zero_core import swapping, toys

READING = {"item", "tolist", "numpy", "cpu", "__float__", "__int__", "__bool__", "__index__", "__contains__"}
READING |= {"nonzero", "equal", "allclose", "masked_select", "unique", "is_nonzero", "tensor", "as_tensor"}
STEPS = 3  # the first makes states, the second reuses memory, the third is like all others
OPERATORS = {"_local_scalar_dense", "nonzero", "equal", "masked_select", "is_nonzero", "_unique2"}


class Watch:
    """An observer that counts what is read inside "norm" and refuses it outside, while `watching`."""

    def __init__(self) -> None:
        self.in_norm = self.refusing = False
        self.read: list[str] = []

    @contextmanager
    def span(self, kind: str, unit: str) -> Iterator[None]:
        before, self.in_norm = self.in_norm, self.in_norm or kind == "norm"
        try:
            yield
        finally:
            self.in_norm = before

    def saw(self, what: str) -> None:
        assert self.in_norm, f"{what} outside of the norm: a GPU would be waited for"
        self.read.append(what)


class Calls(TorchFunctionMode):
    """What Python asks of tensors. `tolist` and `float` reach no operator, so they are seen here."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READING:
            self._watch.saw(name)
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """What reaches torch's operators, from wherever."""

    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self._watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0]
        if name in OPERATORS:
            self._watch.saw(name)
        return func(*args, **(kwargs or {}))


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def fused(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def reads(make: Any, build: Any, swaps: bool, options: dict[str, Any]) -> list[str]:
    """What the host read in STEPS steps of two micro-batches each."""
    rank, _ = toys.world()
    watch, model = Watch(), make()
    dtype = options.get("param_dtype", torch.float32)
    store = swapping.SwappingStore() if swaps else None
    optimizer = zero_core.shard(model, build(model.parameters()), observer=watch, store=store, **options)
    batches = [toys.data(step, rank).to(dtype) for step in range(2 * STEPS)]
    micro = 1 if options.get("update_in_backward") else 2
    with Calls(watch), Operators(watch):
        for step in range(STEPS):
            for m in range(micro):
                toys.loss_of(model, batches[2 * step + m]).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer.close()
    return watch.read


OPTIONS = [
    {"stage": 0},
    {"stage": 3, "max_grad_norm": 0.1, "resident_bytes": 4000},
    {"stage": 2, "param_dtype": torch.bfloat16, "loss_scale": 8.0},
    {"stage": 1, "param_dtype": torch.bfloat16, "reduce_dtype": torch.float32, "max_grad_norm": 0.1},
]


@pytest.mark.parametrize("build", [sgd, fused])
@pytest.mark.parametrize("options", [*OPTIONS, {"stage": 3, "update_in_backward": True}], ids=str)
def test_one_rank_reads_the_norm_and_nothing_else(options, build):
    for swaps in (False, True):
        assert reads(toys.Stack, build, swaps, options) == ["tensor", "tolist"] * STEPS  # see Ranks.numbers


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_several_ranks_read_what_the_norm_exchanged(ranks, options):
    for seen in ranks(2).run(reads, toys.Stack, fused, True, options):
        assert seen == ["tensor", "tolist"] * STEPS  # the first is pinned on CUDA, see Ranks.numbers


@pytest.mark.parametrize("make", [lambda: toys.Checkpointed(False), toys.External, toys.Unused, toys.Frozen])
def test_one_rank_reads_nothing_else_off_the_beaten_track_either(make):
    seen = reads(make, fused, True, {"max_grad_norm": 0.1})
    assert seen == ["tensor", "tolist"] * STEPS


class Counted(Watch):
    """Refuses nothing, and counts norms, each of which is read."""

    def saw(self, what: str) -> None:
        self.read.append(what)

    def span(self, kind: str, unit: str) -> Any:
        self.read += ["norm"] if kind == "norm" else []
        return super().span(kind, unit)


def test_clipping_as_torch_does_it_reads_three_numbers_however_many_parameters_there_are():
    """The norm, the factor that torch computes from it, and in step() the norm once more."""
    for blocks in (1, 4):
        model, watch = toys.Stack(blocks), Counted()
        optimizer = zero_core.shard(model, sgd(model.parameters()), observer=watch)
        for step in range(STEPS):
            toys.loss_of(model, toys.data(step, 0)).backward()
            watch.read.clear()
            with Operators(watch):
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                optimizer.step()
            optimizer.zero_grad()
            assert watch.read == ["norm", "_local_scalar_dense", "norm"]
        optimizer.close()


def test_a_read_elsewhere_would_be_refused():
    model = toys.Stack()
    watch = Watch()
    optimizer = zero_core.shard(model, sgd(model.parameters()), observer=watch)
    model.head.register_forward_hook(lambda *seen: float(seen[2].detach().sum()) and None)
    with Calls(watch), Operators(watch), pytest.raises(AssertionError, match="outside of the norm"):
        model(toys.data(0, 0))
    optimizer.close()
