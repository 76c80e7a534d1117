"""`slots`, by trying every order of events: who takes which values, who changes them, which transfer ends next.

The world below has three values that are stored, a pool of two or three slots, a training thread that uses one value at
a time and an update thread that changes values, reads ahead and holds several. Its memory and its storage know which
version of which value they have. A transfer that reads or writes anything but the version that was meant is a failure,
and so is an eviction of what is in use, a wait that nothing ends, or a version that is lost.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from zero_offload.memory.slots import Slot, Slots
from zero_offload.memory.transfers import InFlight, Stored, Transfers
from zero_offload.timeline import Timeline

VALUES = "abc"
TRAINING, UPDATE = "training", "update"


class Cell:
    """A slot's memory: which version of which value it has."""

    def __init__(self) -> None:
        self.content: tuple[str, int] | None = None
        self.nbytes = 1


class Transfer:
    """In flight until somebody lets it end: the explorer, or whoever waits."""

    def __init__(self, world: World, kind: str, value: str, cell: Cell) -> None:
        self.world, self.kind, self.value, self.cell, self.began = world, kind, value, cell, cell.content
        self.over = False
        world.flying.append(self)

    def done(self) -> bool:
        return self.over

    def wait(self) -> None:
        if self.over:
            return
        assert not self.world.must_not_wait, f"it waits for the {self.kind} of {self.value}"
        self.over = True
        self.world.flying.remove(self)
        assert self.cell.content == self.began, f"{self.kind} of {self.value}: its memory changed meanwhile"
        if self.kind == "write":
            assert self.began is not None and self.began[0] == self.value
            self.world.disk[self.value] = self.began[1]
        else:
            assert self.world.disk[self.value] == self.world.truth[self.value], (
                f"a read of {self.value} overtook a write"
            )
            self.cell.content = (self.value, self.world.disk[self.value])


class World:
    """One pool and two threads. `kept`: whether what was updated stays in its slot, as gradients and units do."""

    def __init__(self, slots: int, kept: bool) -> None:
        self.flying: list[Transfer] = []
        self.truth, self.disk = dict.fromkeys(VALUES, 0), dict.fromkeys(VALUES, 0)
        self.in_flight = InFlight(Timeline())
        self.slots: Slots[Cell] = Slots([Cell() for _ in range(slots)], self.in_flight, blocked=self._blocked)
        self.kept, self.must_not_wait = kept, False
        self.stored = {value: self._stored(value) for value in VALUES}

    def _stored(self, value: str) -> Stored:
        def begin(kind: str) -> Any:
            return lambda extent, cell, offset: Transfer(self, kind, value, cell)

        disk: Any = SimpleNamespace(read=begin("read"), write=begin("write"), alignment=1)
        extent: Any = SimpleNamespace(nbytes=1, offset_bytes=0)
        return Stored(Transfers(disk, self.in_flight), extent)

    def _blocked(self) -> None:
        assert all(slot.holders for slot in self.slots), "it waits for a slot although one is idle"
        raise BlockedError

    def held(self, holder: str) -> list[Slot[Cell]]:
        return [slot for slot in self.slots if holder in slot.holders]

    def fill(self, slot: Slot[Cell]) -> None:
        slot.memory.content = (slot.key, -1)  # not its value yet: that is what the read brings
        slot.fills(self.stored[slot.key].read(slot.memory, "a value"))

    def events(self, known: set[str]) -> Iterator[tuple[str, str]]:
        """What may happen next. Of the values that nothing has happened to, which are alike, to the first one only."""
        used, changed = self.held(TRAINING), self.held(UPDATE)
        for value in [*sorted(known), *sorted({*VALUES} - known)[:1]]:
            mine = {slot.key for slot in changed}
            if not used and value not in mine:
                yield "use", value
            if not used and value not in mine and self.slots.find(value) is None:
                yield "prefetch", value
            if value not in {slot.key for slot in used} | mine and len(changed) < len(self.slots):
                yield "ahead" if changed else "take", value
        if used:
            yield "release", used[0].key
        for slot in changed:
            yield "change", slot.key
        for number in range(len(self.flying)):
            yield "end", str(number)

    def happen(self, kind: str, value: str) -> None:
        in_use = {slot.key for slot in self.slots if slot.holders}
        if kind in ("use", "prefetch", "ahead"):
            self.stored[value].drain()
            self.must_not_wait = True
            holder = {"use": TRAINING, "ahead": UPDATE}.get(kind, "")
            slot = self.slots.try_take(value, holder, fill=self.fill, steal=kind == "use")
            if slot is not None and not holder:
                self.slots.keep(slot, due=self.slots.tick())
            self.must_not_wait = False
        elif kind == "take":
            try:
                self.slots.take(value, UPDATE, fill=self.fill)
            except BlockedError:
                assert len(self.held(TRAINING)) == len(self.slots)
        elif kind == "end":
            self.flying[int(value)].wait()
        else:
            slot = self.slots.find(value)
            assert slot is not None, f"{value} was in use and is gone"
            self.release(slot) if kind == "release" else self.change(slot)
            in_use.discard(value)
        assert in_use <= {slot.key for slot in self.slots if slot.holders}, "what was in use was evicted"

    def release(self, slot: Slot[Cell]) -> None:
        slot.wait_filled()
        assert slot.memory.content == (slot.key, self.truth[slot.key])
        self.slots.keep(slot, TRAINING)

    def change(self, slot: Slot[Cell]) -> None:
        slot.wait_changeable()
        assert slot.memory.content == (slot.key, self.truth[slot.key])
        self.truth[slot.key] += 1
        slot.memory.content = (slot.key, self.truth[slot.key])
        slot.leaves(self.stored[slot.key].write(slot.memory, "a value"))
        self.slots.keep(slot, UPDATE, due=self.slots.tick()) if self.kept else self.slots.give(slot, UPDATE)

    def state(self) -> object:
        """What the future depends on."""
        due = sorted(slot.due for slot in self.slots if slot.due is not None)
        lag = {value: self.truth[value] - self.disk[value] for value in VALUES}
        numbers = {id(transfer): number for number, transfer in enumerate(self.flying)}

        def in_flight(place: Any, *, writes: bool) -> tuple[int, ...]:
            return tuple(numbers.get(id(each.ticket), -1) for each in self.in_flight.of(place, writes=writes))

        return (
            tuple(lag.items()),
            tuple((transfer.kind, transfer.value) for transfer in self.flying),
            tuple(
                (
                    slot.key,
                    tuple(sorted(slot.holders)),
                    -1 if slot.due is None else due.index(slot.due),
                    in_flight(slot, writes=True),
                    in_flight(slot, writes=False),
                    slot.memory.content
                    and (slot.memory.content[0], slot.memory.content[1] - self.truth[slot.key or "a"]),
                )
                for slot in self.slots  # in the order in which they were let go of
            ),
            tuple(in_flight(stored, writes=False) for stored in self.stored.values()),
        )


class BlockedError(Exception):
    """The thread would sleep."""


def replay(slots: int, kept: bool, history: tuple[tuple[str, str], ...]) -> World:
    world = World(slots, kept)
    for event in history:
        world.happen(*event)
    return world


@pytest.mark.promise("slots")
@pytest.mark.parametrize(("slots", "depth"), [(2, 6), (3, 5)])
@pytest.mark.parametrize("kept", [False, True])
def test_no_order_of_events_breaks_an_invariant(slots: int, depth: int, kept: bool) -> None:
    """Fails if take() hands out a slot with a transfer in flight, evicts what is held, or lets a read pass a write."""
    seen, frontier = set(), [()]
    for _ in range(depth):
        following = []
        for history in frontier:
            for event in replay(slots, kept, history).events({value for _, value in history if value in VALUES}):
                longer = (*history, event)
                world = replay(slots, kept, longer)
                state = world.state()
                if state not in seen:
                    seen.add(state)
                    following.append(longer)
        frontier = following
    assert len(seen) > 800  # it did explore


@pytest.mark.promise("slots")
def test_what_is_needed_last_goes_first() -> None:
    """`a`, `b` and `c` are wanted in turn, `d` is not wanted. Fails if the order of eviction changes."""
    slots = Slots([Cell() for _ in range(4)], InFlight(Timeline()))
    held = {value: slots.take(value) for value in "abcd"}
    for value, due in ("a", 2), ("b", 3), ("c", 1), ("d", None):
        slots.keep(held[value], due=due)
    assert slots.idle(steal=False) == [held["d"]]
    assert "".join(slot.key for slot in slots.idle()) == "dbac"
    assert slots.try_take("e") is held["d"] and slots.try_take("f") is None
    assert slots.try_take("f", steal=True) is held["b"]


def test_what_another_thread_takes_hold_of_is_not_forgotten() -> None:
    """The other thread gets its chance at the last moment. Fails if idle slots are looked up without the condition."""
    armed, waiting, held = threading.Event(), threading.Event(), threading.Event()

    class Condition(threading.Condition):
        def __enter__(self) -> bool:
            if armed.is_set() and threading.current_thread() is threading.main_thread():
                armed.clear()
                waiting.set()
                held.wait(60)
            return super().__enter__()

    slots = Slots([Cell()], InFlight(Timeline()), Condition(threading.RLock()))
    slots.keep(slots.take("a"))
    armed.set()

    def other() -> None:
        waiting.wait(60)
        slots.take("a")
        held.set()

    thread = threading.Thread(target=other)
    thread.start()
    slots.forget()
    thread.join()
    slot = slots.find("a")
    assert slot is not None and slot.holders


def test_an_error_in_flight_is_raised_by_whoever_takes_the_slot_and_then_it_is_free() -> None:
    """Fails if the error is lost, or if a slot is lost with it."""

    class Failed:
        def done(self) -> bool:
            return True

        def wait(self) -> None:
            raise OSError("no space")

    slots = Slots([Cell()], InFlight(Timeline()))
    slot = slots.take("a")
    slot.leaves(Failed())
    slots.give(slot)
    with pytest.raises(OSError, match="no space"):
        slots.take("b")
    assert slots.take("b") is slot

    def fill(slot: Slot[Cell]) -> None:
        raise OSError("no file")

    slots.give(slot)
    with pytest.raises(OSError, match="no file"):
        slots.take("c", fill=fill)
    assert slots.take("c") is slot
