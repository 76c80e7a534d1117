"""What a TieredStore does when: which transfer, update and wait comes before which. Events order it, never clocks."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from zero_core.store import NullObserver, Observer
from zero_offload import MemoryByteStore, TorchStep
from zero_offload.testing import FaultyByteStore

from .harness import TILE, Driver, LateStep, make, same

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.timeout(60)]


@pytest.mark.promise("several-tiles")
def test_tiles_that_are_there_are_updated_while_the_next_one_is_read() -> None:
    step, nvme = LateStep(), FaultyByteStore(MemoryByteStore())
    driver = make({"parameters": "host", "gradients": "host", "optimizer": {"host": 0.4, "nvme": 0.6}}, nvme, step=step)
    driver.forward_backward()
    nvme.hold()
    driver.update()
    driver.store.parameters(0)  # both of unit 0's tiles are in memory
    assert step.most == 2 and driver.behind(1)
    driver.store.release(0)
    nvme.release()
    driver.store.wait()
    assert not step.under_way
    driver.store.close()


@pytest.mark.promise("several-tiles")
def test_what_was_started_is_done_before_a_failure_is_told() -> None:
    class Fails(LateStep):
        def start(self, tile: Any, segments: Any, scale: float) -> Any:
            self.thread = threading.current_thread()
            if len(self.under_way) == 2:
                raise ValueError("no third")
            return super().start(tile, segments, scale)

    step = Fails()
    driver = make("host", step=step)
    driver.step()
    with pytest.raises(ValueError, match="no third"):
        driver.store.wait()
    step.thread.join()
    assert not step.under_way
    driver.store.close()


@pytest.mark.promise("clipping-exact")
def test_parameters_wait_for_their_own_unit_only() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    driver = make({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, nvme, slots=3)
    driver.step()
    driver.store.wait()
    driver.forward_backward()
    driver.store.wait()  # what was read ahead is there: the first three of four tiles
    nvme.hold()
    driver.update()
    driver.store.parameters(0)  # its two tiles need no transfer any more; the writes are held
    driver.store.release(0)
    assert driver.behind(3)
    waiter = threading.Timer(0.2, nvme.release)
    waiter.start()
    driver.store.parameters(3)
    driver.store.release(3)
    waiter.join()
    driver.store.close()


@pytest.mark.promise("reads-in-backward")
def test_reads_begin_during_backward() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    driver = make({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, nvme, slots=3)
    driver.step()
    driver.store.wait()
    driver.forward()
    seen = len(nvme.log)
    driver.backward()
    driver.store.wait()
    ahead = nvme.log[seen:]
    assert [kind for kind, _, _ in ahead] == ["read"] * 3  # as many as there are slots, before any norm is known
    driver.update()
    driver.store.wait()
    kinds = [kind for kind, _, _ in nvme.log[seen:]]
    tiles = sum(record is not None for unit in driver.store.describe().units for record in unit.records)
    assert kinds.count("read") == tiles and kinds.count("write") == tiles
    driver.store.close()


@pytest.mark.promise("updated-stays")
def test_an_updated_unit_is_handed_over_from_memory() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    driver = make({"parameters": "nvme", "gradients": "host", "optimizer": "host"}, nvme)
    driver.forward_backward()
    driver.store.wait()

    def reads_of_the_first() -> int:
        events = driver.store.timeline.events()
        return sum((event.kind, event.unit) == ("swap_in", "parameters of u0") for event in events)

    before = reads_of_the_first()
    driver.update()
    driver.store.parameters(0)
    driver.store.release(0)
    driver.store.wait()  # then a read that it began is in the timeline
    assert reads_of_the_first() == before
    driver.store.close()


@pytest.mark.promise("no-overtaking")
def test_no_request_overtakes_a_write_of_the_same_bytes() -> None:
    """Transfers happen only when something waits for them: whoever does not wait is caught."""
    nvme = FaultyByteStore(MemoryByteStore(), lazy=True)
    driver = make("nvme", nvme, slots=3, driver={"numels": (TILE + 640, TILE // 2, 896)})

    driver.step(accumulate=2)
    driver.step()
    gradient = torch.ones(TILE // 2, dtype=torch.bfloat16)
    driver.store.accept_gradient(1, gradient)
    driver.store.discard_gradients()
    for _ in range(2):  # the same unit again, its first gradient and its parameters still on their way
        driver.store.accept_gradient(1, gradient)
        driver.store.update(driver.groups(), 1.0, [1], [[9, 9]] * 3)
    driver.everything()
    assert nvme.overtaken == []
    driver.store.close()


def three_slots_of_six_units(observer: Observer | None = None) -> tuple[FaultyByteStore, Driver]:
    """Parameters on nvme, after one forward; nothing is held back yet."""
    nvme = FaultyByteStore(MemoryByteStore())
    placement = {"parameters": "nvme", "gradients": "host", "optimizer": "host"}
    options = {"numels": (TILE // 2,) * 6, "frozen": (), "observer": observer or NullObserver()}
    driver = make(placement, nvme, driver=options)
    driver.forward()
    return nvme, driver


@pytest.mark.promise("no-delay")
def test_prefetch_waits_for_nothing_and_a_wait_for_a_slot_s_write_is_exposed() -> None:
    class Releases:
        """Nothing else ends the wait, and only a wait that is counted has a span."""

        @contextmanager
        def span(self, kind: str, unit: str) -> Iterator[None]:
            if kind == "wait" and unit == "u5":
                for store in held:
                    store.release()
            yield

    held: list[FaultyByteStore] = []  # the first forward may wait for u5, too
    nvme, driver = three_slots_of_six_units(Releases())
    for i in (2, 1, 0):
        driver.store.accept_gradient(i, driver.gradient(i))
    driver.store.wait()
    held.append(nvme)
    nvme.hold()
    driver.update()
    for i in (0, 1, 2):  # the three slots: updated and used, their writes held
        driver.store.parameters(i)
        driver.store.release(i)
    seen, exposed = len(nvme.log), driver.store.stats()["exposed_seconds"]
    driver.store.prefetch(5)
    assert len(nvme.log) == seen
    driver.store.parameters(5)
    assert driver.store.stats()["exposed_seconds"] > exposed
    driver.store.close()


@pytest.mark.promise("no-delay")
def test_the_update_waits_for_a_slot_s_write_without_holding_the_training_thread() -> None:
    nvme, driver = three_slots_of_six_units()
    driver.backward()
    driver.store.wait()
    nvme.hold()
    driver.update()  # units 0, 1 and 2 are in the three slots; their writes do not end
    for i in (0, 1, 2):
        driver.store.parameters(i)
        driver.store.release(i)  # the update of unit 3 may have the slot now, when its write is done
        for _ in range(20):
            threading.Event().wait(0.005)
            driver.store.release(i)  # a call that needs the tables, not the slot
    before = time.process_time()
    time.sleep(0.3)
    assert time.process_time() - before < 0.1  # the update thread sleeps
    assert driver.behind(3)
    nvme.release()
    driver.everything()
    driver.store.close()


@pytest.mark.parametrize("prefetch_bytes", [0, 1 << 30])
def test_requests_that_are_served_when_they_are_waited_for(prefetch_bytes: int) -> None:
    """Fails if a slot is written under a request, or if two requests for the same bytes are in flight together.

    With all units in slots of their own nothing but the next update comes between a write and the memory it reads.
    """

    def run(nvme: Any) -> list[torch.Tensor]:
        driver = make("nvme", nvme, driver={"prefetch_bytes": prefetch_bytes})
        for _ in range(3):
            driver.step(2)
        values = driver.everything()
        driver.store.close()
        return values

    nvme = FaultyByteStore(MemoryByteStore(), lazy=True)
    assert same(run(nvme), run(MemoryByteStore()))
    assert not nvme.overtaken and not nvme.changed


def test_without_overlap_an_update_has_ended_when_update_returns() -> None:
    class Slow(TorchStep):
        ended = 0

        def update(self, tile: Any, segments: Any, scale: float) -> None:
            time.sleep(0.02)
            super().update(tile, segments, scale)
            self.ended += 1

    step = Slow()
    driver = make("nvme", step=step, overlap=False)
    driver.step()
    ended = step.ended
    driver.store.wait()
    assert ended == step.ended > 1
    driver.store.close()
