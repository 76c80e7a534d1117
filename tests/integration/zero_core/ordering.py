"""Streams that run nothing and remember what came before what, and a check of memory against them. Importable in ranks.

Every stream has a clock; waiting merges clocks. An access to memory is right when its stream has seen the allocation,
freeing it when the stream that is current has seen every access. That is what CUDA and its allocator ask of a program.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.integration.zero_core.swapping import LateArrival, SwappingStore
from zero_core.device import Side


class Stream:
    """`seen`: of every stream, the last of its operations that comes before what is queued here next."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.seen: dict[str, int] = {}

    def tick(self) -> tuple[str, int]:
        """One operation; its stamp."""
        self.seen[self.name] = self.seen.get(self.name, 0) + 1
        return self.name, self.seen[self.name]

    def after(self, seen: dict[str, int]) -> None:
        for name, count in seen.items():
            self.seen[name] = max(count, self.seen.get(name, 0))

    def wait_stream(self, other: Stream) -> None:
        self.after(other.seen)

    def has_seen(self, stamp: tuple[str, int]) -> bool:
        return self.seen.get(stamp[0], 0) >= stamp[1]


class Streams:
    """Stands for torch.cuda where `Side` asks it for streams. Current from the start: compute."""

    def __init__(self) -> None:
        self.compute = self.now = Stream("compute")
        self.made = 0

    def Stream(self, device: torch.device) -> Stream:
        self.made += 1
        return Stream(f"side {self.made}")

    def current_stream(self, device: torch.device) -> Stream:
        return self.now

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.now = self.now, stream
        try:
            yield
        finally:
            self.now = before


class Memory:
    """What was done to each piece of memory, by key, since it was allocated."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._accesses: dict[Any, list[tuple[str, int]]] = {}
        self.accesses = 0

    def __contains__(self, key: Any) -> bool:
        return key in self._accesses

    def allocate(self, key: Any) -> None:
        assert self._streams.now is self._streams.compute, f"{key} is allocated on {self._streams.now.name}"
        assert key not in self
        self._accesses[key] = [self._streams.compute.tick()]

    def access(self, key: Any, stream: Stream) -> None:
        """Written or read, after all that was done to it before: nothing here is read by two at once."""
        for stamp in self._accesses[key]:
            assert stream.has_seen(stamp), f"{key} is accessed on {stream.name}, perhaps before {stamp[0]} has done so"
        self._accesses[key].append(stream.tick())
        self.accesses += 1

    def free(self, key: Any) -> None:
        now = self._streams.now
        assert now is self._streams.compute, f"{key} is freed on {now.name}"
        for stamp in self._accesses.pop(key):
            assert now.has_seen(stamp), f"{key} is freed while {stamp[0]} may still use it"
        now.tick()


def key_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class OrderedArrival(LateArrival):
    """Is copied on the store's stream, after what the current one has queued."""

    def __init__(self, store: Any, i: int, out: Tensor) -> None:
        super().__init__(store, i, out)
        self._streams = store.streams
        store.copies.wait_stream(self._streams.now)
        store.memory.access(key_of(out), store.copies)
        self._seen = dict(store.copies.seen)

    def wait(self) -> None:
        super().wait()
        self._streams.now.after(self._seen)

    def drop(self) -> None:
        super().drop()
        self._streams.now.after(self._seen)


class OrderedStore(SwappingStore):
    """swaps: copies into what it is given; else into memory that it lends until release()."""

    arrival = OrderedArrival

    def __init__(self, swaps: bool) -> None:
        super().__init__()
        self.swaps = swaps
        self.streams = Streams()
        self.memory = Memory(self.streams)
        self.copies, self.collectives = Stream("copies"), Stream("collectives")
        self.ahead = 0  # units whose memory was under way when prefetch() returned

    def attach(self, *args: Any, **options: Any) -> None:
        super().attach(*args, **options)
        self.swaps_in = self.swaps

    def parameters(self, i: int) -> Tensor:
        with self.streams.stream(self.streams.compute):
            self.memory.allocate(("lent", i))
        self.copies.wait_stream(self.streams.compute)
        self.memory.access(("lent", i), self.copies)
        self.streams.now.wait_stream(self.copies)
        return self._shards[i].parameter

    def release(self, i: int) -> None:
        self.memory.free(("lent", i))

    def gradient_buffer(self, i: int) -> None:
        """Nothing: gradients are reduced into memory of the pool, which is watched."""

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        if key_of(gradient) in self.memory:
            self.memory.access(key_of(gradient), self.streams.now)
        super().accept_gradient(i, gradient)


class OrderedWork:
    """A collective under way on the collectives' stream, behind the current one."""

    def __init__(self, store: OrderedStore, *used: Any) -> None:
        self._store = store
        store.collectives.wait_stream(store.streams.now)
        for key in used:
            if key in store.memory:
                store.memory.access(key, store.collectives)
        self._seen = dict(store.collectives.seen)
        self.work: Any = None

    def wait(self) -> None:
        self.work.wait()
        self._store.streams.now.after(self._seen)


def watch(handle: Any) -> None:
    """Let ranks, pool and units of a sharded model tell its OrderedStore what they do to memory."""
    store, ranks, pool = handle.store, handle.ranks, handle.engine.pool
    ranks.side = Side(ranks.device, store.streams)
    gather, scatter, average = ranks.all_gather, ranks.reduce_scatter, ranks.average_replicas
    take, give, drop = pool.take, pool.give, pool.drop
    places = {unit.name: unit.index for unit in handle.units}

    def all_gather(whole: Tensor, part: Tensor, unit: str, **options: Any) -> Any:
        work = OrderedWork(store, key_of(whole), ("lent", places[unit]))
        work.work = gather(whole, part, unit, **options)
        return work

    def reduce_scatter(part: Tensor, whole: Tensor, *rest: Any, **options: Any) -> Any:
        work = OrderedWork(store, key_of(whole), key_of(part))
        work.work = scatter(part, whole, *rest, **options)
        return work

    def average_replicas(values: Tensor, *rest: Any) -> Any:
        work = OrderedWork(store, key_of(values))
        work.work = average(values, *rest)
        return work

    def taking(numel: int, dtype: torch.dtype) -> Tensor:
        taken = take(numel, dtype)
        store.memory.allocate(key_of(taken))
        return taken

    def giving(tensor: Tensor) -> None:
        store.memory.free(key_of(tensor))
        give(tensor)

    def dropping(tensor: Tensor) -> None:
        store.memory.free(key_of(tensor))
        drop(tensor)

    ranks.all_gather, ranks.reduce_scatter, ranks.average_replicas = all_gather, reduce_scatter, average_replicas
    pool.take, pool.give, pool.drop = taking, giving, dropping
    for unit in handle.units:
        _watch_unit(unit, store)


def _watch_unit(unit: Any, store: OrderedStore) -> None:
    resize, prefetch, enter, leave, collect = (
        unit._resize, unit.prefetch, unit.enter, unit.leave, unit.gradient.collect,
    )  # fmt: skip

    def use() -> None:
        memory = unit.flat if unit._memory is None else unit._memory
        key = key_of(memory) if key_of(memory) in store.memory else ("lent", unit.index)
        store.memory.access(key, store.streams.now)

    def resizing(nbytes: int) -> None:
        (store.memory.allocate if nbytes else store.memory.free)(key_of(unit.flat))
        resize(nbytes)

    def others() -> dict[str, int]:
        return {name: count for name, count in store.streams.compute.seen.items() if name != "compute"}

    def ahead() -> None:
        before = others()
        prefetch()
        assert others() == before, f"prefetching {unit.name} lets compute wait"
        store.ahead += unit.residency.value == "unsharding"

    def using(audit: Any = None) -> None:
        enter(audit)
        use()

    def used() -> None:
        use()
        leave()

    def collecting(k: int) -> None:
        collect(k)
        current = unit.gradient.current
        if current is not None and key_of(current) in store.memory:
            store.memory.access(key_of(current), store.streams.now)

    unit._resize, unit.prefetch, unit.enter, unit.leave, unit.gradient.collect = (
        resizing,
        ahead,
        using,
        used,
        collecting,
    )
