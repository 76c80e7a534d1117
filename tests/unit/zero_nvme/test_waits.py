"""Waits for requests that do not complete: closing, cancelling and forgetting a queue end all the same.

The thread of the aiofiles backend is held between two requests, as a device that does not answer would hold it.
"""

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

import zero_nvme
from zero_nvme.io import io_queue
from zero_nvme.io.aiofiles_backend import PortableStore

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def go(monkeypatch) -> Iterator[threading.Event]:
    """Set it, and whatever was held goes on, with a minute to end."""
    monkeypatch.setattr(io_queue, "STALL_SECONDS", 0.05)

    class Go(threading.Event):
        def set(self) -> None:
            monkeypatch.setattr(io_queue, "STALL_SECONDS", 60)
            super().set()

    event = Go()
    yield event
    event.set()


def held(folder, go: threading.Event, **options) -> tuple[zero_nvme.Slab, PortableStore]:
    """A slab with a write in flight, and its store."""
    slab = zero_nvme.Slab(folder, 8192, "aiofiles", allow_memory=True, **options)
    extent = slab.allocate(8192)
    slab._store._loop.call_soon_threadsafe(go.wait)
    slab.write(extent, bytearray(8192))
    return slab, slab._store


@pytest.mark.advice("again when the device answers")
@pytest.mark.promise("slab-close-hangs")
def test_close_and_cancel_of_requests_that_do_not_move_say_so_and_can_be_repeated(tmp_path, go) -> None:
    slab, store = held(tmp_path, go)
    for call in (slab.close, slab.cancel):
        with pytest.raises(TimeoutError, match=rf"1 requests are in flight.*Call {call.__name__}\(\) again when"):
            call()
    assert not slab.closed
    go.set()
    slab.cancel()
    slab.close()
    assert slab.closed and not store._thread.is_alive()


@pytest.mark.promise("slab-close-hangs")
def test_sync_of_writes_that_do_not_move_says_so(tmp_path, go) -> None:
    with zero_nvme.File(tmp_path / "file", "w", "aiofiles") as file:
        file._store._loop.call_soon_threadsafe(go.wait)
        ticket = file.write(b"bytes")
        with pytest.raises(ValueError, match=r"is not complete; wait\(\) for it first"):
            ticket.exception()
        with pytest.raises(TimeoutError, match=r"Call sync\(\) again"):
            file.sync()
        go.set()
        file.sync()
        assert ticket.exception() is None
        assert (tmp_path / "file").read_bytes() == b"bytes"


@pytest.mark.promise("slab-close-hangs")
def test_requests_that_move_are_waited_for_as_long_as_it_takes(tmp_path, go, monkeypatch) -> None:
    slab, store = held(tmp_path, go)
    moved = iter(range(100))
    monkeypatch.setattr(
        store, "statistics", lambda: [{"read": {"bytes": 0}, "write": {"bytes": min(next(moved), 3)}}], raising=False
    )
    with pytest.raises(TimeoutError):
        slab.cancel()
    assert next(moved) == 5  # it has looked before the first wait and after each of four
    monkeypatch.undo()
    go.set()
    slab.close()


@pytest.mark.promise("slab-close-hangs")
def test_a_forgotten_queue_whose_requests_do_not_move_keeps_their_memory(tmp_path, go, monkeypatch) -> None:
    slab, store = held(tmp_path, go)
    descriptor, stuck, told = slab._paths[0].fd, [], []
    monkeypatch.setattr(io_queue, "_stuck", stuck)
    monkeypatch.setattr(sys, "unraisablehook", lambda unraisable: told.append(str(unraisable.exc_value)))
    del slab
    gc.collect()
    assert stuck == [store] and "no byte of them has moved" in told[0]
    os.fstat(descriptor)
    go.set()
    store.close()
    os.close(descriptor)


@pytest.mark.promise("aiofiles-ends")
def test_a_queue_forgotten_on_the_thread_of_its_backend_does_not_wait_for_itself(tmp_path, go) -> None:
    slab, store = held(tmp_path, go)
    slab.cycle = slab  # type: ignore[attr-defined]  # only the collector ends it
    descriptor, collected = slab._paths[0].fd, threading.Event()
    gc.disable()
    try:
        store._loop.call_soon_threadsafe(lambda: (gc.collect(), collected.set()))
        del slab
        go.set()
        assert collected.wait(60)
    finally:
        gc.enable()
    store._thread.join(60)
    assert not store._thread.is_alive() and not store._live
    with pytest.raises(OSError):
        os.fstat(descriptor)


@pytest.mark.promise("aiofiles-ends")
def test_a_request_that_waits_for_room_is_refused_when_the_queue_is_closed(tmp_path, go) -> None:
    slab, store = held(tmp_path, go, max_requests=1)
    refused: list[BaseException] = []

    def submit() -> None:
        try:
            store.submit(True, 0, 0, 0, None)
        except ValueError as error:
            refused.append(error)

    thread, closing = threading.Thread(target=submit), threading.Thread(target=store.close)
    thread.start()
    while not store._changed._waiters:  # type: ignore[attr-defined]
        pass
    closing.start()
    thread.join(60)
    assert "closed" in str(refused)
    go.set()
    closing.join(60)
    slab.close()
    assert not store._thread.is_alive()


@pytest.mark.promise("aiofiles-ends")
def test_close_that_ctrl_c_interrupts_at_its_end_closes_the_files(tmp_path, go, monkeypatch) -> None:
    slab, store = held(tmp_path, go)
    descriptor = slab._paths[0].fd
    file = os.stat(descriptor)
    go.set()

    usual = threading.Thread.join

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        if thread is store._thread:  # and not a thread of its executor, which that thread joins
            raise KeyboardInterrupt
        usual(thread, timeout)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", join)
        slab.close()
    with suppress(OSError):  # another thread may have opened a file under the same number since
        assert not os.path.samestat(file, os.stat(descriptor))
    store._thread.join(60)
    assert not store._thread.is_alive()
    slab.close()
