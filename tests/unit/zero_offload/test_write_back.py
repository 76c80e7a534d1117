"""What stays in slots is not written, and nothing is lost by that.

Fails if a tile that stays is written in each step, if a value that only a slot has is evicted, forgotten or read from
the tier, or if a write that fails, or Ctrl-C, loses one in sleep().
"""

from contextlib import suppress
from typing import Any

import pytest
import torch

from zero_offload import MemoryByteStore, SwapError, TorchStep
from zero_offload.memory.transfers import InFlight
from zero_offload.planning.traffic import Shape, account
from zero_offload.testing import FaultyByteStore

from .harness import TILE, Driver, make, same

pytestmark = pytest.mark.usefixtures("small_chunks")

NUMELS = tuple(2 * TILE + 128 * (i % 3) for i in range(6))  # 12 to 18 tiles
MODEL = {"numels": NUMELS, "frozen": (2,)}
KINDS = ("parameters", "gradients", "optimizer")


@pytest.fixture
def two_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few tiles pass, so that a small model has some that stay."""
    monkeypatch.setattr("zero_offload.memory.slots.PASSING_SLOTS", 2)


def driver_of(placement: Any, slots: int | None, nvme: Any = None, layout: str = "split") -> Driver:
    return make(placement, nvme, slots=slots, step=TorchStep(layout), driver=MODEL)


def end(driver: Driver) -> list[torch.Tensor]:
    values = driver.everything()
    driver.store.close()
    return [*values, torch.tensor(driver.losses), torch.tensor(driver.norms)]


def train(driver: Driver, *, accumulate: int = 1, sleeps: bool = False) -> list[torch.Tensor]:
    """Steps that leave units out, one unit after another, and all at once; the tiles that stay change between them."""
    last = len(NUMELS) - 1
    for order in (None, None, [0, 1], None, [last], [last - 1], [0, 1, 3], None):
        for micro_batch in range(accumulate):
            driver.forward()
            driver.backward(micro_batch)
            if sleeps:
                driver.store.sleep()
                driver.store.wake()
        driver.update(order)
        driver.store.read_state(last, "exp_avg", 0, 1)  # of a tile that may have no slot
        driver.store.discard_gradients()
    return end(driver)


@pytest.mark.promise("same-bits", "slots-kept")
@pytest.mark.parametrize("sleeps", [False, True])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("slots", [3, 4, 9, 40])
@pytest.mark.parametrize(
    "placement", ["nvme", {"parameters": {"host": 0.4, "nvme": 0.6}, "gradients": "nvme", "optimizer": "nvme"}], ids=str
)
def test_bits_are_those_of_host_memory(
    placement: Any, slots: int, accumulate: int, sleeps: bool, two_pass: None
) -> None:
    """Also those of the other layout."""
    driver = driver_of(placement, slots, layout="fp32" if slots in (4, 40) else "split")
    kept = train(driver, accumulate=accumulate, sleeps=sleeps)
    assert same(kept, train(driver_of("host", None), accumulate=accumulate))


def moved(kind: str, slots: int, prefetch_bytes: int = 0) -> tuple[int, int]:
    """Bytes that a step reads and writes where only this kind is stored, of 12 equal tiles, 10 of them trained."""
    model = {"numels": (2 * TILE,) * 6, "frozen": (2,), "prefetch_bytes": prefetch_bytes}
    placement = {each: "nvme" if each == kind else "host" for each in KINDS}
    driver = make(placement, slots=slots, driver=model)
    found = []
    for _ in range(3):
        driver.step()
        driver.store.wait()
        found.append([driver.store.stats()[f"nvme_{each}_bytes"] for each in ("read", "write")])
    driver.store.close()
    return found[2][0] - found[1][0], found[2][1] - found[1][1]


@pytest.mark.promise("slots-kept")
@pytest.mark.parametrize("kind", ["gradients", "optimizer"])
def test_what_stays_is_neither_written_nor_read(kind: str, two_pass: None) -> None:
    """Of as many slots as tiles nothing moves; of 8 slots, 2 are for what passes, and 6 tiles of 10 stay."""
    assert moved(kind, 40) == (0, 0)
    _, everything = moved(kind, 3)  # of which one stays
    read, written = moved(kind, 8)
    assert 0 < 9 * written == 4 * everything and read <= written


@pytest.mark.promise("slots-kept")
@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("slots", [3, 5, 9, 40])
def test_a_step_writes_what_was_planned(slots: int, accumulate: int, two_pass: None) -> None:
    """Of tiles that are not equal: those that stay are counted by their own bytes."""
    driver = driver_of("nvme", slots)
    written = []
    for _ in range(3):
        driver.step(accumulate)
        driver.store.wait()
        written.append(driver.store.stats()["nvme_write_bytes"])
    planned = account(driver.store.describe(), Shape(accumulate=accumulate)).write_bytes("nvme")
    driver.store.close()
    assert written[2] - written[1] == planned


def test_parameters_are_not_written_where_each_unit_has_a_slot() -> None:
    assert moved("parameters", 3, prefetch_bytes=1 << 30) == (0, 0)
    assert min(moved("parameters", 3)) > 0


def interrupted_wait(number: int) -> Any:
    waits, stock = iter(range(number + 1)), InFlight.wait

    def wait(self: InFlight, requests: Any) -> None:
        if next(waits, None) == number:
            raise KeyboardInterrupt
        stock(self, requests)

    return wait


@pytest.mark.promise("slots-kept")
@pytest.mark.parametrize("slots", [8, 40])
def test_writes_that_fail_and_interrupts_in_sleep_lose_nothing(
    slots: int, two_pass: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of one of the writes, Ctrl-C in one of the waits for what was begun; then sleep() again."""

    def run(fails: bool) -> list[torch.Tensor]:
        nvme = FaultyByteStore(MemoryByteStore())
        driver = driver_of("nvme", slots, nvme)
        driver.step()
        driver.step()
        for number in (0, 1, 2) if fails else ():
            driver.store.wait()
            nvme.fail("write", after=number)
            with pytest.raises(SwapError, match=r" after update 2 failed: .*lost nothing"):
                driver.store.sleep(MemoryByteStore())
            nvme.fail("write", after=10**9)
        for number in (0, 1, 5) if fails else ():
            interrupted = suppress(KeyboardInterrupt) if number else pytest.raises(KeyboardInterrupt)
            with monkeypatch.context() as patched, interrupted:
                patched.setattr(InFlight, "wait", interrupted_wait(number))
                driver.store.sleep()
                driver.store.wake()  # writes that had ended already are not waited for
        driver.step()
        driver.store.sleep()
        driver.store.wake()
        driver.step()
        return end(driver)

    assert same(run(True), run(False))


def test_a_write_that_fails_when_a_tile_gives_its_slot_to_another_is_told_of(two_pass: None) -> None:
    """Units are updated all at once, then one by one, for which other tiles stay."""
    nvme = FaultyByteStore(MemoryByteStore())
    driver = driver_of({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, 9, nvme)
    driver.step()
    driver.step()
    driver.store.wait()
    nvme.fail("write")
    driver.forward_backward()
    driver.update([len(NUMELS) - 1, 1, 0, 3])
    with pytest.raises(SwapError, match=r"writing states of tile \d of unit u\d after update 2 failed"):
        driver.store.wait()
    driver.store.close()


def test_a_gradient_that_was_dropped_is_no_longer_in_the_way(two_pass: None) -> None:
    """zero_grad() after each backward, more often than there are slots; then a step, beside a fresh store."""

    def run(spoiled: bool) -> list[torch.Tensor]:
        driver = driver_of("nvme", 4)
        for _ in range(8 if spoiled else 0):
            driver.forward_backward()
            driver.store.discard_gradients()
        driver.losses.clear()
        driver.step()
        return end(driver)

    assert same(run(True), run(False))
