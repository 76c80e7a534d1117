"""What the training thread shares with those in the background: the condition, and how a thread ends.

Fails if Ctrl-C leaves the condition locked, or if close() waits for ever, frees what a thread still uses, or cannot be
repeated.
"""

import gc
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import pytest

from tests.interrupting import interrupted, lines_of
from zero_offload import MemoryByteStore, OffloadError, Timeline, TorchStep, monitor
from zero_offload.monitor import Condition, Monitor

from .harness import Driver, make, threads
from .test_endings import mapping_of

pytestmark = [pytest.mark.usefixtures("small_chunks"), pytest.mark.timeout(60), pytest.mark.promise("close-hangs")]


def taken_by_another(condition: Any) -> bool:
    found: list[bool] = []

    def take() -> None:
        found.append(condition.acquire(blocking=False))
        if found[0]:
            condition.release()

    thread = threading.Thread(target=take)
    thread.start()
    thread.join()
    return found[0]


@contextmanager
def interrupted_call(name: str) -> Iterator[None]:
    """KeyboardInterrupt at the entry of the next function in Python of this name, where signals are looked for."""

    def trace(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_name == name:
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def test_ctrl_c_at_the_end_of_a_with_block_leaves_the_condition_unlocked() -> None:
    for condition, free in ((Condition(), True), (threading.Condition(), False)):
        try:
            with interrupted_call("__exit__"):
                with condition:
                    pass
        except KeyboardInterrupt:
            pass
        assert taken_by_another(condition) is free


@pytest.mark.parametrize("depth", [1, 2])
def test_ctrl_c_in_a_wait_is_what_is_raised_wherever_it_comes(depth: int) -> None:
    """Also between the lines that give the lock back and that begin the `try` which takes it again."""

    def wait(condition: Any) -> None:
        with ExitStack() as blocks:
            for _ in range(depth):
                blocks.enter_context(condition)
            shared.wait_for_change()

    shared = Monitor(Timeline())
    shared.condition.wait = partial(shared.condition.wait, 0.001)
    moments = lines_of(lambda: wait(shared.condition))
    assert any("threading.py" in moment for moment in moments)
    for moment in range(len(moments)):
        with pytest.raises(KeyboardInterrupt), interrupted(moment):
            wait(shared.condition)
        assert taken_by_another(shared.condition)


def test_a_condition_wakes_who_waits_also_in_two_blocks() -> None:
    condition, done = Condition(), threading.Event()

    def wait() -> None:
        with condition, condition:
            condition.wait_for(lambda: woken)
            done.set()

    woken: list[int] = []
    thread = threading.Thread(target=wait)
    thread.start()
    with condition:
        woken.append(1)
        condition.notify_all()
    thread.join()
    assert done.is_set() and taken_by_another(condition)


def in_mid_update(go: threading.Event) -> tuple[Driver, Callable[[], Any]]:
    """Returns a driver whose update waits for `go`, and a weak reference to the mapping of its memory."""
    begun = threading.Event()
    go.set()  # attach steps tiles of its own

    class Waits(TorchStep):
        def update(self, tile: Any, segments: Any, scale: float) -> None:
            begun.set()
            go.wait()
            super().update(tile, segments, scale)

    driver = make({"host": 0.5, "nvme": 0.5}, MemoryByteStore(), step=Waits())
    mapping = mapping_of(driver.store)
    driver.forward_backward()
    go.clear()
    begun.clear()
    driver.update()
    begun.wait()
    return driver, mapping


def test_close_does_not_wait_for_ever_nor_free_what_an_update_uses(monkeypatch) -> None:
    go = threading.Event()
    of_others = threads("zero-offload update")  # of stores that the collector has not freed yet
    driver, mapping = in_mid_update(go)
    (thread,) = threads("zero-offload update") - of_others
    monkeypatch.setattr(monitor, "ENDS_SECONDS", 0.05)
    with pytest.raises(OffloadError, match="'zero-offload update' was asked to end and has not after 0 s.*End the pr"):
        driver.store.close()
    assert mapping() is not None
    go.set()
    thread.join()
    driver.store.close()


def test_close_can_be_repeated_after_ctrl_c(monkeypatch) -> None:
    go = threading.Event()
    driver, mapping = in_mid_update(go)

    def join(thread: threading.Thread, timeout: float | None = None) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(threading.Thread, "join", join)
        driver.store.close()
    assert mapping() is not None
    go.set()
    driver.store.close()
    gc.collect()
    assert mapping() is None
