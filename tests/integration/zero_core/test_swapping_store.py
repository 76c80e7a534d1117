"""A store that copies into the unit's own memory trains to the bits of one that lends: stages, ranks, interruptions.

Fails if memory is read before its copy is waited for, when it is NaN, if a copy is begun twice, left behind or written
over, or if memory is given back before its copy has ended.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_core
from tests import kit
from tests.integration.zero_core import swapping, toys


def trained(store: Any, make: Any = toys.Stack, **options: Any) -> list[Tensor]:
    """Four steps with all that may come between; losses, norms, an output of every evaluation, the last masters."""
    rank, _ = toys.world()
    torch.manual_seed(1)
    model = make()
    options = {"max_grad_norm": 0.5, **options}
    optimizer = zero_core.shard(model, toys.adamw(model.parameters()), store=store, **options)
    dtype, seen = options.get("param_dtype", torch.float32), []

    def loss(number: int) -> Tensor:
        value = toys.loss_of(model, toys.data(number, rank).to(dtype))
        seen.append(value.detach().clone())
        return value

    for step in range(4):
        if step == 1:
            interrupt_backward(model, lambda: loss(50))
            optimizer.zero_grad()
        if step == 2:
            with zero_core.gathered(model), torch.no_grad():
                model.head.weight.mul_(0.5)
            interrupt_forward(model, toys.data(51, rank).to(dtype))
        with zero_core.no_sync(model):
            loss(2 * step).backward()
        kit.step(optimizer, loss(2 * step + 1))
        seen.append(torch.tensor(optimizer.grad_norm))
        with torch.no_grad():
            seen.append(model(toys.data(60 + step, rank).to(dtype)).clone())
    seen += kit.values(model, master=True)
    for unit in zero_core.units(model):
        assert unit.flat.untyped_storage().nbytes() == 0, unit.name
    optimizer.close()
    assert not getattr(store, "under_way", None)
    return seen


def stop(*_: Any) -> None:
    raise toys.Refused


def interrupt_backward(model: Any, loss: Callable[[], Tensor]) -> None:
    """Raises half-way through the second block."""

    def watch(module: Any, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(stop)

    with model.blocks[1].norm.register_forward_hook(watch):
        value = loss()
        with pytest.raises(toys.Refused):
            value.backward()


def interrupt_forward(model: Any, x: Tensor) -> None:
    """Raises in the second block, when the third is under way."""
    with model.blocks[1].up.register_forward_pre_hook(stop), pytest.raises(toys.Refused):
        model(x)


RUNS = {
    **{f"stage {stage}": (toys.Stack, {"stage": stage}) for stage in (0, 1, 2, 3)},
    "nothing ahead": (toys.Stack, {"prefetch_bytes": 0}),
    "some stay": (toys.Stack, {"resident_bytes": 4000}),
    "bf16": (toys.Stack, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}),
}
OFF_THE_BEATEN_TRACK = {
    "reentrant": (partial(toys.Checkpointed, True), {"prefetch_bytes": 4000}),
    "segments": (partial(toys.Checkpointed, False, segment=2), {"prefetch_bytes": 4000}),
    **{m.__name__: (m, {"prefetch_bytes": 4000}) for m in (toys.Unused, toys.External, toys.Twice, toys.Frozen)},
}


@pytest.mark.promise("device-copying-store")
@pytest.mark.parametrize(
    ("size", "run"),
    [
        *((size, run) for size in (1, 2) for run in RUNS),
        *((1, run) for run in OFF_THE_BEATEN_TRACK),
        *((2, run) for run in ("reentrant", "segments", "External")),
        *((4, run) for run in ("Unused", "Twice")),
    ],
)
@kit.on_ranks()
def test_the_same_bits_as_a_store_that_lends(size, run):
    make, options = {**RUNS, **OFF_THE_BEATEN_TRACK}[run]
    store = swapping.SwappingStore()
    kit.assert_bits(trained(store, make, **options), trained(swapping.DeviceStore(), make, **options))
    assert store.counts["begun"] == store.counts["waited"] + store.counts["dropped"]
    assert store.most >= (2 if size == 1 and run in RUNS and run != "nothing ahead" else 1)


@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_on_one_rank_the_next_units_are_under_way_as_far_as_the_bytes_go(ahead):
    """The forward of a block finds the next one's copy begun, and no more than the budget."""
    block_bytes = 2176  # fp32, slots padded to 32 elements: 13, 13, 221, 17, 221
    store, seen = swapping.SwappingStore(), []
    model, _ = kit.sharded(toys.Stack(5), toys.sgd, store=store, prefetch_bytes=ahead * block_bytes)
    blocks = [unit for unit in zero_core.units(model) if "blocks" in unit.name]
    assert len(blocks) == 5 and all(unit.nbytes == block_bytes for unit in blocks)
    for block in model.blocks:
        block.norm.register_forward_pre_hook(lambda *_: seen.append(sorted(store.under_way.values())))
    for _ in range(2):
        seen.clear()
        with torch.no_grad():
            model(toys.data(0, 0))
    for k, under_way in enumerate(seen[:3]):
        assert under_way == [unit.index for unit in blocks[k + 1 : k + 1 + ahead]]


@pytest.mark.promise("device-dropped-copy")
def test_what_was_begun_and_is_not_wanted_is_dropped_and_never_waited_for():
    store, model = swapping.SwappingStore(), toys.Stack()
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()), store=store)
    with torch.no_grad():
        model(toys.data(0, 0))
    assert store.counts["dropped"] == 0
    before = store.counts["waited"]
    unit = zero_core.units(model)[-1]
    unit.prefetch()
    assert unit.residency.value == "unsharding" and unit.flat.untyped_storage().nbytes() == unit.nbytes
    optimizer.step()
    assert unit.residency.value == "sharded" and unit.flat.untyped_storage().nbytes() == 0
    assert store.counts["dropped"] == 1 and store.counts["waited"] == before
    optimizer.close()


@kit.on_ranks(1, 2)
def test_a_copy_that_fails_is_raised_where_it_is_waited_for_and_leaves_no_memory() -> None:
    """Every rank's copy of one unit fails."""
    store, model = swapping.SwappingStore(), toys.Stack()
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()), store=store)
    with torch.no_grad():
        model(toys.data(0, 0))
    store.fail_at = 2
    with pytest.raises(OSError, match="the copy failed"):
        model(toys.data(0, 0))
    optimizer.close()
    assert not store.under_way and store.counts["dropped"] >= 1
    assert all(unit.flat.untyped_storage().nbytes() == 0 for unit in zero_core.units(model))


@pytest.mark.promise("device-update-in-backward")
def test_an_update_in_backward_waits_for_its_gradient_after_the_next_units_backward() -> None:
    """The store's norm waits until the gradient is on the host: a device must have something to compute meanwhile."""
    events: list[str] = []
    store: Any = swapping.SwappingStore()
    model, optimizer = kit.sharded(toys.Stack, toys.sgd, store=store, update_in_backward=True)
    accept, norm = store.accept_gradient, store.gradient_norm_squared
    store.accept_gradient = lambda *given: events.append("accept") or accept(*given)
    store.gradient_norm_squared = lambda: events.append("norm") or norm()

    def watch(module: Any, arguments: Any, output: Tensor) -> None:
        output.register_hook(lambda _: events.append("backward"))

    for block in (model.embed, *model.blocks, model.head):
        block.register_forward_hook(watch)
    for _ in range(2):
        events.clear()
        kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
        assert events.count("norm") == 5
        waits = [k for k, event in enumerate(events) if event == "norm"][:-1]  # the last has nothing after it
        for k in waits:
            accepted = max(j for j, event in enumerate(events[:k]) if event == "accept")
            assert "backward" in events[accepted:k], events
    optimizer.close()
