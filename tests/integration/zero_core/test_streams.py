"""[Note: streams], held on the CPU by streams that run nothing and remember what comes before what.

Fails if memory is written or read on one stream while another may still use it, freed or given back before compute has
seen its last use, allocated off the compute stream, or if prefetching lets compute wait.
"""

from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

import zero_core
from tests import kit
from tests.integration.zero_core import ordering, toys
from tests.integration.zero_core.test_swapping_store import interrupt_backward, interrupt_forward
from zero_core.device import Side


def ordered_run(swaps: bool, can_swap: bool, make: Any, options: dict[str, Any]) -> tuple[int, int, int]:
    """Four steps and two interruptions; (accesses checked, units begun ahead, side streams made)."""
    from zero_core.unit_memory import unit_memory

    rank, _ = toys.world()
    before, unit_memory.CAN_SWAP = unit_memory.CAN_SWAP, can_swap and unit_memory.CAN_SWAP
    try:
        if "mesh" in options:
            names = {"mesh_dim_names": ("replicate", "shard")}
            options = {**options, "mesh": init_device_mesh("cpu", options["mesh"], **names)}
        torch.manual_seed(1)
        model, store = make(), ordering.OrderedStore(swaps)
        optimizer = zero_core.shard(model, toys.adamw(model.parameters()), store=store, max_grad_norm=1.0, **options)
        ordering.watch(zero_core.handle(model))
        for step in range(4):
            if step == 2:
                interrupt_backward(model, lambda: toys.loss_of(model, toys.data(9, rank)))
                optimizer.zero_grad()
                interrupt_forward(model, toys.data(9, rank))
            kit.step(optimizer, toys.loss_of(model, toys.data(step, rank)))
        with zero_core.gathered(model):
            pass
        optimizer.close()
        return store.memory.accesses, store.ahead, store.streams.made
    finally:
        unit_memory.CAN_SWAP = before


def reentrant() -> toys.Stack:
    return toys.Checkpointed(True)


@pytest.mark.promise("device-memory-order")
@pytest.mark.parametrize(
    ("size", "swaps", "can_swap", "make", "options"),
    [
        (1, True, True, toys.Stack, {}),
        (1, True, True, reentrant, {"resident_bytes": 4000}),
        (1, False, True, toys.Stack, {}),
        (1, False, False, toys.Stack, {}),
        (2, True, True, toys.Stack, {}),
        (2, True, True, toys.External, {"stage": 1}),
        (2, True, True, reentrant, {"resident_bytes": 4000}),
        (2, False, True, toys.Stack, {}),
        (2, False, True, toys.External, {"stage": 2}),
        (2, False, False, toys.Stack, {}),
        (4, True, True, toys.Stack, {"mesh": (2, 2)}),
        (2, True, True, toys.Sometimes, {"stage": 2, "find_unused_parameters": True}),
    ],
)
def test_memory_is_used_in_the_order_of_its_streams(ranks, size, swaps, can_swap, make, options):
    for accesses, ahead, made in ranks(size).run(ordered_run, swaps, can_swap, make, options):
        assert accesses > 100
        assert (ahead > 10) == (size > 1 or swaps)
        assert made == (1 if size > 1 else 0)


@pytest.mark.promise("device-streams")
def test_hooks_on_several_streams_have_one_order():
    """Fails if what a hook has queued on another stream, a gradient say, is not waited for by the next hook's."""
    streams = ordering.Streams()
    side = Side(torch.device("cpu"), streams)
    side.go_on()
    stamp = streams.compute.tick()
    with streams.stream(ordering.Stream("of a parameter")):
        side.go_on()
        assert streams.now.has_seen(stamp)
        inside = streams.now.tick()
    assert not streams.compute.has_seen(inside)
    side.go_on()
    assert streams.compute.has_seen(inside)


def test_on_the_cpu_there_is_no_side_stream(monkeypatch):
    for name in ("current_stream", "stream", "Stream"):
        monkeypatch.setattr(torch.cpu, name, lambda *arguments, name=name: pytest.fail(f"{name} was asked for"))
    side = Side(torch.device("cpu"))
    side.go_on()
    with side.after_current():
        side.go_on()
