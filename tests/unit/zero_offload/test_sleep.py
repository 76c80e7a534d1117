"""A store that sleeps: its memory is gone meanwhile, and what wakes up has the same bits.

Fails if a value that only memory has is not put aside, if a slot is believed after its memory went, or if a transfer
that fails loses anything.
"""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

from zero_core.util.freed_memory import HostMemory
from zero_offload import AsleepError, BudgetError, HostBudget, MemoryByteStore, OffloadError, PlacementError, SwapError
from zero_offload.testing import FaultyByteStore

from .harness import TILE, Driver, make, only_close_works, same, threads, until
from .simulated import simulated_device

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.promise("sleep")]

SMALL = {"numels": (TILE, TILE // 2), "frozen": ()}


def test_the_memory_is_gone_and_only_what_nothing_else_has_was_written() -> None:
    nvme = MemoryByteStore()
    driver = make({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, nvme, slots=3)
    driver.step()
    driver.store.wait()
    memory, used = weakref.ref(driver.store._attached.arena.memory), nvme.used_bytes
    driver.store.sleep()
    until(lambda: memory() is None)  # a thread of the tier's may let go of the last view a moment later
    assert driver.store.stats()["host_bytes"] == 0
    parameters = driver.store.describe().bytes_of("host", "parameters")
    assert parameters <= nvme.used_bytes - used < parameters + 4096 * len(driver.numels)  # no gradients, and no slots
    driver.store.wake()
    assert nvme.used_bytes == used and driver.store.stats()["host_bytes"] > parameters
    driver.store.close()


def test_until_wake_only_close_works() -> None:
    nvme = MemoryByteStore()
    driver = make("host", nvme, driver=SMALL)
    driver.step()
    driver.store.sleep()
    driver.store.sleep()
    with pytest.raises(AsleepError, match=r"call zero_core.wake\(model\)"):
        driver.store.parameters(0)
    assert nvme.used_bytes > 0
    only_close_works(driver, AsleepError)
    assert nvme.used_bytes == 0
    for call in (driver.store.sleep, driver.store.wake):
        with pytest.raises(OffloadError, match="closed"):
            call()


def test_a_store_forgotten_while_it_sleeps_gives_its_bytes_back() -> None:
    nvme = MemoryByteStore()
    driver = make("host", nvme, driver=SMALL)
    driver.store.sleep()
    assert nvme.used_bytes > 0
    del driver
    gc.collect()
    for thread in threads("zero-offload close"):
        thread.join()
    assert nvme.used_bytes == 0


def test_a_store_without_a_slower_tier_asks_for_one() -> None:
    driver = make("host", False, driver=SMALL)
    with pytest.raises(PlacementError, match=r"give sleep\(to=\) a ByteStore"):
        driver.store.sleep()
    driver.step()
    driver.store.sleep(HostMemory())
    driver.store.wake()
    driver.step()
    driver.store.close()


@contextmanager
def goes_on(nvme: Any, *, discrete: bool = False) -> Iterator[Driver]:
    """A driver with a gradient that waits; at the end it takes its step, and must have lost nothing."""
    placement = {"device": 0.5, "host": 0.5} if discrete else "host"
    with simulated_device() if discrete else nullcontext():
        drivers = [make(placement, each, driver=SMALL) for each in (nvme, MemoryByteStore())]
    for driver in drivers:
        driver.step()
        driver.forward_backward()
    yield drivers[0]
    values = []
    for driver in drivers:
        driver.update()
        values.append(driver.everything())
        driver.store.close()
    assert same(*values)


@pytest.mark.advice("raise capacity_bytes")
@pytest.mark.promise("full-slab")
@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_a_full_disk_and_an_error_while_it_falls_asleep_lose_nothing(full: bool, discrete: bool) -> None:
    inner = MemoryByteStore(capacity_bytes=1 << 14 if full else None)
    to = FaultyByteStore(inner, path="/mnt/nvme0/slab")
    with goes_on(MemoryByteStore(), discrete=discrete) as driver:
        to.fail("write", after=2)
        reason = "raise capacity_bytes" if full else "Input/output error"
        told = rf"sleep\(\) failed: .*{reason}.*is awake and has lost nothing: call sleep\(\) once more. Or give sleep"
        with pytest.raises(SwapError, match=told):
            driver.store.sleep(to)
        assert inner.used_bytes == 0
        driver.store.sleep(MemoryByteStore())  # as the error says
        driver.store.wake()


@pytest.mark.parametrize("discrete", [False, True])
def test_an_error_while_it_wakes_up_leaves_it_asleep_and_wake_can_be_repeated(discrete: bool) -> None:
    to = FaultyByteStore(MemoryByteStore(), path="/mnt/nvme0/slab")
    with goes_on(MemoryByteStore(), discrete=discrete) as driver:
        driver.store.sleep(to)
        to.fail("read", after=2)
        with pytest.raises(SwapError, match=r"wake\(\) failed: .*Input/output error.*call wake\(\) again"):
            driver.store.wake()
        gc.collect()
        assert not driver.store._attached.arena.has_memory
        with pytest.raises(AsleepError):
            driver.store.parameters(0)
        to.fail("read", after=1 << 30)  # so none from here on
        driver.store.wake()
        assert to.inner.used_bytes == 0
    to.fail("read")
    driver = make("host", driver=SMALL)
    driver.store.sleep(to)
    with pytest.raises(SwapError):
        driver.store.wake()
    driver.store.close()
    assert to.inner.used_bytes == 0


def test_a_gradient_that_was_added_in_part_is_refused() -> None:
    class Interrupted(type(make("host", driver=SMALL).store.step)):  # type: ignore[misc]
        def accumulate(self, into: Any, values: Any) -> None:
            raise KeyboardInterrupt

    driver = make("host", driver=SMALL, step=Interrupted())
    driver.backward()
    with pytest.raises(KeyboardInterrupt):
        driver.backward(1)
    with pytest.raises(OffloadError, match="zero_grad"):
        driver.store.sleep()
    driver.store.discard_gradients()
    driver.store.sleep()
    driver.store.close()


class Shrinking(MemoryByteStore):
    """Another process takes the room between reserve and allocate."""

    def reserve(self, total_bytes: int) -> None:
        super().reserve(total_bytes)
        self.capacity_bytes = 1 << 12


@pytest.mark.promise("several-models")
def test_stores_share_one_budget_of_host_memory() -> None:
    """Fails if a sleeping, a closed or a failed store keeps its share, or one wakes up without room."""
    alone = make("host", driver=SMALL)
    needed = alone.store.stats()["host_bytes"]
    alone.store.close()
    budget = HostBudget(needed + needed // 2)
    one = make("host", driver=SMALL, host_bytes=budget)
    assert budget.free_bytes == needed // 2
    with pytest.raises(
        BudgetError,
        match=r"Other stores have .* give HostBudget more bytes. Or call sleep\(\) or close\(\) of another store",
    ):
        make("host", driver=SMALL, host_bytes=budget)
    one.store.sleep()
    assert budget.free_bytes == budget.nbytes
    two = make("host", driver=SMALL, host_bytes=budget)
    with pytest.raises(BudgetError, match="this store needs .* left. Other stores have"):
        one.store.wake()
    with pytest.raises(AsleepError):
        one.store.parameters(0)
    two.store.close()
    for nvme in (MemoryByteStore(capacity_bytes=1 << 12), Shrinking(capacity_bytes=1 << 30)):  # after it has its arena
        with pytest.raises(BudgetError, match="raise capacity_bytes"):
            make("nvme", nvme, driver=SMALL, host_bytes=budget)
    assert budget.free_bytes == budget.nbytes
    one.store.wake()
    one.step()
    one.store.close()
    one.store.close()
    assert budget.free_bytes == budget.nbytes
