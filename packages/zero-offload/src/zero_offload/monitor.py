"""Coordinates the training thread and background threads: one condition, the first failure, and the exposed time.

Owns no data. A thread that changes a value for which another may wait does so under `condition`, and notifies.
`Worker` runs a background thread and its queue. Not here: the work itself (in pipeline.py and device_link.py).
`Ending` ends an object with threads and extents once: on close(), when it is collected, or when the interpreter exits.

[Note: the collector's thread]
Python's garbage collector runs on whichever thread happens to trigger it, for example on the update thread, inside a
lock of the ByteStore. If the ending ran right there, that thread would join itself, or wait for a lock that it holds.
So an object that is collected is ended on a new thread, which the interpreter waits for before it exits. close() and
the exit run the ending on their own thread. A forked child does nothing, as threads and extents belong to the parent.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
import time
import weakref
from _thread import RLock
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch

from .core import NullObserver, Observer
from .errors import CLOSED, START_AGAIN, AsleepError, ClosedError, OffloadError
from .timeline import Timeline

ENDS_SECONDS = 300.0
POLL_SECONDS = 0.005
AGAIN = f"end other threads or raise ulimit -u, then {START_AGAIN}"
Item = TypeVar("Item")


class Stopped(BaseException):
    """Ends the update thread. Never leaves this package."""


class Condition(RLock, threading.Condition):  # type: ignore[misc]
    """A threading.Condition that Ctrl-C cannot leave locked.

    `with` acquires and releases the lock in C, where no signal interrupts. threading.Condition does it in Python. If a
    tool such as zero-sim has replaced threading's locks, this is threading.Condition.
    """

    def __new__(cls) -> Any:
        lock = threading.RLock()
        return super().__new__(cls) if type(lock) is RLock else threading.Condition(lock)

    def __init__(self) -> None:
        threading.Condition.__init__(self, self)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits as threading.Condition does, and holds the lock again after Ctrl-C.

        threading's own can be interrupted between the release of the lock and its `try`. The `with` block around it
        would then raise RuntimeError instead of KeyboardInterrupt.
        """
        lock: Any = self
        count = re.search(r"count=(\d+)", repr(lock))  # how often this thread has the lock, in every version of Python
        try:
            return super().wait(timeout)
        except BaseException:
            if not lock._is_owned() and count is not None:
                lock._acquire_restore((int(count[1]), threading.get_ident()))
            raise


class Monitor:
    """`condition` guards every flag here and the tables of the tiers. way_out: advice if a thread cannot start."""

    def __init__(self, timeline: Timeline, observer: Observer | None = None, *, way_out: str = AGAIN) -> None:
        self.condition = Condition()
        self.timeline, self._way_out = timeline, way_out
        self._observer = NullObserver() if observer is None or observer is timeline else observer
        self.failure: BaseException | None = None
        self.updates: Counter[int] = Counter()  # by unit, the updates of it that have not ended
        self.asleep = False  # the store's memory is freed
        self.blocked = False  # the training thread waits for the update thread: it will release nothing
        self.exposed_ns = 0
        self._process = os.getpid()  # the process with the threads and the memory
        self._local = threading.local()

    # -- the training thread ------------------------------------------------------------------------------------

    def check(self) -> None:
        """Raises the background's error, on every call; ClosedError after close(), AsleepError until wake()."""
        if os.getpid() != self._process:
            raise OffloadError(
                f"this TieredStore and its threads are in process {self._process}, and process {os.getpid()} was "
                "forked from it. Use it there, or attach another store here, after torch.set_num_threads(1), as the "
                "threads of OpenMP do not survive a fork"
            )
        if isinstance(self.failure, ClosedError):
            raise ClosedError(*self.failure.args)  # a new one: an exception keeps the frames that it went through
        if self.failure is not None:
            raise self.failure
        if self.asleep:
            raise AsleepError("the TieredStore sleeps: call zero_core.wake(model), or wake() of the store")

    @contextmanager
    def exposed(self, unit: str, *, unless: bool = False) -> Iterator[None]:
        """Counts the time inside as exposed, unless it is a thread in the background, or nothing is waited for."""
        if unless or getattr(self._local, "counted", False):  # or it is being counted already
            yield
            return
        start, self._local.counted = time.perf_counter_ns(), True
        try:
            with self.span("wait", unit):
                yield
        finally:
            self._local.counted = False
            self.exposed_ns += time.perf_counter_ns() - start

    def wait_until(self, ready: Callable[[], bool], unit: str) -> None:
        """Blocks the training thread until `ready()`. Raises the failure instead, if there is one."""
        with self.condition:
            if not ready() and self.failure is None:
                with self.exposed(unit):
                    self.blocked = True
                    self.condition.notify_all()
                    try:
                        self.condition.wait_for(lambda: ready() or self.failure is not None)
                    finally:
                        self.blocked = False
        self.check()

    def wait_for_unit(self, i: int, name: str) -> None:
        """Blocks the training thread until unit i, called `name`, has no update left."""
        if self.updates[i]:
            self.wait_until(lambda: not self.updates[i], name)

    def wait_for_change(self) -> None:
        """Sleeps until a notification. The caller holds `condition`. Raises as `check` does."""
        self.check()
        self.condition.wait()

    # -- both ---------------------------------------------------------------------------------------------------

    @contextmanager
    def guard(self) -> Iterator[None]:
        """Records an OSError of the training thread, such as a failed transfer, as the final failure."""
        try:
            yield
        except OSError as error:
            self.fail(error)
            raise

    @contextmanager
    def span(self, kind: str, unit: str) -> Iterator[None]:
        """Reports a span to the timeline and to zero-core's observer."""
        with self.timeline.span(kind, unit), self._observer.span(kind, unit):
            yield

    def fail(self, error: BaseException) -> None:
        """Records a failure, if it is the first."""
        with self.condition:
            if self.failure is None:
                self.failure = error
            self.condition.notify_all()

    # -- the threads in the background --------------------------------------------------------------------------

    def start(self, thread: threading.Thread) -> None:
        """Starts the thread, unless it runs. Raises OffloadError if that fails. Every later `check` raises it too."""
        if thread.ident is not None:
            return
        try:
            thread.start()
        except BaseException as error:
            failure = OffloadError(f"the thread {thread.name!r} could not be started ({error!r}): {self._way_out}")
            self.fail(failure)
            if isinstance(error, Exception):
                raise failure from error
            raise

    @contextmanager
    def thread(self) -> Iterator[None]:
        """Wraps a thread's work. `Stopped` ends it quietly. Any other error becomes the failure of the store.

        The thread's waits do not count as exposed time.
        """
        self._local.counted = True
        try:
            yield
        except Stopped:
            pass
        except BaseException as error:
            self.fail(error)

    def check_stop(self) -> None:
        """Raises Stopped once the store is closed or has failed."""
        if self.failure is not None:
            raise Stopped


class Worker(Generic[Item]):
    """A background thread and its queue: calls `work` with one item after another.

    `close` ends it between two, and so does the interpreter's exit. An item stays in the queue until it is done. The
    thread computes with as many threads as `torch.get_num_threads()` says where the item is put. By itself a new thread
    takes that number only once it has split an operation over elements, and until then a library multiplies matrices
    with a number of its own, which gives other bits.

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
        self._monitor.fail(ClosedError(CLOSED))
        if self._thread is threading.current_thread() or not self._thread.is_alive():
            return
        self._thread.join(ENDS_SECONDS)
        if self._thread.is_alive():
            raise OffloadError(
                f"the thread {self._thread.name!r} did not end within {ENDS_SECONDS:.0f} s, because an update or a "
                "transfer hangs, so the store keeps its memory. End the process"
            )

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
