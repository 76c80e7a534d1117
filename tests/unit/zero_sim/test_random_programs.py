"""Random programs with streams, events, memory and host threads: no report without a race, and one where an edge lacks.

A program is a list of steps. Whether two of them are ordered is decided here by reachability in an explicit graph of
what was done, which shares nothing with the detector's clocks. `Graph` builds it; the generator uses it to add just the
edges that a program needs, beside some that it does not; then each program runs as it is, and once more without one of
its edges.
"""

from __future__ import annotations

import _thread
import ctypes
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim")

HOSTS = ("MainThread", "second", "third")
STREAMS = 4
PROGRAMS = 1000
FLOATS = 128  # of a buffer: one block of the allocator


# -- the graph: who comes after whom --------------------------------------------------------------------------------
@dataclass(frozen=True)
class Access:
    node: int
    actor: str
    begin: int
    end: int
    write: bool


@dataclass(frozen=True)
class Conflict:
    """Two accesses that nothing orders."""

    now: str
    before: str
    begin: int
    end: int


@dataclass
class Graph:
    """What was done, as a graph. `past[n]` is the set of nodes before n, and n itself, as bits."""

    past: list[int] = field(default_factory=list)
    last: dict[str, int] = field(default_factory=dict)  # of each actor
    accesses: list[Access] = field(default_factory=list)
    conflicts: list[tuple[int, Conflict]] = field(default_factory=list)  # with the later node

    def node(self, actor: str, *after: int | None) -> int:
        number, past = len(self.past), 0
        for other in (self.last.get(actor), *after):
            if other is not None:
                past |= self.past[other]
        self.past.append(past | 1 << number)
        self.last[actor] = number
        return number

    def ordered(self, before: int, after: int) -> bool:
        return bool(self.past[after] >> before & 1)

    def unordered(self, node: int, begin: int, end: int, write: bool) -> list[Access]:
        return [
            a
            for a in self.accesses
            if a.begin < end and begin < a.end and (write or a.write) and not self.ordered(a.node, node)
        ]

    def access(self, node: int, actor: str, begin: int, end: int, write: bool) -> None:
        for a in self.unordered(node, begin, end, write):
            self.conflicts.append((node, Conflict(actor, a.actor, max(begin, a.begin), min(end, a.end))))
        self.accesses.append(Access(node, actor, begin, end, write))

    def forget(self, begin: int, end: int, over: Callable[[Access], bool]) -> None:
        """The memory's owner guarantees that what is `over` comes before whatever is done with the memory next."""
        self.accesses = [a for a in self.accesses if not (begin <= a.begin and a.end <= end and over(a))]


# -- steps ----------------------------------------------------------------------------------------------------------
@dataclass
class Buffer:
    """Device memory, or pinned host memory where `stream` is None. Its address is known while the program runs."""

    stream: int | None
    address: int = 0  # in the generator: a made-up one
    tensor: torch.Tensor | None = None
    used: set[int] = field(default_factory=set)  # streams
    recorded: set[int] = field(default_factory=set)


@dataclass
class Step:
    """One thing that the host thread does. `edge` says that the step only orders, and may be left out."""

    host: int
    kind: str
    stream: int = 0
    buffers: tuple[Buffer, ...] = ()
    key: int = 0  # of an event or a meeting
    part: range = range(FLOATS)  # elements, of each buffer
    edge: bool = False

    @property
    def touched(self) -> range:
        return range(max(self.part.start, 1), self.part.stop) if self.kind == "hidden down" else self.part


def stream_name(index: int) -> str:
    return f"s{index}"


class Model:
    """Does the steps of a program in the graph."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.events: dict[int, int] = {}
        self.meetings: dict[int, int] = {}
        start = self.graph.node(HOSTS[0])
        for host in HOSTS[1:]:
            self.graph.node(host, start)

    def do(self, step: Step) -> None:
        graph, host = self.graph, HOSTS[step.host]
        here = graph.node(host)

        def queued(*after: int | None) -> int:
            return graph.node(stream_name(step.stream), here, *after)

        def touch(node: int, actor: str, buffer: Buffer, part: range, write: bool) -> None:
            graph.access(node, actor, buffer.address + 4 * part.start, buffer.address + 4 * part.stop, write)

        stream = stream_name(step.stream)
        if step.kind == "allocate":
            node = queued()
            touch(node, stream, step.buffers[0], range(FLOATS), True)
        elif step.kind in ("kernel", "up", "down", "hidden down"):  # the first buffer is written, the others are read
            node = queued()
            for buffer in step.buffers[1:]:
                touch(node, stream, buffer, step.touched, False)
            touch(node, stream, step.buffers[0], step.touched, True)
        elif step.kind in ("look", "fill"):
            touch(here, host, step.buffers[0], step.part, step.kind == "fill")
        elif step.kind == "record":
            self.events[step.key] = queued()
        elif step.kind == "wait":
            queued(self.events[step.key])
        elif step.kind in ("synchronize", "query"):
            graph.node(host, self.events[step.key])
        elif step.kind == "drain":
            graph.node(host, graph.last.get(stream))
        elif step.kind == "leave":
            self.meetings[step.key] = here
        elif step.kind == "hear":
            graph.node(host, self.meetings[step.key])
        elif step.kind == "record_stream":
            step.buffers[0].recorded.add(step.stream)
        elif step.kind in ("free", "unpin"):
            self._free(here, host, step.buffers[0], pinned=step.kind == "unpin")

    def _free(self, here: int, host: str, buffer: Buffer, pinned: bool) -> None:
        graph, begin, end = self.graph, buffer.address, buffer.address + 4 * FLOATS
        known = [graph.last[name] for name in HOSTS]
        known += [graph.last[stream_name(s)] for s in buffer.recorded if stream_name(s) in graph.last]
        graph.forget(begin, end, lambda a: any(graph.ordered(a.node, k) for k in known))
        if pinned:
            graph.access(here, host, begin, end, True)
            graph.forget(begin, end, lambda a: True)


# -- generating a program -------------------------------------------------------------------------------------------
class Generator:
    """Builds a program that has no race, by asking the graph before each access which edges it needs."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.model = Model()
        self.steps: list[Step] = []
        self.device: list[Buffer] = []
        self.pinned: list[Buffer] = []
        self.keys = 0
        self.addresses = 1 << 20

    def do(self, step: Step) -> None:
        self.steps.append(step)
        self.model.do(step)

    def key(self) -> int:
        self.keys += 1
        return self.keys

    def address(self) -> int:
        self.addresses += 4 * FLOATS
        return self.addresses

    def host(self) -> int:
        return self.random.choice((0, 0, 0, 1, 2))

    def meet(self, giver: int, taker: int) -> None:
        key = self.key()
        self.do(Step(giver, "leave", key=key))
        self.do(Step(taker, "hear", key=key, edge=True))

    def order(self, actor: str, host: int, stream: int | None) -> None:
        """Adds an edge from what `actor` has done to what `host` does next, on `stream` unless it is None."""
        if actor in HOSTS:
            self.meet(HOSTS.index(actor), host)
            return
        other, key = int(actor[1:]), self.key()
        if stream is None and self.random.random() < 0.3:
            self.do(Step(host, "drain", stream=other, edge=True))
            return
        self.do(Step(host, "record", stream=other, key=key))
        if stream is None:
            self.do(Step(host, self.random.choice(("synchronize", "query")), key=key, edge=True))
        else:
            self.do(Step(host, "wait", stream=stream, key=key, edge=True))

    def access(self, step: Step, accesses: list[tuple[Buffer, bool]], stream: int | None) -> None:
        """Does a step, after the edges that its accesses need."""
        actor = HOSTS[step.host] if stream is None else stream_name(stream)
        while True:
            graph = self.model.graph
            past = graph.past[graph.last[HOSTS[step.host]]]
            if stream is not None and actor in graph.last:
                past |= graph.past[graph.last[actor]]
            lacking = [
                a.actor
                for buffer, write in accesses
                for a in graph.accesses
                if a.begin < buffer.address + 4 * step.part.stop
                and buffer.address + 4 * step.part.start < a.end
                and (write or a.write)
                and not past >> a.node & 1
            ]
            if not lacking:
                break
            self.order(self.random.choice(lacking), step.host, stream)
        self.do(step)

    def part(self) -> range:
        return self.random.choice((range(FLOATS), range(FLOATS // 2), range(FLOATS // 2, FLOATS)))

    def allocate(self) -> None:
        buffer = Buffer(self.random.randrange(STREAMS), self.address())
        self.do(Step(self.host(), "allocate", stream=buffer.stream or 0, buffers=(buffer,)))
        self.device.append(buffer)

    def pin(self) -> None:
        buffer = Buffer(None, self.address())
        step = Step(self.host(), "pin", buffers=(buffer,))
        self.do(step)
        self.pinned.append(buffer)

    def kernel(self) -> None:
        into, *sources = self.random.sample(self.device, min(len(self.device), self.random.choice((1, 2, 3))))
        self.queue("kernel", into, *sources)

    def copy(self) -> None:
        device, pinned = self.random.choice(self.device), self.random.choice(self.pinned)
        if self.random.random() < 0.5:
            self.queue("up", device, pinned)
        else:
            self.queue(self.random.choice(("down", "hidden down")), pinned, device)

    def queue(self, kind: str, into: Buffer, *sources: Buffer) -> None:
        stream = self.random.randrange(STREAMS)
        part = self.part()
        self.access(
            Step(self.host(), kind, stream, (into, *sources), part=part),
            [(into, True), *((source, False) for source in sources)],
            stream,
        )
        for buffer in (into, *sources):
            buffer.used.add(stream)
            if buffer.stream is None and kind != "hidden down":
                buffer.recorded.add(stream)  # as every copy of a pinned tensor does by itself

    def look(self) -> None:
        kind, buffer = self.random.choice(("look", "fill")), self.random.choice(self.pinned)
        self.access(Step(self.host(), kind, buffers=(buffer,), part=self.part()), [(buffer, kind == "fill")], None)

    def free(self) -> None:
        """Frees device memory: each stream that used it is recorded, or waited for."""
        buffer = self.device.pop(self.random.randrange(len(self.device)))
        host = self.host()
        for stream in sorted(buffer.used - {buffer.stream}):
            if self.random.random() < 0.5:
                self.do(Step(host, "record_stream", stream=stream, buffers=(buffer,), edge=True))
            else:
                key = self.key()
                self.do(Step(host, "record", stream=stream, key=key))
                self.do(Step(host, "wait", stream=buffer.stream or 0, key=key, edge=True))
        self.do(Step(host, "free", buffers=(buffer,)))
        if self.random.random() < 0.8:  # whoever allocates next on this stream gets the same bytes
            again = Buffer(buffer.stream, self.address())
            self.do(Step(self.host(), "allocate", stream=buffer.stream or 0, buffers=(again,)))
            self.device.append(again)

    def unpin(self) -> None:
        """Frees pinned memory: the allocator waits for the copies that it knows, and the program for the others."""
        buffer = self.pinned.pop(self.random.randrange(len(self.pinned)))
        host = self.host()
        graph = self.model.graph
        for a in [a for a in graph.accesses if a.begin >= buffer.address and a.end <= buffer.address + 4 * FLOATS]:
            known = [graph.last[name] for name in HOSTS]
            known += [graph.last[stream_name(s)] for s in buffer.recorded if stream_name(s) in graph.last]
            if a.actor not in HOSTS and not any(graph.ordered(a.node, k) for k in known):
                self.order(a.actor, host, None)
        self.do(Step(host, "unpin", buffers=(buffer,)))
        if self.random.random() < 0.8:
            self.pin()

    def unneeded_edge(self) -> None:
        actors = [actor for actor in self.model.graph.last if actor != HOSTS[0]]
        self.order(self.random.choice(actors), 0, self.random.choice((None, *range(STREAMS))))

    def program(self) -> list[Step]:
        for _ in range(3):
            self.allocate()
        for _ in range(2):
            self.pin()
        actions = [self.kernel] * 5 + [self.copy] * 4 + [self.look] * 3 + [self.unneeded_edge, self.free, self.unpin]
        for _ in range(self.random.randint(8, 16)):
            if len(self.device) < 2:
                self.allocate()
            if not self.pinned:
                self.pin()
            self.random.choice(actions)()
        return self.steps


# -- running a program ------------------------------------------------------------------------------------------------
class Hosts:
    """Threads that do steps in the program's order, which they learn in a way that the detector does not see."""

    def __init__(self) -> None:
        self._jobs: dict[int, Callable[[], None] | None] = {}
        self._failure: BaseException | None = None
        self._go = {i: _thread.allocate_lock() for i in range(1, len(HOSTS))}
        self._done = _thread.allocate_lock()
        self._done.acquire()
        for i in self._go:
            self._go[i].acquire()
            threading.Thread(target=self._serve, args=(i,), name=HOSTS[i], daemon=True).start()

    def _serve(self, me: int) -> None:
        while True:
            self._go[me].acquire()
            job = self._jobs[me]
            if job is None:
                return
            try:
                job()
            except BaseException as e:
                self._failure = e
            self._done.release()

    def do(self, host: int, job: Callable[[], None]) -> None:
        if host == 0:
            job()
            return
        self._jobs[host] = job
        self._go[host].release()
        self._done.acquire()
        if self._failure is not None:
            raise self._failure

    def end(self) -> None:
        for i in self._go:
            self._jobs[i] = None
            self._go[i].release()


class Runner:
    """Does the steps of a program on a device."""

    def __init__(self, hosts: Hosts) -> None:
        self.hosts = hosts
        self.streams = [torch.sim.default_stream(0), *(torch.sim.Stream(0) for _ in range(STREAMS - 1))]
        self.names = {self._name(i): stream_name(i) for i in range(STREAMS)}
        self.names.update({f"host thread {name}": name for name in HOSTS})

    def _name(self, index: int) -> str:
        return "default stream of sim:0" if index == 0 else f"stream {self.streams[index].stream_id} of sim:0"

    def run(self, steps: list[Step]) -> list[Any]:
        """Runs the steps and returns the races that were found. Leaves the buffers with the addresses that they had."""
        self.events: dict[int, Any] = {}
        self.meetings: dict[int, Any] = {}
        self.all_meet()
        zero_sim.take_races()
        for step in steps:
            self.hosts.do(step.host, lambda step=step: self.do(step))
        races = zero_sim.take_races()
        self.all_meet()
        for step in steps:
            for buffer in step.buffers:
                buffer.tensor = None
        zero_sim.take_races()  # those of freeing what was in use
        return races

    def all_meet(self) -> None:
        before, after = zero_sim.Meeting(), zero_sim.Meeting()
        for host in range(len(HOSTS)):
            self.hosts.do(host, before.leave)
        before.hear()
        torch.sim.synchronize(0)
        after.leave()
        for host in range(len(HOSTS)):
            self.hosts.do(host, after.hear)

    def do(self, step: Step) -> None:
        stream = self.streams[step.stream]
        part = slice(step.touched.start, step.touched.stop)
        tensors = [buffer.tensor[part] for buffer in step.buffers if buffer.tensor is not None]
        if step.kind == "allocate":
            with torch.sim.stream(stream):
                self.place(step.buffers[0], torch.empty(FLOATS, device="sim:0"))
        elif step.kind == "pin":
            self.place(step.buffers[0], torch.empty(FLOATS, pin_memory=True))
        elif step.kind == "kernel":
            with torch.sim.stream(stream):
                if len(tensors) == 1:
                    tensors[0].zero_()
                else:
                    torch.add(tensors[-1], tensors[1], out=tensors[0])
        elif step.kind in ("up", "down"):
            with torch.sim.stream(stream):
                tensors[0].copy_(tensors[1], non_blocking=True)
        elif step.kind == "hidden down":  # through a tensor that the allocator of pinned memory does not know
            assert step.buffers[0].tensor is not None
            same = (ctypes.c_float * len(step.touched)).from_address(tensors[0].data_ptr())
            with torch.sim.stream(stream):
                torch.frombuffer(same, dtype=torch.float32).copy_(tensors[1], non_blocking=True)
        elif step.kind == "look":
            tensors[0].sum()
        elif step.kind == "fill":
            tensors[0].fill_(1)
        elif step.kind == "record":
            self.events[step.key] = torch.sim.Event()
            self.events[step.key].record(stream)
        elif step.kind == "wait":
            stream.wait_event(self.events[step.key])
        elif step.kind == "synchronize":
            self.events[step.key].synchronize()
        elif step.kind == "query":
            while not self.events[step.key].query():
                pass
        elif step.kind == "drain":
            stream.synchronize()
        elif step.kind == "leave":
            self.meetings[step.key] = zero_sim.Meeting()
            self.meetings[step.key].leave()
        elif step.kind == "hear":
            self.meetings[step.key].hear()
        elif step.kind == "record_stream":
            step.buffers[0].tensor.record_stream(stream)  # type: ignore[union-attr]
        elif step.kind in ("free", "unpin"):
            del tensors
            step.buffers[0].tensor = None

    def place(self, buffer: Buffer, tensor: torch.Tensor) -> None:
        buffer.tensor, buffer.address = tensor, tensor.data_ptr()

    def conflict(self, race: Any) -> Conflict:
        return Conflict(self.names[race.now.actor], self.names[race.before.actor], race.begin, race.end)


def judged(steps: list[Step]) -> list[tuple[int, Conflict]]:
    """Returns the conflicts of a program that has run, by the graph, with the memory that it was given."""
    for step in steps:
        for buffer in step.buffers:
            buffer.recorded = set()
    model = Model()
    for step in steps:
        model.do(step)
        if step.kind in ("up", "down"):
            for buffer in step.buffers:
                if buffer.stream is None:
                    buffer.recorded.add(step.stream)
    return model.graph.conflicts


@pytest.fixture
def runner() -> Iterator[Runner]:
    with zero_sim.races.detecting():
        hosts = Hosts()
        yield Runner(hosts)
        hosts.end()


def overlap(a: Conflict, b: Conflict) -> bool:
    return (a.now, a.before) == (b.now, b.before) and a.begin < b.end and b.begin < a.end


def test_programs_without_a_race_have_no_report_and_one_edge_less_is_reported_where_it_was_needed(runner: Runner):
    needed = unneeded = 0
    for seed in range(PROGRAMS):
        steps = Generator(seed).program()
        races = runner.run(steps)
        assert not judged(steps), f"the generator's program {seed} has a race"
        assert not races, f"program {seed}: {races[0]}"

        edges = [i for i, step in enumerate(steps) if step.edge]
        kind = random.Random(seed).choice(sorted({steps[i].kind for i in edges}))
        left_out = random.Random(seed).choice([i for i in edges if steps[i].kind == kind])
        lesser = steps[:left_out] + steps[left_out + 1 :]
        races = runner.run(lesser)
        conflicts = judged(lesser)
        about = f"program {seed} without step {left_out}, {steps[left_out].kind}"
        if not conflicts:
            unneeded += 1
            assert not races, f"{about}: the edge was not needed, but {races[0]}"
            continue
        needed += 1
        found = [runner.conflict(race) for race in races]
        for race, conflict in zip(races, found, strict=True):
            assert any(overlap(conflict, known) for _, known in conflicts), f"{about}: {race}"
        first = min(node for node, _ in conflicts)
        assert any(overlap(known, conflict) for node, known in conflicts if node == first for conflict in found), (
            f"{about}: not reported: {[known for node, known in conflicts if node == first]}"
        )
    assert needed > PROGRAMS // 4 and unneeded > PROGRAMS // 10, (needed, unneeded)
