"""Ends threads in the background before the interpreter exits. Owns the wait for them at exit.

[Note: threads at exit]
While Python (up to 3.13) finalises, it ends a daemon thread that comes back from native code by unwinding its stack.
torch's frames allow no exception, so the process dies of SIGABRT instead of ending with its exit code. A thread that
computes with torch is there at nearly every exit, one that waits for an answer if that comes just then. So the exit
begins by asking every such thread to end, and waits for them, `LEAVES` seconds at most.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

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
