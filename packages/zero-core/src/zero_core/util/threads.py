"""Runs threads in the background, which end before the interpreter exits, and writes a checkpoint on one of them.

Owns the wait for them at exit. The caller gives the function that writes.

[Note: threads at exit]
While Python (up to 3.13) finalises, it ends a daemon thread that comes back from native code by unwinding its stack.
torch's frames allow no exception, so the process dies of SIGABRT instead of ending with its exit code. A thread that
computes with torch is there at nearly every exit, one that waits for an answer if that comes just then. So the exit
begins by asking every such thread to end, and waits for them, `LEAVES` seconds at most.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

NICE = 10  # a tenth of the share of a thread that trains
LEAVES = 30.0  # seconds that the exit waits for all of them


class Leaving(threading.Thread):
    """A daemon thread that runs `run`. At exit, `leave` is called on another thread, and perhaps several times, to make
    `run` return soon."""

    def __init__(self, name: str, run: Callable[[], object], leave: Callable[[], object]) -> None:
        super().__init__(target=run, name=name, daemon=True)
        self.leave = leave


def _leave() -> None:
    deadline = time.monotonic() + LEAVES
    while time.monotonic() < deadline:
        present = [thread for thread in threading.enumerate() if isinstance(thread, Leaving)]
        if not present:
            return
        for thread in present:  # one may begin another until it is gone
            thread.leave()
        present[0].join(0.05)


# Registered when zero_core is imported, and so called after the exit handlers of stores, which end their readers.
atexit.register(_leave)


class Saving:
    """The result of `save`: a checkpoint on disk, or with blocking=False one that is being written."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False  # whether somebody knows the error

    def begin(self, write: Callable[[], None], end: Callable[[], None], leave: Callable[[], None]) -> None:
        """Writes on another thread, then calls `end`, also after an error.

        leave: makes it stop waiting for other ranks. If the interpreter exits first, the folder keeps its former
        contents: the store is closed then, so the next read raises.
        """

        def run() -> None:
            try:
                if sys.platform == "linux":  # training goes first; elsewhere it would be the whole process
                    thread = threading.get_native_id()
                    os.setpriority(os.PRIO_PROCESS, thread, max(NICE, os.getpriority(os.PRIO_PROCESS, thread)))
                write()
            except BaseException as error:
                self._error = error
            finally:
                end()

        self._thread = Leaving("zero-core checkpoint", run, leave)
        self._thread.start()

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Returns when the checkpoint is on disk. Raises CheckpointError, or the error that the writing failed with."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error

    def end(self) -> None:
        """Does the same as wait(), except that it does not raise an error that wait() has raised."""
        if not self._told:
            self.wait()
