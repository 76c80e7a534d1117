"""Writes a checkpoint on another thread. Owns the thread; the caller gives the function that writes."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

from .exit_threads import Leaving

NICE = 10  # a tenth of the share of a thread that trains


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
