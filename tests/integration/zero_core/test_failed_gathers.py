"""A gather that fails gives back what it had taken: the store's lease and the pool's memory. The next one works.

Fails if an error between `store.parameters` and the end of the gather leaves a unit slot held, or memory lent.
"""

import itertools
from collections import Counter
from typing import Any

import pytest
import torch

import zero_core
from tests.integration.zero_core import toys
from tests.swap import needs_swap
from zero_core.errors import CollectiveError
from zero_core.optim.device_store import DeviceStore
from zero_core.unit_memory import unit_memory
from zero_core.unit_memory.unit_memory import Residency


class Refused(Exception):
    pass


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
    """Losses of a model, before each of which a forward failed in another unit; and what was not given back."""
    rank, _ = toys.world()
    can_swap, unit_memory.CAN_SWAP = unit_memory.CAN_SWAP, unit_memory.CAN_SWAP and swap
    torch.manual_seed(0)
    model, store = toys.Stack(), Lending()
    optimizer = zero_core.shard(model, toys.adamw(model.parameters()), store=store)
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

    for victim in range(len(units)):
        owner, name = (units[0].pool, "take") if where == "pool" else (units[0].ranks, "all_gather")
        if where != "nowhere":
            setattr(owner, name, refuse)
            with pytest.raises((Refused, CollectiveError)):
                toys.loss_of(model, toys.data(0, rank))
            delattr(owner, name)
        zero_core.handle(model).settle()
        complaints += [f"unit {i} is held after {victim}" for i, n in store.held.items() if n]
        complaints += [f"{u.name} after {victim}: {u.residency}" for u in units if u.residency is not Residency.SHARDED]
        if units[0].pool.lent:
            complaints.append(f"memory is lent after {victim}")
        loss = toys.loss_of(model, toys.data(1, rank))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    optimizer.close()
    unit_memory.CAN_SWAP = can_swap
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
