"""Ends that come early: a ByteStore closed too soon, Ctrl-C in a call, a store forgotten on the wrong thread.

Fails if a slot, an extent or memory stays behind, a thread dies without a word or waits for itself, or a half-read slot
is taken for a whole one.
"""

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from zero_offload import MemoryByteStore, OffloadError, SwapError, Timeline
from zero_offload.activations.stored_spill import StoredSpill
from zero_offload.memory.transfers import InFlight, Transfers
from zero_offload.testing import FaultyByteStore

from .harness import TILE, WaitingStep, make, threads

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.timeout(60)]


def join_closing() -> None:
    """Wait for the thread that ends a forgotten store."""
    for thread in threads("zero-offload close"):
        thread.join()


def mapping_of(store: Any) -> weakref.ref[Any]:
    """A reference to the mapping of a store's arena, which is None once the kernel has the memory back.

    An address would not tell: another thread may map it again.
    """
    return weakref.ref(store._attached.arena.memory.obj)


@pytest.mark.promise("closed-in-update")
def test_a_byte_store_closed_under_an_update_is_an_error_and_not_a_hang() -> None:
    nvme, step = MemoryByteStore(), WaitingStep()
    driver = make("nvme", nvme, step=step, slots=3)
    driver.forward_backward()
    step.go.clear()
    driver.update()
    nvme.close()
    step.go.set()
    with pytest.raises(SwapError, match="tile"):
        driver.store.wait()
    driver.store.close()


@pytest.mark.promise("close-releases")
def test_close_gives_the_memory_back_though_the_store_is_still_named() -> None:
    driver = make({"host": 0.5, "nvme": 0.5})
    driver.step()
    driver.store.wait()
    mapping = mapping_of(driver.store)
    assert mapping() is not None
    driver.store.close()
    gc.collect()
    assert mapping() is None
    assert driver.store.stats()["host_bytes"] == driver.store.describe().arena_bytes


@pytest.mark.promise("store-collected")
def test_a_store_forgotten_inside_a_lock_of_its_byte_store_does_not_wait_for_itself() -> None:
    class Collects(MemoryByteStore):
        armed = False

        def __init__(self) -> None:
            super().__init__()
            self.lock = threading.Lock()

        def allocate(self, nbytes: int) -> Any:
            with self.lock:
                if self.armed:
                    gc.collect()
                return super().allocate(nbytes)

        def free(self, extent: Any) -> None:
            with self.lock:
                super().free(extent)

    nvme = Collects()
    driver = make("nvme", nvme)
    driver.step()
    driver.store.cycle = driver.store  # type: ignore[attr-defined]
    gc.disable()
    try:
        del driver
        nvme.armed = True
        extent = nvme.allocate(4096)
    finally:
        gc.enable()
    join_closing()
    assert nvme.used_bytes == extent.nbytes


class Interrupting(FaultyByteStore):
    """A ByteStore in whose waits Ctrl-C arrives, once, after `interrupt(after=n)` further waits."""

    countdown: int | None = None

    def interrupt(self, after: int = 0) -> None:
        self.countdown = after

    def read(self, extent: Any, buffer: Any, offset: int = 0) -> Any:
        return _Interrupting(self, super().read(extent, buffer, offset))

    def write(self, extent: Any, buffer: Any, offset: int = 0) -> Any:
        return _Interrupting(self, super().write(extent, buffer, offset))


class _Interrupting:
    def __init__(self, store: Interrupting, ticket: Any) -> None:
        self._store, self._ticket = store, ticket

    def done(self) -> bool:
        return self._ticket.done()

    def wait(self, timeout: float | None = None) -> None:
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and self._store.countdown is not None:
            self._store.countdown -= 1
            if self._store.countdown < 0:
                self._store.countdown = None
                raise KeyboardInterrupt
        self._ticket.wait(timeout)


@pytest.mark.advice("call optimizer.zero_grad() and repeat the step's")
@pytest.mark.promise("ctrl-c-slots")
@pytest.mark.parametrize("after", range(6))
def test_ctrl_c_while_gradients_are_added_loses_no_slot(after: int) -> None:
    nvme = Interrupting(MemoryByteStore(), lazy=True)
    placement = {"parameters": "host", "gradients": "nvme", "optimizer": "host"}
    driver = make(placement, nvme, slots=3, driver={"numels": (6 * TILE,), "frozen": ()})
    gradient = torch.ones(6 * TILE, dtype=torch.bfloat16)
    driver.store.accept_gradient(0, gradient)
    for _ in range(4):
        nvme.interrupt(after)
        with pytest.raises(KeyboardInterrupt):
            driver.store.accept_gradient(0, gradient)
        for use in (driver.store.gradient_norm_squared, lambda: driver.store.accept_gradient(0, gradient)):
            with pytest.raises(OffloadError, match="gradient of unit u0 was interrupted.*zero_grad"):
                use()
        driver.store.discard_gradients()
        driver.store.accept_gradient(0, gradient)
    driver.store.accept_gradient(0, gradient)
    assert float(driver.store.gradient_norm_squared()) == 4.0 * 6 * TILE
    assert nvme.overtaken == []
    driver.store.close()


@pytest.mark.promise("ctrl-c-slots")
@pytest.mark.parametrize("after", range(5))
def test_ctrl_c_while_states_are_read_and_written_loses_no_slot(after: int) -> None:
    nvme = Interrupting(MemoryByteStore(), lazy=True)
    driver = make("nvme", nvme, slots=3)
    values = torch.randn(2 * TILE)
    for _ in range(5):
        nvme.interrupt(after)
        with pytest.raises(KeyboardInterrupt):
            driver.store.write_state(1, "exp_avg", 0, values)
            driver.store.read_state(1, "exp_avg_sq", 0, 2 * TILE)
            driver.everything()
        nvme.countdown = None
    driver.store.write_state(1, "exp_avg", 0, values)
    assert torch.equal(driver.store.read_state(1, "exp_avg", 0, 2 * TILE), values)
    driver.step()
    driver.everything()
    driver.store.close()


@pytest.mark.promise("ctrl-c-slots")
def test_ctrl_c_while_an_activation_is_read_does_not_pass_for_its_values() -> None:
    nvme = Interrupting(MemoryByteStore(), lazy=True)
    spill = StoredSpill(Transfers(nvme, InFlight(Timeline())), slots=2, piece_bytes=4096)
    packed = [spill.pack(torch.full((1024,), float(i)), str(i)) for i in range(4)]
    nvme.interrupt(after=1)  # the first wait is for the write that leaves the slot
    with pytest.raises(KeyboardInterrupt):
        packed[0].load()
    for i in (0, 3, 1, 2):
        assert torch.equal(packed[i].load(), torch.full((1024,), float(i)))
    spill.close()


@pytest.mark.promise("no-thread")
def test_an_update_thread_that_cannot_be_started_is_an_error_and_not_a_hang(monkeypatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    driver = make("host")
    driver.forward_backward()
    way_out = "end other threads or raise ulimit -u, then .*restart the run"
    with monkeypatch.context() as patch, pytest.raises(OffloadError, match=f"can't start.*{way_out}"):
        patch.setattr(threading.Thread, "start", start)
        driver.update()
    with pytest.raises(OffloadError, match="could not be started"):
        driver.store.wait()
    driver.store.close()
