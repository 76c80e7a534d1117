"""The end of something with threads and extents: closed, forgotten, or still there when the interpreter exits.

Owns that it happens once, and on whose thread. What there is to do is its owner's.

[Note: the collector's thread]
Python's collector forgets an object wherever it happens to run: on the update thread, inside a lock of the ByteStore.
Whoever joined that thread there, or gave an extent back, would wait for itself. So what is forgotten is ended by a
thread made for it, which the interpreter waits for; close() and the exit do it themselves. A forked child does nothing:
all of it is the parent's.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["Ending"]


class Ending:
    """Calls `end` once: when it is called, when `owner` is forgotten, or at exit. `end` must not refer to the owner."""

    def __init__(self, owner: object, end: Callable[[], None]) -> None:
        self._process = os.getpid()
        self._end: Callable[[], None] | None = end
        self._lock = threading.Lock()
        weakref.finalize(owner, self._forgotten).atexit = False
        atexit.register(self)

    def __call__(self) -> None:
        with self._lock:
            end, self._end = self._end, None
        if end is not None:
            atexit.unregister(self)
            if os.getpid() == self._process:
                end()

    def _forgotten(self) -> None:
        if self._end is None:
            return
        try:
            threading.Thread(target=self, name="zero-offload close").start()
        except RuntimeError:  # the interpreter is ending and makes no threads any more
            self()
