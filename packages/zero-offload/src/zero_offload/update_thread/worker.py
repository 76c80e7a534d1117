"""Runs a background thread and its queue. Not here: the work itself (in pipeline.py and device_link.py).

An item stays in the queue until it is done. The thread computes with as many threads as `torch.get_num_threads()` says
where the item is put. By itself a new thread takes that number only once it has split an operation over elements, and
until then a library multiplies matrices with a number of its own, which gives other bits.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

import torch

from ..monitor import Monitor, join

POLL_SECONDS = 0.005

Item = TypeVar("Item")


class Worker(Generic[Item]):
    """Calls `work` with one item after another. `close` ends it between two, and so does the interpreter's exit.

    enter: called on the thread, first. trailing: called while there is no work, and soon again if it returned True.
    """

    def __init__(
        self,
        name: str,
        monitor: Monitor,
        work: Callable[[Item], object],
        *,
        enter: Callable[[], object] | None = None,
        trailing: Callable[[], bool] = lambda: False,
    ) -> None:
        self._monitor, self._work, self._enter, self._trailing = monitor, work, enter, trailing
        self._queue: deque[tuple[Item, int]] = deque()  # each item, and how many threads compute it
        # Daemon, so that a forgotten close() does not hold the interpreter; the finaliser joins it at exit, before the
        # memory under its native code goes.
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)

    def put(self, item: Item) -> None:
        with self._monitor.condition:
            self._queue.append((item, torch.get_num_threads()))
            self._monitor.start(self._thread)
            self._monitor.condition.notify_all()

    def asked(self) -> list[Item]:
        """The items that are not done, in order."""
        return [item for item, _ in self._queue]

    def idle(self) -> bool:
        return not self._queue

    def close(self) -> None:
        """Ends the thread after its current item. Idempotent. Raises OffloadError if that item does not end."""
        self._monitor.stop()
        join(self._thread)

    def _main(self) -> None:
        try:
            with self._monitor.thread(), torch.no_grad():
                if self._enter is not None:
                    self._enter()
                while True:
                    self._work(self._next())  # no name for it: while the thread waits, it keeps no memory
                    with self._monitor.condition:
                        self._queue.popleft()
                        self._monitor.condition.notify_all()
        finally:
            with self._monitor.condition:
                self._queue.clear()
                self._monitor.condition.notify_all()

    def _next(self) -> Item:
        with self._monitor.condition:
            self._monitor.check_stop()
            while not self._queue:
                self._monitor.condition.wait(POLL_SECONDS if self._trailing() else None)
                self._monitor.check_stop()
            item, threads = self._queue[0]
            if torch.get_num_threads() != threads:  # asking is enough for a thread that has computed nothing yet
                torch.set_num_threads(threads)
            return item
