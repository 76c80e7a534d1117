"""The residency of a unit: every sequence of calls, on one and two shards, with every kind of store and of failure.

Fails if a transition is not declared, a declared one is never taken, or memory or a lease outlives its state.
"""

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from zero_core.device import Side
from zero_core.layout import UnitLayout
from zero_core.pool import Pool
from zero_core.store import NullObserver
from zero_core.unit_memory import unit_memory
from zero_core.unit_memory.unit_memory import CAN_SWAP, TRANSITIONS, Residency, UnitContext, UnitMemory, without_memory

CALLS = ("prefetch", "unshard", "copy", "reshard")
FAILURES = ("", "store", "pool", "gather", "wait")


class World:
    """A store, a pool and ranks of `shards` shards; the next call of `refused` raises."""

    def __init__(self, shards: int, swaps_in: bool) -> None:
        self.refused, self.leases, self.arrivals = "", 0, 0
        self.swaps_in = swaps_in
        self.device = torch.device("cpu")
        self.shard = SimpleNamespace(rank=0, size=shards)
        self.side = Side(self.device)
        self.pool = Pool(self.device)
        self._take, self.pool.take = self.pool.take, self.take  # type: ignore[method-assign]
        self.layout = UnitLayout.build("unit", [("weight", (64,))], itemsize=4, shard_count=shards)
        self.values = torch.arange(float(self.layout.numel))

    def may(self, what: str) -> None:
        if self.refused == what:
            self.refused = ""
            raise ConnectionAbortedError(what)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        self.may("pool")
        return self._take(numel, dtype)

    def prefetch(self, i: int) -> None:
        self.may("store")

    def parameters(self, i: int) -> Tensor:
        self.may("store")
        self.leases += 1
        return self.values[: self.layout.shard_numel]

    def release(self, i: int) -> None:
        self.leases -= 1

    def swap_in(self, i: int, out: Tensor) -> Any:
        self.may("store")
        self.arrivals += 1
        return SimpleNamespace(wait=lambda: self.arrive(out), drop=lambda: self.arrive(None))

    def arrive(self, out: Tensor | None) -> None:
        if out is not None:
            self.may("wait")
            out.copy_(self.values[: out.numel()])
        self.arrivals -= 1

    def all_gather(self, whole: Tensor, part: Tensor, unit: str, *, exact: bool, rows: Any) -> str:
        self.may("gather")
        whole.copy_(self.values)
        return "work"

    def wait(self, work: Any, collective: str, unit: str) -> None:
        if work is not None:
            self.may("wait")


def drive(world: World, calls: Any) -> None:
    fakes: Any = world
    unit = UnitMemory(0, world.layout, torch.float32, UnitContext(fakes, fakes, world.pool, NullObserver()))
    for call, world.refused in calls:
        wanted = {"prefetch": unit.prefetch, "unshard": unit.unshard, "reshard": unit.reshard}
        try:
            unit.unshard(copy=True) if call == "copy" else wanted[call]()
        except ConnectionAbortedError:
            assert unit.residency is Residency.SHARDED, (calls, unit.residency)
        else:
            assert call == "prefetch" or unit.residency.unsharded == (call != "reshard"), (calls, unit.residency)
            assert not (call == "copy" and unit.residency is Residency.LENT), calls
        check(world, unit)
    world.refused = ""
    unit.reshard()
    check(world, unit)


def check(world: World, unit: UnitMemory) -> None:
    state, lent = unit.residency, world.pool.lent
    own = state in (Residency.UNSHARDING, Residency.UNSHARDED) and unit.brings_memory
    pays = state in (Residency.UNSHARDING, Residency.UNSHARDED) and not own
    assert lent == pays, (state, lent)
    assert world.leases <= 1 and (state in (Residency.LENT, Residency.UNSHARDING) or not world.leases), state
    assert (state is Residency.LENT) <= world.leases and (state is Residency.UNSHARDING or not world.arrivals), state
    assert unit.flat.untyped_storage().nbytes() == (unit.nbytes if own or state.unsharded else 0), state
    if state.unsharded:
        assert torch.equal(unit.flat, world.values[: unit.layout.numel])


@pytest.mark.promise("declared-states")
def test_no_sequence_of_calls_leaves_the_declared_transitions_or_memory_behind(monkeypatch: Any) -> None:
    """Four calls that succeed; and one that fails in any way between two that do. One call leads to every state."""
    seen: set[tuple[Residency, str]] = set()
    move = UnitMemory._move
    monkeypatch.setattr(UnitMemory, "_move", lambda unit, by: seen.add((unit.residency, by)) or move(unit, by))
    calls = [(call, "") for call in CALLS]
    sequences = [*product(calls, repeat=4), *product(calls, product(CALLS, FAILURES), calls)]
    for can_swap in {unit_memory.CAN_SWAP, False}:
        monkeypatch.setattr(unit_memory, "CAN_SWAP", can_swap)
        for shards, swaps_in, sequence in product((1, 2), (False, True), sequences):
            drive(World(shards, swaps_in), sequence)
    declared = {(old, by) for by, (sources, _) in TRANSITIONS.items() for old in sources}
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        declared -= {(Residency.SHARDED, "lend"), (Residency.LENT, "end")}
    assert seen == declared


@pytest.mark.parametrize("shape", [(1 << 20, 1 << 20), (3, 0, 2), (3,), ()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.uint8, torch.float8_e4m3fn])
def test_a_tensor_without_memory_may_be_larger_than_any_machine(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """A stacked parameter has its shape and no memory. Fails if its memory is asked for before it is given back."""
    if shape == (1 << 20, 1 << 20) and not CAN_SWAP:
        pytest.skip("torch cannot swap storages here")
    found = without_memory(shape, dtype, torch.device("cpu"))
    assert (found.shape, found.dtype, found.is_contiguous()) == (shape, dtype, True)
    assert found.untyped_storage().nbytes() == 0
