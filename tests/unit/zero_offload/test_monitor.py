"""What the training thread shares with those in the background: the condition, and how a thread ends.

Fails if Ctrl-C leaves the condition locked, or if close() waits for ever, frees what a thread still uses, or cannot be
repeated.
"""

import gc
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import pytest

from tests.interrupting import interrupted, lines_of
from zero_offload import MemoryByteStore, OffloadError, Timeline, monitor
from zero_offload.monitor import Condition, Monitor

from .harness import Driver, WaitingStep, make, threads
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


def test_ctrl_c_at_the_end_of_a_with_block_leaves_the_condition_unlocked() -> None:
    """At the entry of `__exit__`, where signals are looked for if it is a function in Python."""

    def trace(frame: Any, event: str, argument: Any) -> None:
        if frame.f_code.co_name == "__exit__":
            sys.settrace(None)
            raise KeyboardInterrupt

    before = sys.gettrace()
    for condition, free in ((Condition(), True), (threading.Condition(), False)):
        sys.settrace(trace)
        try:
            with condition:
                pass
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(before)
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


def in_mid_update() -> tuple[Driver, threading.Event, Callable[[], Any]]:
    """Returns a driver whose update waits for the event, and a weak reference to the mapping of its memory."""
    step = WaitingStep()
    driver = make({"host": 0.5, "nvme": 0.5}, MemoryByteStore(), step=step)
    mapping = mapping_of(driver.store)
    driver.forward_backward()
    step.go.clear()
    step.begun.clear()
    driver.update()
    step.begun.wait()
    return driver, step.go, mapping


def test_close_does_not_wait_for_ever_nor_free_what_an_update_uses(monkeypatch) -> None:
    of_others = threads("zero-offload update")  # of stores that the collector has not freed yet
    driver, go, mapping = in_mid_update()
    (thread,) = threads("zero-offload update") - of_others
    monkeypatch.setattr(monitor, "ENDS_SECONDS", 0.05)
    with pytest.raises(OffloadError, match="'zero-offload update' did not end within 0 s.*End the pr"):
        driver.store.close()
    assert mapping() is not None
    go.set()
    thread.join()
    driver.store.close()


def test_close_can_be_repeated_after_ctrl_c(monkeypatch) -> None:
    driver, go, mapping = in_mid_update()

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
