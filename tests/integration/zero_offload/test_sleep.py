"""zero_core.sleep(model): a model gives its memory away between steps, and trains on with the same bits.

Fails if a lease outlives sleep(), if a value is not put aside, or if ranks end up half asleep.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_offload.training import Model, loss_of, tiered
from zero_core.util.freed_memory import HostMemory
from zero_offload import MemoryByteStore, OffloadError

pytestmark = pytest.mark.promise("sleep")


def made(placement: Any, stage: int, **options: Any) -> tuple[Model, Any]:
    torch.manual_seed(0)
    model = Model(16, 2)
    store = None if placement is None else tiered(placement, tile_numel=TILE)
    options = {"stage": stage, "param_dtype": torch.bfloat16, "max_grad_norm": 1.0, "store": store, **options}
    return model, zero_core.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options)


def slept(placement: Any, stage: int, sleeps: bool, options: dict[str, Any]) -> list[Tensor]:
    """Two micro-batches a step, between which it sleeps; and it sleeps when the step has begun its updates."""
    with small_chunks():
        model, optimizer = made(placement, stage, **options)

        def rest() -> None:
            if sleeps:
                zero_core.sleep(model, HostMemory() if placement is None else None)
                for error_of in (lambda: loss_of(model, 0), optimizer.step, optimizer.zero_grad):
                    with pytest.raises(Exception, match=r"sleeps: call zero_core.wake\(model\)"):
                        error_of()
                zero_core.wake(model)

        losses = []
        for number in range(2):
            for micro_batch in range(2):
                loss = loss_of(model, 2 * number + micro_batch)
                loss.backward()
                losses.append(loss.detach())
                rest()
            optimizer.step()
            optimizer.zero_grad()
            rest()
        values = kit.values(model)
        optimizer.close()
        return [*losses, *values]


CASES = [
    ("host", 3, {}),
    ("nvme", 3, {"resident_bytes": 1 << 30}),
    ("host", 0, {}),
    ("host", 1, {}),
    ("host", 2, {}),
    (None, 3, {}),
    (None, 2, {"param_dtype": torch.float32}),
]


@pytest.mark.parametrize("size", [1, 2])
def test_the_same_bits_as_without_sleep(ranks: Any, size: int) -> None:
    for placement, stage, options in CASES:
        expected = ranks(size).run(slept, placement, stage, False, options)
        found = ranks(size).run(slept, placement, stage, True, options)
        for mine, theirs in zip(found, expected, strict=True):
            assert all(map(torch.equal, mine, theirs)), (placement, stage, options)


def test_sleep_inside_a_step_is_refused_and_states_of_what_sleeps_are() -> None:
    with small_chunks():
        model, optimizer = made("host", 3)
        refused = pytest.raises(zero_core.ZeroError, match="inside forward or backward")
        handle = model.layers[0].register_forward_hook(lambda *_: zero_core.sleep(model))
        with refused:
            loss_of(model, 0)
        handle.remove()
        with zero_core.gathered(model), pytest.raises(zero_core.ZeroError, match="leave the with block first"):
            zero_core.sleep(model)
        loss_of(model, 0).backward()
        optimizer.step()
        full = optimizer.full_state_dict()
        zero_core.sleep(model)
        for call in (model.state_dict, optimizer.full_state_dict, lambda: optimizer.load_state_dict(full)):
            with pytest.raises(OffloadError, match=r"sleeps: call zero_core.wake\(model\)"):
                call()
        optimizer.close()


def test_a_store_whose_units_are_in_use_sleeps_with_its_model() -> None:
    """Between micro-batches, stage 2 keeps the parameters."""
    with small_chunks():
        store = tiered("host", tile_numel=TILE)
        model, optimizer = made("host", 2, store=store)
        loss_of(model, 0).backward()
        with pytest.raises(OffloadError, match=r"call zero_core.sleep\(model\), which frees them"):
            store.sleep(HostMemory())
        zero_core.sleep(model, HostMemory())
        zero_core.wake(model)
        loss_of(model, 1).backward()
        optimizer.step()
        optimizer.close()


def one_disk_is_full(kind: str) -> list[str]:
    """Rank 1 has no room to sleep, or cannot be read. Returns what each call said."""
    with small_chunks():
        model, optimizer = made("host", 3)
        rank = torch.distributed.get_rank()
        to = MemoryByteStore(1 << 12 if rank == 1 and kind == "sleep" else None)
        read, said = to.read, []

        def failing(*_: Any) -> Any:
            raise OSError("no such block")

        if kind == "wake":
            zero_core.sleep(model, to)
            to.read = failing if rank == 1 else read  # type: ignore[method-assign]
        with pytest.raises((zero_core.ZeroError, OSError)) as caught:
            zero_core.wake(model) if kind == "wake" else zero_core.sleep(model, to)
        said.append(str(caught.value))
        to.read = read  # type: ignore[method-assign]
        zero_core.wake(model)
        loss_of(model, 0).backward()
        optimizer.step()
        optimizer.close()
        return said


@pytest.mark.advice("not on this one: see their errors")
@pytest.mark.parametrize("kind", ["sleep", "wake"])
def test_what_one_rank_cannot_do_no_rank_does(ranks: Any, kind: str) -> None:
    well, failed = ranks(2).run(one_disk_is_full, kind)
    assert f"{kind}() failed on 1 of 2 ranks, not on this one" in well[0]
    assert ("raise capacity_bytes" if kind == "sleep" else "no such block") in failed[0]
