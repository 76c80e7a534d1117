"""A checkpoint that another thread writes. Owns the thread; what it writes, and from where, is the caller's."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable

__all__ = ["Saving"]

NICE = 10  # a tenth of a thread of training's share


def _give_way() -> None:
    """This thread takes what processor time training leaves. Where training waits for it, that is all there is."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)


class Saving:
    """What `save` returns: a checkpoint that is on disk already, or, with blocking=False, one that is being written."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._told = False  # whether somebody knows the error

    def begin(self, write: Callable[[], None], end: Callable[[], None]) -> None:
        """Write on another thread, then call `end`, whatever came of it."""

        def run() -> None:
            _give_way()
            try:
                write()
            except BaseException as error:
                self._error = error
            finally:
                end()

        # Daemon: where the interpreter exits before, the folder holds what it held.
        self._thread = threading.Thread(target=run, name="zero-core checkpoint", daemon=True)
        self._thread.start()

    def done(self) -> bool:
        """Whether wait() would return at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is on disk. Raises CheckpointError, or what else the writing failed with."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            self._told = True
            raise self._error

    def end(self) -> None:
        """As wait(), but an error that wait() has raised is not raised again."""
        if not self._told:
            self.wait()
