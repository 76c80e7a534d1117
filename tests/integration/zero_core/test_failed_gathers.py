"""A gather that fails gives back what it had taken: the store's lease and the pool's memory. The next one works."""

import itertools
from collections import Counter
from typing import Any
from unittest import mock

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.toys import Refused
from tests.swap import needs_swap
from zero_core.errors import CollectiveError
from zero_core.optim.device_store import DeviceStore
from zero_core.unit_memory import unit_memory
from zero_core.unit_memory.unit_memory import Residency


class Lending(DeviceStore):
    """Counts what is lent and not given back."""

    def __init__(self) -> None:
        super().__init__()
        self.held: Counter[int] = Counter()

    def parameters(self, i: int) -> torch.Tensor:
        self.held[i] += 1
        return super().parameters(i)

    def release(self, i: int) -> None:
        self.held[i] -= 1
        super().release(i)


class Waits:
    """The work of a gather, which fails when it is waited for."""

    def __init__(self, work: Any) -> None:
        self.work = work

    def wait(self) -> None:
        self.work.wait()
        raise RuntimeError("refused")


def failing(where: str, swap: bool = True) -> tuple[list[float], list[str]]:
    with mock.patch.object(unit_memory, "CAN_SWAP", unit_memory.CAN_SWAP and swap):
        return losses_and_leftovers(where)


def losses_and_leftovers(where: str) -> tuple[list[float], list[str]]:
    """Losses of a model, before each of which a forward failed in another unit; and what was not given back."""
    rank, _ = toys.world()
    store = Lending()
    model, optimizer = kit.sharded(toys.Stack, toys.adamw, store=store)
    units, complaints = zero_core.units(model), []
    gather, take, losses = units[0].ranks.all_gather, units[0].pool.take, []

    def refuse(*arguments: Any, **options: Any) -> Any:
        if where == "pool" and arguments[0] != units[victim].layout.numel:
            return take(*arguments)
        if where != "pool" and arguments[2] != units[victim].name:
            return gather(*arguments, **options)
        if where == "wait":
            return Waits(gather(*arguments, **options))
        raise Refused

    owner, name = (units[0].pool, "take") if where == "pool" else (units[0].ranks, "all_gather")
    for victim in range(len(units)):
        if where != "nowhere":
            with mock.patch.object(owner, name, refuse), pytest.raises((Refused, CollectiveError)):
                toys.loss_of(model, toys.data(0, rank))
        zero_core.handle(model).settle()
        complaints += [f"unit {i} is held after {victim}" for i, n in store.held.items() if n]
        complaints += [f"{u.name} after {victim}: {u.residency}" for u in units if u.residency is not Residency.SHARDED]
        if units[0].pool.lent:
            complaints.append(f"memory is lent after {victim}")
        losses.append(kit.step(optimizer, toys.loss_of(model, toys.data(1, rank))).item())
    optimizer.close()
    return losses, complaints


@pytest.mark.promise("failed-gather")
@pytest.mark.parametrize(
    ("where", "swap"),
    [pytest.param("pool", True, marks=needs_swap), *itertools.product(("gather", "wait"), (True, False))],
)
def test_a_gather_that_fails_gives_everything_back(ranks, where: str, swap: bool) -> None:
    undisturbed = ranks(2).run(failing, "nowhere")
    for (losses, complaints), (expected, _) in zip(ranks(2).run(failing, where, swap), undisturbed, strict=True):
        assert complaints == [] and losses == expected
