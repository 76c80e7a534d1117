"""Streams without a device: memory "on the device" is host memory, and a copy happens as late as anything allows.

A copy is queued and made when the caller's stream or the host waits for its mark, or for a later one of its lane; now
and then also when somebody asks whether it is done. Until then what it goes to holds NaN: whoever reads without waiting
sees it, and whoever overwrites what is still to be copied is copied himself. The caller's stream has no delay: what it
computes is computed at once. So where a lane is the caller's stream, what is copied to the device is copied at once.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import get_args

import torch
from torch import Tensor

from zero_offload.streams import Lane, Mark


class _Copy:
    """A queued copy, and the mark behind it."""

    def __init__(self, streams: SimulatedStreams, lane: Lane, into: Tensor, source: Tensor, after: Sequence[Mark]):
        self._streams, self._lane, self._into, self._source, self._after = streams, lane, into, source, after
        self.made = False

    def done(self) -> bool:
        self._streams.asked()
        with self._streams.lock:
            if not self.made and self._streams.random.random() < 0.3:
                self.wait()
            return self.made

    def wait(self) -> None:
        self._streams.asked()
        with self._streams.lock:
            while not self.made:
                self._streams.lanes[self._lane].popleft().make()

    def reads(self, memory: Tensor) -> bool:
        start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
        return self._source.data_ptr() < stop and self._source.data_ptr() + self._source.nbytes > start

    def make(self) -> None:
        for mark in self._after:
            mark.wait()
        assert self._into.untyped_storage().nbytes(), "a copy into memory that was freed"
        with torch.no_grad():
            self._into.copy_(self._source)
        self.made = True


class _Now:
    """A mark of the caller's stream."""

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class SimulatedStreams:
    """`waits`: how often the caller's stream followed a mark. `copied`: elements by lane."""

    def __init__(self, host: Tensor, seed: int = 0) -> None:
        self.registered = [host]
        self.random = random.Random(seed)
        self.lock = threading.RLock()
        self.lanes: dict[Lane, deque[_Copy]] = {lane: deque() for lane in get_args(Lane)}
        self.current = threading.local()  # lane: that the thread is inside of
        self.follows = 0
        self.closed = False
        self.entered: set[int] = set()

    def enter_thread(self) -> None:
        self.entered.add(threading.get_ident())

    def asked(self) -> None:
        """A mark is asked: on a thread of the store's that is still set to another device, CUDA would use that one."""
        own = threading.current_thread().name in ("zero-offload update", "zero-offload gradients")
        assert not own or threading.get_ident() in self.entered, "a thread that never entered"

    def mark(self) -> Mark:
        return _Now()

    def follow(self, mark: Mark) -> None:
        self.follows += 1
        mark.wait()

    def copy(self, lane: Lane, into: Tensor, source: Tensor, after: Sequence[Mark] = ()) -> Mark:
        assert into.shape == source.shape and into.dtype == source.dtype
        assert into.is_contiguous() and source.is_contiguous()
        at = into.data_ptr()
        here = any(host.data_ptr() <= at < host.data_ptr() + host.nbytes for host in self.registered)
        if lane == "swap_out":  # what comes up may also come from memory of the device's
            assert here, "host memory that was never registered"
        copy = _Copy(self, lane, into, source, after)
        with self.lock, torch.no_grad():
            ordered = (*self.lanes[lane], *(mark for mark in after if isinstance(mark, _Copy)))
            for earlier in [each for each in ordered if each.reads(into)]:
                earlier.wait()  # it is ordered before this one, so it may still read what this one writes
            into.fill_(float("nan") if into.is_floating_point() else 255)
            self.lanes[lane].append(copy)
            if not here and getattr(self.current, "lane", None) == lane:
                copy.wait()
        return copy

    @contextmanager
    def inside(self, lane: Lane) -> Iterator[None]:
        assert getattr(self.current, "lane", None) is None
        self.current.lane = lane
        try:
            yield
        finally:
            self.current.lane = None

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        return torch.full((numel,), float("nan") if dtype.is_floating_point else 255, dtype=dtype)

    def host(self, nbytes: int) -> Tensor:
        self.registered.append(torch.full((nbytes,), 255, dtype=torch.uint8))
        return self.registered[-1]

    def register(self, host: Tensor) -> None:
        self.registered.append(host)

    def drain(self) -> None:
        with self.lock:
            for lane in self.lanes.values():
                while lane:
                    lane[-1].wait()

    def give_back(self, memory: Tensor) -> None:
        self.registered = [host for host in self.registered if host.data_ptr() != memory.data_ptr()]
        memory.fill_(255)

    def close(self) -> None:
        self.drain()
        self.closed = True


_device: ContextVar[_Device | None] = ContextVar("simulated device", default=None)


class _Device:
    def __init__(self, seed: int) -> None:
        self.seed, self.asked = seed, False
        self.made: list[SimulatedStreams] = []

    def make(self, host: Tensor) -> SimulatedStreams:
        self.made.append(SimulatedStreams(host, self.seed))
        return self.made[-1]


def streams() -> Callable[[Tensor], SimulatedStreams] | None:
    """`TieredStore(streams=)`: those of the `simulated_device()` that the caller is inside of, if any."""
    device = _device.get()
    if device is None:
        return None
    device.asked = True
    return device.make


@contextmanager
def simulated_device(seed: int = 0) -> Iterator[list[SimulatedStreams]]:
    """Every TieredStore made inside with `streams=streams()` is on a discrete device. Yields their streams."""
    device = _Device(seed)
    token = _device.set(device)
    try:
        yield device.made
    finally:
        _device.reset(token)
    assert device.asked, "a test over a simulated device whose store was not given its streams"
