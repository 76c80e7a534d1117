"""Warns of a long wait for other ranks: in which call, for which unit, from which line. Raises if calls crossed.

Owns the thread that watches the clock, and the notes of ranks for each other in the process group's store.

[Note: crossing ranks]
Every rank numbers its collectives. A rank that has waited for `SECONDS` logs a warning, writes its latest calls into
the store, and from then on reads what other ranks have written there. If its n-th call is not the n-th call of another
rank, neither of them can go on. The rank then makes gloo fail its connections, which ends its own wait and the waits of
the others, and each raises an error that names the two calls. Nothing is written or read before a rank has waited that
long, so a collective normally costs only a dictionary entry and a tuple.

[Note: a call of rank 0 alone]
`if rank == 0: torch.save(model.state_dict())` is right with plain torch, and gathers here. The other ranks may be in a
barrier meanwhile, which this module cannot see, up to the group's time-out. So ranks leave a mark in the store when
they make a call that is often made to save something, and rank 0 raises if it has been alone in it for `ALONE` times
`SECONDS`. Ranks that wait for rank 0 go on waiting: it may be writing a file.

[Note: a store out of reach]
The store belongs to another process, perhaps on another machine, and torch asks it without a limit: where the link is
cut, a question is never answered, and the next one waits for it. So each question is asked on a thread of its own, one
at a time, and the caller goes on after `ANSWER` seconds. The interpreter's exit waits for an open question as long as
for other threads, see [Note: threads at exit].
"""

from __future__ import annotations

import json
import linecache
import logging
import os
import sys
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CollectiveError
from ..util.threads import Leaving

SECONDS = 5.0  # until a wait is logged; only a warning, because a rank may take longer
ANSWER = 10.0  # seconds in which the process group's store has to answer
ALONE = 6  # times as long rank 0 waits in a call that no other rank has made
_LOG = logging.getLogger("zero_core")
_KEPT = 1024  # calls that are compared: a few steps of a large model
_OWN = (*map(os.path.dirname, (torch.__file__, os.path.dirname(__file__))), contextmanager.__code__.co_filename)
_Answer = TypeVar("_Answer")
_numbers = count()  # meshes are made in the same order on every rank
_Wait = tuple[float, str, str]  # since when, collective, unit


class Patience:
    """Of one mesh. `break_off` fails the waits of this rank, and with them the others'."""

    def __init__(self, rank: int, size: int, break_off: Callable[[], None]) -> None:
        self._rank, self._size, self._break_off = rank, size, break_off
        self.key = f"zero_core/{next(_numbers)}" if size > 1 else ""  # of the mesh
        self._calls: deque[tuple[str, str]] = deque(maxlen=_KEPT)
        self._count = 0  # collectives called so far
        self._told: _Wait | None = None
        self._waits: dict[int, _Wait] = {}  # by thread
        self._watcher: threading.Thread | None = None
        self._asking = threading.Lock()  # until the answer is there, whether or not anybody still waits for it
        self._assembled: Counter[str] = Counter()

    def called(self, collective: str, unit: str) -> None:
        """One more collective, which every rank must call as its next."""
        self._calls.append((collective, unit))
        self._count += 1

    @contextmanager
    def waiting(self, collective: str, unit: str) -> Iterator[None]:
        """Watches the block, which may wait for other ranks."""
        if self._watcher is None or not self._watcher.is_alive():  # a forked child has no threads
            over = threading.Event()
            self._watcher = Leaving("zero_core patience", partial(_watch, weakref.ref(self), over), over.set)
            self._watcher.start()
        thread = threading.get_ident()
        self._waits[thread] = time.monotonic(), collective, unit
        try:
            yield
        finally:
            del self._waits[thread]

    def assemble(self, call: str) -> None:
        """Wait on rank 0 for another rank to make this call too, and raise CollectiveError where none does for a while.

        See [Note: a call of rank 0 alone].
        """
        if self._size == 1:
            return
        key = f"{self.key}/{call}/{self._assembled[call]}"
        if self._rank:
            self._ask(lambda store: store.add(key, 1))
        else:
            with self.waiting(call, "the model"):
                pause, deadline = 0.001, time.monotonic() + ALONE * SECONDS
                while not self._ask(lambda store: store.add(key, 0)):
                    if time.monotonic() > deadline:
                        raise CollectiveError(
                            f"rank 0 of {self._size} called {call}, and no other rank did within {ALONE * SECONDS:.0f} "
                            f"s: it gathers from all ranks. Call it on every rank, outside of `if rank == 0`, and let "
                            "rank 0 save what it returns. zero_core.checkpoint.save and zero_core.save_pretrained "
                            "write from every rank, and need no such memory"
                        )
                    time.sleep(pause)
                    pause = min(0.1, 2 * pause)
        self._assembled[call] += 1

    def crossing(self) -> str | None:
        """The first call in which this rank and another one differ, as far as the others have written theirs."""
        mine = dict(enumerate(self._calls, self._count - len(self._calls)))
        for rank in range(self._size):
            key = f"{self.key}/{rank}"
            if (written := None if rank == self._rank else self._ask(partial(_value, key))) is None:
                continue
            first, calls = json.loads(written)
            for number, theirs in enumerate(calls, first):
                if number in mine and mine[number] != tuple(theirs):
                    return (
                        f"rank {self._rank} called {_text(*mine[number])} where rank {rank} called {_text(*theirs)} "
                        f"(collective {number + 1} of each)"
                    )
        return None

    def look(self) -> None:
        """On the watching thread: warns of each wait over `SECONDS`, and ends it if calls crossed."""
        for thread, wait in list(self._waits.items()):
            if time.monotonic() - wait[0] > SECONDS:
                with suppress(RuntimeError, OSError):  # the store belongs to another rank, which may have ended
                    self._tell(thread, wait)

    def _tell(self, thread: int, wait: _Wait) -> None:
        if self._told is not wait:
            self._told, seconds, what = wait, time.monotonic() - wait[0], _text(*wait[1:])
            _LOG.warning(
                "rank %d of %d has waited %.0f s for other ranks in %s, called from %s. Every rank must make this "
                "call, in the same order (zero-core's README lists such calls). It waits on, up to the timeout of the "
                "process group",
                *(self._rank, self._size, seconds, what, _caller(thread)),
            )
            calls = list(self._calls)
            written = json.dumps([self._count - len(calls), calls])
            self._ask(lambda store: store.set(f"{self.key}/{self._rank}", written))
        if self.crossing() is not None and self._waits.get(thread) is wait:
            self._break_off()

    def _ask(self, question: Callable[[Any], _Answer]) -> _Answer:
        """Returns question(store) for the process group's store; see [Note: a store out of reach].

        Raises CollectiveError where there is no answer in time, and any error of `question`.
        """
        store = dist.distributed_c10d._get_default_store()
        answer: futures.Future[_Answer] = futures.Future()

        def ask() -> None:
            try:
                answer.set_result(question(store))
            except BaseException as error:
                answer.set_exception(error)
            finally:
                self._asking.release()

        if self._asking.acquire(timeout=ANSWER):
            Leaving("zero_core store", ask, partial(futures.wait, [answer], 1.0)).start()
            if futures.wait([answer], ANSWER).done:
                return answer.result()
        raise CollectiveError(
            f"the key-value store of the process group did not answer within {ANSWER:.0f} s: its process is gone, or "
            "the link to its machine is cut. End all ranks, and resume from the last checkpoint"
        )


def _value(key: str, store: Any) -> bytes | None:
    return store.get(key) if store.check([key]) else None


def _text(collective: str, unit: str) -> str:
    return f"{collective} of {unit!r}"


def _watch(of: weakref.ref[Patience], over: threading.Event) -> None:
    """Until the mesh is gone, or the interpreter exits."""
    while (patience := of()) is not None:
        patience.look()
        del patience
        if over.wait(min(1.0, SECONDS / 4)):
            return


def _caller(thread: int) -> str:
    """The innermost line that is neither torch's nor ours; of the main thread where autograd's own thread waits."""
    frames = sys._current_frames()
    for ident in (thread, threading.main_thread().ident):
        frame: FrameType | None = frames.get(ident or 0)
        while frame is not None and frame.f_code.co_filename.startswith(_OWN):
            frame = frame.f_back
        if frame is not None:
            place = frame.f_code.co_filename, frame.f_lineno
            return f"{place[0]}:{place[1]}: {linecache.getline(*place).strip()}"
    return "an unknown line"
