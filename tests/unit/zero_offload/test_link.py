"""A discrete device, simulated: the same bits as in host memory, whatever is copied as late as it may be."""

import threading
from typing import Any

import pytest
import torch

from zero_offload import MemoryByteStore
from zero_offload.testing import FaultyByteStore

from .harness import NUMELS, TILE, Driver, WaitingStep, make, threads
from .simulated import simulated_device

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_a_copy_begins_on_the_update_thread_when_the_unit_is_done() -> None:
    with simulated_device() as streams:
        step = WaitingStep()
        driver = make("host", step=step)
        driver.forward_backward()
        step.go.clear()
        driver.update()
        before = driver.store.stats()["link_up_bytes"]
        out = torch.full((NUMELS[0],), float("nan"), dtype=torch.bfloat16)
        arrival = driver.store.swap_in(0, out)
        assert driver.store.stats()["link_up_bytes"] == before  # its update is not done
        step.go.set()
        driver.store.wait()
        assert driver.store.stats()["link_up_bytes"] == before + 2 * NUMELS[0]  # nobody asked again
        assert bool(out.isnan().all())  # begun; it arrives for who waits
        follows = streams[0].follows
        arrival.wait()
        assert streams[0].follows == follows + 1 and not bool(out.isnan().any())
        driver.store.close()


@pytest.mark.promise("device-dropped-copy")
def test_what_was_dropped_is_not_copied_and_not_waited_for() -> None:
    class Tickets(FaultyByteStore):
        """Remembers the tickets of its reads."""

        def read(self, extent: Any, buffer: Any, offset: int = 0) -> Any:
            reads.append(super().read(extent, buffer, offset))
            return reads[-1]

    reads: list[Any] = []
    with simulated_device():
        nvme = Tickets(MemoryByteStore())
        placement = {"parameters": "nvme", "gradients": "host", "optimizer": "host"}
        driver = make(placement, nvme, driver={"numels": (TILE // 2,) * 6, "frozen": ()})
        driver.store.wait()
        nvme.hold()
        before = driver.store.stats()["link_up_bytes"]
        out = torch.empty(TILE // 2, dtype=torch.bfloat16)
        driver.store.swap_in(0, out).drop()  # no slot has it any more, and its read never ends
        assert driver.store.stats()["link_up_bytes"] == before
        nvme.release()
        assert reads
        while not all(read.done() for read in reads):
            driver.store.prefetch(0)
        driver.store.prefetch(0)  # begins what can begin
        assert driver.store.stats()["link_up_bytes"] == before
        driver.store.close()


def test_memory_of_a_copy_that_began_is_free_after_drop() -> None:
    with simulated_device() as streams:
        driver = make("host")
        out = torch.empty(NUMELS[0], dtype=torch.bfloat16)
        arrival = driver.store.swap_in(0, out)
        assert arrival.copied is not None and streams[0].lanes["swap_in"]
        arrival.drop()
        assert not streams[0].lanes["swap_in"]
        out.untyped_storage().resize_(0)
        driver.store.close()  # what is still queued is copied here, and would go to freed memory


@pytest.mark.promise("device-pending-copy")
@pytest.mark.parametrize("tier", ["host", "nvme", "device", "device alone"])
def test_an_update_does_not_change_what_is_still_to_be_copied(tier: str) -> None:
    """A forward that nobody waited for, such as an evaluation, then a step."""
    numels = (TILE // 2,) * 3
    placement: Any = {"parameters": tier, "gradients": "host", "optimizer": "host"}
    with simulated_device():
        driver = make("device" if tier == "device alone" else placement, driver={"numels": numels, "frozen": ()})
        driver.forward_backward()
        outs = [torch.empty(numel, dtype=torch.bfloat16) for numel in numels]
        arrivals = [driver.store.swap_in(i, out) for i, out in enumerate(outs)]
        while any(arrival.copied is None for arrival in arrivals):  # reads come to their end by themselves
            driver.store.prefetch(0)
        driver.update()
        driver.store.wait()
        for arrival in arrivals:
            arrival.wait()
        before = make("host", driver={"numels": numels, "frozen": ()})
        for i, out in enumerate(outs):
            assert torch.equal(out, before.store.parameters(i))
        for store in (driver.store, before.store):
            store.close()


def test_asking_for_a_unit_waits_for_no_copy_out_of_a_slot() -> None:
    placement = {"parameters": "nvme", "gradients": "host", "optimizer": "host"}
    with simulated_device() as streams:
        nvme = FaultyByteStore(MemoryByteStore())
        driver = make(placement, nvme, driver={"numels": (TILE // 2,) * 6, "frozen": ()})
        streams[0].random.random = lambda: 1.0  # type: ignore[method-assign]  # no copy is made unless it is waited for
        driver.store.wait()
        for i in (5, 4, 3):  # in the three slots since they were laid out
            assert driver.store.swap_in(i, torch.empty(TILE // 2, dtype=torch.bfloat16)).copied is not None
        seen = len(nvme.log)
        driver.store.prefetch(0)
        assert len(nvme.log) == seen and len(streams[0].lanes["swap_in"]) == 3
        assert float(driver.store.parameters(0)[0]) == float(driver.initial[0][0].bfloat16())  # this waits
        driver.store.release(0)
        driver.store.close()


class Held:
    """Lets the gradients' thread go on only when told to."""

    def __init__(self, driver: Driver) -> None:
        self.gate, self.inside = threading.Event(), threading.Event()
        self._squares = driver.store.step.chunk_norms_squared
        driver.store.step.chunk_norms_squared = self  # type: ignore[method-assign]

    def __call__(self, values: torch.Tensor) -> Any:
        self.inside.set()
        assert self.gate.wait(60)
        return self._squares(values)


@pytest.mark.promise("device-copies")
def test_each_gradient_and_each_unit_crosses_once_in_16_bits() -> None:
    with simulated_device():
        driver = make("host")
        assert driver.store.swaps_in
        setup = driver.store.stats()
        assert setup["link_up_bytes"] == setup["link_down_bytes"] == 0
        driver.step()
        moved = driver.store.stats()
        trained = sum(numel for i, numel in enumerate(NUMELS) if i not in driver.frozen)
        assert moved["link_down_bytes"] == 2 * trained
        assert moved["link_up_bytes"] == 2 * 2 * sum(NUMELS)  # forward and backward
        assert moved["device_bytes"] == 2 * 2 * max(NUMELS)  # two landing buffers; the small unit is frozen
        driver.store.close()


def test_a_failure_while_adding_reaches_the_training_thread() -> None:
    with simulated_device():
        nvme = FaultyByteStore(MemoryByteStore())
        driver = make({"parameters": "host", "gradients": "nvme", "optimizer": "host"}, nvme)
        driver.forward()
        nvme.fail("write")
        with pytest.raises(OSError, match="gradient of"):
            driver.backward()
            driver.update()
            driver.store.wait()
        with pytest.raises(OSError, match="gradient of"):
            driver.store.wait()
        driver.store.close()


def test_the_threads_end_with_the_store() -> None:
    def alive() -> set[threading.Thread]:
        return threads("zero-offload gradients") | threads("zero-offload update")

    of_others = alive()  # of stores that the collector has not freed yet
    with simulated_device() as streams:
        driver = make({"host": 0.5, "nvme": 0.5}, tile_numel=TILE)
        driver.step()
        assert alive() - of_others
        driver.store.close()
        assert streams[0].closed
    assert not alive() - of_others


def norms(driver: Driver) -> int:
    """How many gradients were added, by the spans of the timeline."""
    return sum(event.kind == "norm" for event in driver.store.timeline.events())


@pytest.mark.promise("device-norm-wait")
@pytest.mark.timeout(60)
def test_the_training_thread_never_waits_for_the_thread_that_adds() -> None:
    """First gradients are copied from where they landed while none has been added yet."""
    numels = (TILE // 2,) * 6
    with simulated_device():
        driver = make("host", driver={"numels": numels, "frozen": ()})
        for number in (1, 2):  # the second time after an update: gradients go straight to their place again
            driver.forward()
            added, held = norms(driver), Held(driver)
            driver.backward()
            assert driver.store.stats()["link_down_bytes"] == number * 2 * sum(numels) and norms(driver) == added
            assert held.inside.wait(60)
            held.gate.set()
            driver.update()
        driver.store.close()


def test_a_small_unit_that_is_open_all_along_takes_no_landing_from_the_others() -> None:
    numels = (TILE // 2, TILE // 2, 384, TILE // 2)
    with simulated_device():
        driver = make("host", driver={"numels": numels, "frozen": ()})
        plan = driver.store.describe()
        assert plan.own_landings == (2,)
        assert plan.bytes_of("device", "buffers") == driver.store.stats()["device_bytes"] == 2 * (2 * (TILE // 2) + 384)
        driver.forward()
        lent = [driver.store.gradient_buffer(i) for i in (2, 0, 1)]
        assert all(
            buffer is not None and buffer.numel() == numels[i] for buffer, i in zip(lent, (2, 0, 1), strict=True)
        )
        assert driver.store.gradient_buffer(3) is None
        driver.store.discard_gradients()
        assert driver.store.gradient_buffer(3) is not None
        driver.store.close()
