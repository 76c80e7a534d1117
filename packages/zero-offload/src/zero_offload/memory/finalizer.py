"""Ends an object with threads and extents once: on close(), when it is collected, or when the interpreter exits.

Owns the choice of the thread. Not here: the ending itself (the owner provides it).

[Note: the collector's thread]
Python's garbage collector runs on whichever thread happens to trigger it, for example on the update thread, inside a
lock of the ByteStore. If the ending ran right there, that thread would join itself, or wait for a lock that it holds.
So an object that is collected is ended on a new thread, which the interpreter waits for before it exits. close() and
the exit run the ending on their own thread. A forked child does nothing, as threads and extents belong to the parent.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable


class Ending:
    """Calls `end` once: when this is called, when `owner` is collected, or at exit. `end` must not refer to `owner`."""

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        self._process = os.getpid()
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()
        weakref.finalize(owner, self._forgotten).atexit = False
        atexit.register(self)

    def __call__(self) -> None:
        end: Callable[[], None] | None = None
        try:
            with self._lock:
                end, self._end = self._end, None
            if end is not None and os.getpid() == self._process:
                end()
        except KeyboardInterrupt:
            self._end = self._end or end  # it can be called again
            raise
        if end is not None:
            atexit.unregister(self)

    def _forgotten(self) -> None:
        if self._end is None:
            return
        try:
            threading.Thread(target=self, name="zero-offload close").start()
        except RuntimeError:  # the interpreter is ending and makes no threads any more
            self()
