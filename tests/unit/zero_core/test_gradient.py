"""The gradient of a unit: every sequence of calls between two steps, with every kind of memory.

Fails if a state is another than [Note: the gradient of a step] says, if a value is lost, added twice or reduced after
it was dropped, or if memory of the pool outlives what lies in it.
"""

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_core.layout import UnitLayout
from zero_core.pool import Pool
from zero_core.store import NullObserver
from zero_core.unit_memory.unit_gradient import GradientState, Leftover, UnitGradient

ARRIVING = ("collect 0", "collect 1", "drop 0", "drop current", "reduce", "consumed", "discard")
KEEPING = (*ARRIVING, "keep", "keep late")
ZEROS = (0.0, 0.0)


class World:
    """A store, a pool and `replicas` ranks that all have the same gradients."""

    def __init__(self, replicas: int, dtype: torch.dtype, lends: bool) -> None:
        self.size, self.dtype, self.lends = replicas, dtype, lends
        self.shard, self.replicate = SimpleNamespace(rank=0, size=1), SimpleNamespace(rank=0, size=replicas)
        self.pool = Pool(torch.device("cpu"))
        shapes = [("a", (3,)), ("b", (2, 2))]
        self.layout = UnitLayout.build("unit", shapes, itemsize=dtype.itemsize, shard_count=1)
        self.memory = torch.empty(self.layout.numel, dtype=dtype)
        self.sum = torch.zeros(self.layout.numel)

    def gradient_buffer(self, i: int) -> Tensor | None:
        return self.memory if self.lends else None

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        self.sum += gradient

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        self.sum[start:stop] = 0

    def nothing(self, *given: Any) -> None:
        pass

    fold = average_replicas = wait = nothing


def drive(world: World, calls: tuple[str, ...]) -> None:
    fakes: Any = world
    parameters = [nn.Parameter(torch.empty(slot.shape, dtype=world.dtype)) for slot in world.layout.slots]
    unit: Any = SimpleNamespace(
        index=0, layout=world.layout, ranks=fakes, store=fakes, pool=world.pool, observer=NullObserver(), may_give=True
    )
    gradient = UnitGradient(unit, parameters, [0, 0], world.dtype)
    current: list[float] | None = None  # what each parameter has of this backward, of earlier ones, and in the store
    kept, stored, state = list(ZEROS), list(ZEROS), GradientState.NONE
    for n, call in enumerate((*calls, "reduce")):
        value = float(2**n)
        if call.startswith("collect"):
            k = int(call[-1])
            parameters[k].grad = torch.full_like(parameters[k], value)
            gradient.collect(k)
            current = current or list(ZEROS)
            current[k] += value
        elif call == "drop 0":
            gradient.drop(0)
            kept[0] = stored[0] = 0.0
        elif call == "drop current":
            gradient.drop_current()
            current = None
        elif call in ("keep", "keep late"):
            gradient.keep() if call == "keep" else gradient.keep_late()
            state |= GradientState.OWED if call == "keep" else GradientState.NONE
            kept, current = [a + b for a, b in zip(kept, current or ZEROS, strict=True)], None
        elif call == "reduce":
            gradient.reduce().finish()
            state = GradientState.REDUCED
            stored = [a + b + c for a, b, c in zip(kept, current or ZEROS, stored, strict=True)]
            kept, current = list(ZEROS), None
        elif call == "discard":
            gradient.discard(Leftover.NOTHING)
            state = GradientState.NONE
            world.sum.zero_()
            kept, stored, current = list(ZEROS), list(ZEROS), None
        elif gradient.owed:
            with pytest.raises(AssertionError, match="owed of unit 'unit' would be lost"):
                gradient.consumed(Leftover.STEPPED)
            return
        else:
            gradient.forget_dropped()  # as a step does
            gradient.consumed(Leftover.STEPPED)
            state = GradientState.NONE
            world.sum.zero_()
            stored = list(ZEROS)
        assert gradient.state is state, calls
        assert (gradient.current is None) == (current is None), calls
        pooled = gradient.current is not None and gradient.current.values is not world.memory
        assert world.pool.lent == pooled + (gradient.kept is not None), calls
        assert gradient.kept is not None or kept == list(ZEROS), calls
    for slot, expected in zip(world.layout.slots, stored, strict=True):
        found = world.sum[slot.offset : slot.stop]
        assert torch.equal(found, torch.full_like(found, expected)), (calls, found, expected)
    assert not world.sum[world.layout.slots[0].stop : world.layout.slots[1].offset].any(), "padding"


@pytest.mark.promise("declared-states")
def test_no_sequence_of_calls_leaves_the_declared_transitions_or_loses_a_gradient() -> None:
    for dtype, lends in itertools.product((torch.float32, torch.bfloat16), (False, True)):
        for calls in itertools.product(ARRIVING, repeat=3):
            drive(World(1, dtype, lends), calls)
        for calls in itertools.product(KEEPING, repeat=3):
            drive(World(2, dtype, lends), ("collect 1", *calls))
