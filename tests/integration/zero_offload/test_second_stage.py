"""A model goes from the tiers of one stage to those of the next, unit by unit, with all bits of its masters.

Fails if a unit's memory stays after it was given up, if a disk that fails costs a value, or if the steps of a first
stage are taken for those of a second.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("zero_nvme")

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_core.toys import adamw
from tests.integration.zero_offload.training import Model, loss_of, tiered
from zero_core.errors import StoreError, ZeroError
from zero_nvme import Slab
from zero_offload import (
    BudgetError,
    GenerationError,
    MemoryByteStore,
    OffloadError,
    SwapError,
    TieredStore,
    offload_activations,
)
from zero_offload.memory.arena import Arena
from zero_offload.testing import FaultyByteStore

pytestmark = pytest.mark.promise("second-stage")

HALF = {"host": 0.5, "nvme": 0.5}
PLACES: dict[str, tuple[Any, ...]] = {
    **{place: (place,) for place in ("device", "host", "nvme")},
    "slots": ("nvme",),  # and each tile has one
    "mixed": (HALF, "host", {"host": 0.3, "nvme": 0.7}),
}


def tiers(place: str, disk: Any = None) -> TieredStore:
    return tiered(*PLACES[place], nvme=disk, tile_numel=TILE, slots=40 if place == "slots" else None)


def made() -> Model:
    torch.manual_seed(0)
    return Model(32, 2)


def train(model: Any, optimizer: Any, steps: int = 2) -> None:
    for seed in range(steps):
        kit.step(optimizer, loss_of(model, seed))


def masters(model: Any) -> dict[str, Tensor]:
    return kit.named_values(model, master=True)


def freeze(model: Any) -> list[Any]:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.1" in name or "head" in name)
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


# -- from tiers to tiers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "after", "stage", "dtype"),
    [
        *(("host", "nvme", 3, None), ("host", "nvme", 3, torch.bfloat16), ("nvme", "host", 3, torch.bfloat16)),
        *(("slots", "nvme", 3, torch.bfloat16), ("nvme", "slots", 3, None), ("slots", "slots", 1, torch.bfloat16)),
        *(("mixed", "mixed", 1, torch.bfloat16), ("device", "host", 0, None), ("nvme", "device", 2, torch.bfloat16)),
    ],
)
@kit.on_ranks(1, 2)
def test_a_second_stage_on_other_tiers_is_that_of_a_model_built_from_the_masters(
    before: str, after: str, stage: int, dtype: Any
) -> None:
    options = {"stage": stage, "param_dtype": dtype, "prefetch_bytes": 1 << 20}
    with small_chunks():
        model = made()
        train(model, zero_core.shard(model, adamw(model.parameters()), store=tiers(before), **options))
        values = masters(model)
        second = zero_core.shard(model, adamw(freeze(model)), store=tiers(after), **options)
        train(model, second)
        anew = made()
        anew.load_state_dict(values)
        control = zero_core.shard(anew, adamw(freeze(anew)), store=tiers(after), **options)
        train(anew, control)
        assert equal(masters(model), masters(anew))
        control.close()
        state = {name: value.clone() for name, value in model.state_dict().items()}
        zero_core.unshard(model)
        assert equal(dict(model.state_dict()), state)


def test_a_second_stage_takes_updates_under_way_and_offloading_of_activations_ends() -> None:
    with small_chunks():
        plain, model = made(), made()
        first = tiers("nvme")
        train(model, zero_core.shard(model, adamw(model.parameters()), store=first))  # an update is under way
        offload_activations(model, first, "recompute")
        second = zero_core.shard(model, adamw(model.parameters()), store=tiers("host"))
        assert "forward" not in vars(model.layers[0])
        offload_activations(model, None, "recompute")
        train(model, second)
        for _ in range(2):
            train(plain, adamw(plain.parameters()))
        zero_core.unshard(model)
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)  # of a rate of 1e-2


# -- memory ------------------------------------------------------------------------------------------------------------


def test_an_arena_keeps_only_what_it_is_told_to() -> None:
    arena = Arena(5 * 4096)
    blocks = [arena.take(4096) for _ in range(5)]
    for block in blocks:
        block.raw(0, 4096).fill_(7)
    arena.keep_only([blocks[3], blocks[1]])
    assert [int(block.raw(0, 4096).sum()) // 4096 for block in blocks] == [0, 7, 0, 7, 0]
    arena.keep_only([])
    assert not any(int(block.raw(0, 4096).sum()) for block in blocks)


def test_memory_of_a_unit_goes_when_the_next_store_has_it() -> None:
    """Fails if any but one unit is in both stores at once."""
    held: list[tuple[int, int]] = []
    with small_chunks():
        model = made()
        first = tiers("host")
        train(model, zero_core.shard(model, adamw(model.parameters()), store=first))

        class Counting(TieredStore):
            def attach(self, shards: Any, optimizer: Any, initial: Any, *, context: Any) -> None:
                def counted(i: int) -> Tensor:
                    master = initial(i)
                    gone = first._on.memory._given_up
                    held.append((i + 1, len(gone)))
                    return master

                super().attach(shards, optimizer, counted, context=context)

        zero_core.shard(model, adamw(model.parameters()), store=Counting(*["host"] * 3, tile_numel=TILE))
    assert held == [(n, n - 1) for n in range(1, len(held) + 1)]
    with pytest.raises(OffloadError, match="closed"):
        first.wait()


# -- where the next stage fails ----------------------------------------------------------------------------------------


@pytest.mark.promise("second-stage-refused")
@pytest.mark.parametrize("place", ["device", "host", "nvme", "mixed"])
@pytest.mark.parametrize("after", [0, 2, 4])
def test_a_disk_that_fails_midway_costs_no_value(after: int, place: str) -> None:
    with small_chunks():
        model = made()
        optimizer = zero_core.shard(model, adamw(model.parameters()), store=tiers(place), param_dtype=torch.bfloat16)
        train(model, optimizer)
        before = masters(model)
        disk = FaultyByteStore(MemoryByteStore())
        disk.fail("write", after=after)
        with pytest.raises((SwapError, StoreError), match="writing") as failure:
            zero_core.shard(model, adamw(model.parameters()), store=tiers("nvme", disk), param_dtype=torch.bfloat16)
        assert ("units were reset" in str(failure.value)) == isinstance(failure.value, StoreError)
        assert place != "nvme" or isinstance(failure.value, SwapError)  # it stays stored
        assert equal(masters(model), before)
        train(model, optimizer)
        second = zero_core.shard(model, adamw(model.parameters()), store=tiers("host"))
        train(model, second)
        second.close()


@pytest.mark.promise("second-stage-refused")
def test_a_plan_that_does_not_fit_leaves_the_first_stage_as_it_was() -> None:
    """A disk without room, and a budget that is too small: nothing has left its shards then, nor any state."""
    with small_chunks():
        model, twin = made(), made()
        optimizer = zero_core.shard(model, adamw(model.parameters()), store=tiers("host"))
        control = zero_core.shard(twin, adamw(twin.parameters()), store=tiers("host"))
        train(model, optimizer)
        train(twin, control)
        for store, error in (
            (tiers("nvme", MemoryByteStore(1 << 16)), OffloadError),
            (tiered("host", tile_numel=TILE, host_bytes=1 << 12), BudgetError),
        ):
            with pytest.raises(error):
                zero_core.shard(model, adamw(model.parameters()), store=store)
        train(model, optimizer)
        train(twin, control)
        assert equal(masters(model), masters(twin))


# -- durable -----------------------------------------------------------------------------------------------------------


def test_the_steps_of_a_first_stage_are_not_those_of_a_second(tmp_path: Any) -> None:
    def slab(name: str) -> Slab:
        return Slab(tmp_path, name=name, allow_memory=True)

    def begun(model: Any, disk: Any, *found: int) -> Any:
        store = tiered("nvme", nvme=disk, tile_numel=TILE, durable="process")
        optimizer = zero_core.shard(model, adamw(model.parameters()), store=store)
        assert zero_core.resume(model, optimizer).step in found
        return optimizer

    with small_chunks():
        model, disk = made(), slab("first")
        optimizer = begun(model, disk, 0)
        train(model, optimizer)
        with pytest.raises(GenerationError, match="has other data; give the store another slab"):
            begun(model, disk, 0)
        train(model, optimizer)
        before, other = masters(model), slab("second")
        second = begun(model, other, 0)
        assert equal(masters(model), before)
        disk.close()
        train(model, second, 3)
        zero_core.commit(model)
        after = masters(model)
        second.close()
        other.close()
        # The same program in a process that starts later: what the second stage left is gone on from.
        model, disk, other = made(), slab("first"), slab("second")
        begun(model, disk, 2, 3, 4)
        with pytest.raises((GenerationError, OSError)):
            begun(model, disk, 0)
        second = begun(model, other, 3)
        assert equal(masters(model), after)
        second.close()
        other.close()
        disk.close()


@pytest.mark.promise("second-stage-refused")
def test_a_store_that_sleeps_is_woken_first() -> None:
    with small_chunks():
        model = made()
        optimizer = zero_core.shard(model, adamw(model.parameters()), store=tiers("nvme"))
        train(model, optimizer)
        zero_core.sleep(model)
        with pytest.raises(ZeroError, match=r"whose store sleeps: call zero_core.wake\(model\) first"):
            zero_core.shard(model, adamw(model.parameters()))
        zero_core.wake(model)
        train(model, zero_core.shard(model, adamw(model.parameters())))
