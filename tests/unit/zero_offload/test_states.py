"""What stays in slots from one step to the next, counted in reads."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from zero_offload import MemoryByteStore, TieredStore
from zero_offload.testing import FaultyByteStore

from .harness import TILE, Driver, make, same

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.promise("slots-not-read-again")]


def reads(optimizer: str, gradients: str, slots: int) -> int:
    """In the third step of eight tiles, one a unit. Reads begin early, so the store is waited for after each step."""
    nvme = FaultyByteStore(MemoryByteStore())
    placement = {"parameters": "host", "gradients": gradients, "optimizer": optimizer}
    driver = make(placement, nvme, slots=slots, driver={"numels": (TILE // 2,) * 8, "frozen": ()})
    for _ in range(3):
        seen = len(nvme.log)
        driver.step()
        driver.store.wait()
    found = sum(kind == "read" for kind, *_ in nvme.log[seen:])
    driver.store.close()
    return found


@pytest.mark.parametrize(("slots", "expected"), [(3, 8), (5, 6), (7, 4), (8, 0)])
def test_the_first_states_are_not_read_again(monkeypatch: pytest.MonkeyPatch, slots: int, expected: int) -> None:
    """Fails if a slot is given away to a tile that is needed later, or if what is in a slot is read."""
    monkeypatch.setattr("zero_offload.memory.slots.PASSING_SLOTS", 3)
    assert reads("nvme", "host", slots) == expected


@pytest.mark.parametrize(("slots", "expected"), [(3, 5), (5, 3), (8, 0)])
def test_gradients_that_are_still_in_slots_are_not_read(slots: int, expected: int) -> None:
    """Backward ends with the units that the update begins with. Fails if their gradients make room for later ones."""
    assert reads("host", "nvme", slots) == expected


class OneByOne(Driver):
    """Updates each unit when its gradient has come, as update_in_backward does."""

    def backward(self, micro_batch: int = 0) -> None:
        self.step_number += 1
        for i in reversed(self.units):
            self.one(i, micro_batch)

    def one(self, i: int, micro_batch: int = 0) -> None:
        self.store.accept_gradient(i, self.gradient(i, micro_batch))
        steps = [[self.step_number] * len(spec.segments) for spec in self.specs]
        self.store.update(self.groups(), 1.0, [i], steps)

    def step(self, accumulate: int = 1) -> None:
        self.forward_backward()


def one_by_one(nvme: Any, slots: int | None, optimizer: str = "nvme") -> OneByOne:
    """Eight tiles, one a unit."""
    placement = {"parameters": "host", "gradients": "host", "optimizer": optimizer}
    store = TieredStore(nvme=nvme, tile_numel=TILE, slots=slots, **placement)
    return OneByOne(store, numels=(TILE // 2,) * 8, frozen=())


def read_units(log: Sequence[tuple[str, int, int]]) -> list[int]:
    """Whose states were read, in order. Extents of the units lie in their order."""
    places = sorted({offset for kind, offset, _ in log if kind == "write"})
    return [places.index(offset) for kind, offset, _ in log if kind == "read"]


@pytest.mark.parametrize(("slots", "stay"), [(4, 2), (5, 2), (8, 8)])
def test_updates_in_backward_keep_what_the_next_forward_needs_first(slots: int, stay: int) -> None:
    """Fails if the tiles of the first units lose their slots to those that were updated long before them."""
    nvme = FaultyByteStore(MemoryByteStore())
    driver = one_by_one(nvme, slots)
    for _ in range(3):
        driver.step()
    driver.store.wait()
    seen = len(nvme.log)
    driver.step()
    driver.store.wait()
    found = read_units(nvme.log)[len(read_units(nvme.log[:seen])) :]
    driver.store.close()
    ahead = slots - stay  # that may have been read before the step began
    assert set(found) >= set(range(stay, 8 - ahead)) and not set(found) & set(range(stay))


def test_what_was_read_ahead_of_updates_in_backward_is_what_the_caller_has_written() -> None:
    found = []
    for optimizer in ("host", "nvme"):
        driver = one_by_one(MemoryByteStore(), 5 if optimizer == "nvme" else None, optimizer)
        for number in range(6):
            driver.step()
            values = torch.full((TILE // 2,), 0.01 * number)
            driver.store.write_state(7 - number, "exp_avg", 0, values)  # it may be in a slot already, or on its way
            driver.step()
        found.append([driver.store.read_state(i, "master", 0, TILE // 2) for i in range(8)])
        driver.store.close()
    for host, stored in zip(*found, strict=True):
        assert same(host, stored)
