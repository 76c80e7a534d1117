"""Shows the detector the edges between host threads that Python's own tools make.

Three things are followed, and the rest of the standard library is built from them: `Thread.start` and `join`;
`threading.Lock` and `RLock`, which Condition, Event, Semaphore, Barrier, `queue.Queue` and `concurrent.futures.Future`
use; and `queue.SimpleQueue`, which thread pools use. `asyncio` hands over without a lock in `call_soon_threadsafe` (and
in `run_in_executor`, which uses it), and autograd in threads of its own. Edges are taken as ThreadSanitizer takes them:
whoever acquires a lock comes after everybody who has released it.

Not seen: locks, queues and threads made before `install()`, names that other modules had imported from `threading` by
then, `_thread.allocate_lock`, and whatever threads tell each other through plain variables. `Meeting` is for these.
"""

from __future__ import annotations

import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch

from .build import native


class SimpleQueue(queue.SimpleQueue):
    """`queue.SimpleQueue` with an edge from each put to each later get."""

    def __init__(self) -> None:
        self._meeting = native.Meeting()

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        self._meeting.leave()
        super().put(item, block, timeout)

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        item = super().get(block, timeout)
        self._meeting.hear()
        return item


def _follow_threads() -> None:
    start, join, is_alive = threading.Thread.start, threading.Thread.join, threading.Thread.is_alive

    def followed_start(self: threading.Thread) -> None:
        if "_zero_sim_end" not in self.__dict__:  # a second start is an error, which start() raises
            begun, ended, run = native.Meeting(), native.Meeting(), self.run

            def followed_run() -> None:
                begun.hear()
                native.name_host_thread(self.name)
                self.__dict__.pop("run", None)  # it holds the thread, which holds it
                try:
                    run()
                finally:
                    ended.leave()

            begun.leave()
            self.__dict__.update(run=followed_run, _zero_sim_end=ended)
        start(self)

    def hear_end(self: threading.Thread) -> None:
        ended = self.__dict__.get("_zero_sim_end")
        if ended is not None and self.ident is not None and not is_alive(self):
            ended.hear()

    def followed_join(self: threading.Thread, timeout: float | None = None) -> None:
        join(self, timeout)
        hear_end(self)

    def followed_is_alive(self: threading.Thread) -> bool:
        alive = is_alive(self)
        if not alive:
            hear_end(self)
        return alive

    _replace(threading.Thread, "start", followed_start)
    _replace(threading.Thread, "join", followed_join)
    _replace(threading.Thread, "is_alive", followed_is_alive)


def _follow_event_flags() -> None:
    """`Event.is_set` looks at the flag without the event's lock."""
    is_set = threading.Event.is_set

    def followed_is_set(self: threading.Event) -> bool:
        found = is_set(self)
        if found:
            with self._cond:  # type: ignore[attr-defined]
                pass
        return found

    _replace(threading.Event, "is_set", followed_is_set)


def _follow_event_loops() -> None:
    call = asyncio.BaseEventLoop.call_soon_threadsafe

    def followed_call(
        self: asyncio.BaseEventLoop, callback: Callable[..., object], *args: Any, **keywords: Any
    ) -> asyncio.Handle:
        meeting = native.Meeting()
        meeting.leave()

        @functools.wraps(callback)
        def followed_callback(*args: Any) -> object:
            meeting.hear()
            return callback(*args)

        return call(self, followed_callback, *args, **keywords)

    _replace(asyncio.BaseEventLoop, "call_soon_threadsafe", followed_call)


def _follow_autograd() -> None:
    run = torch.autograd.graph._engine_run_backward

    def followed_run(*args: Any, **keywords: Any) -> Any:
        call = native.begin_backward()
        try:
            return run(*args, **keywords)
        finally:
            native.end_backward(call)

    _replace(torch.autograd.graph, "_engine_run_backward", followed_run)
    _replace(torch.autograd, "_engine_run_backward", followed_run)


def _replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    setattr(owner, name, functools.wraps(getattr(owner, name))(by))


_installed = False


def install() -> None:
    """Replaces the tools. Does nothing the second time. While nobody looks for races they cost little."""
    global _installed
    if _installed:
        return
    _installed = True
    _follow_threads()
    _follow_event_flags()
    _follow_event_loops()
    _follow_autograd()
    threading.Lock, threading.RLock = native.Lock, native.RLock
    queue.SimpleQueue = SimpleQueue  # type: ignore[misc]
