"""Decides who gets a slot of host memory, and whose values are evicted from it. Values pass through equal slots.

Owns neither the values nor their transfers, which it neither begins nor records.

Parameters, gradients, optimizer states, activations on nvme, mirrors of tiles on a device, and gradients that a device
sends each have a pool of equal slots, and all pools are `Slots`.

[Note: a slot]
    free ──take──> held ──give──────────────────────────────> free
                    │ ▲
               keep ▼ │ take                           a kept slot has its values until they are evicted
                   kept ──evicted by take, or forgotten──────> free
Transfers and copies may be in flight into a slot and out of it in any of these states; `transfers.InFlight` knows them.
These invariants hold, and tests/unit/zero_offload/test_slots.py tries every order of events for them:

1. A held slot is never evicted, nor one with values that no tier has.
2. take() returns a slot only when nothing is in flight into it or out of it, or when `follow` has ordered the slot's
   next use after that. So no value is overwritten before it is written to its tier, and no read lands in memory that
   now belongs to another value.
3. take() waits only until a transfer ends, or until somebody lets go of a slot. So a thread that holds no slot while it
   waits cannot cause a deadlock, with three slots or any other number.
4. take() prefers an empty slot, then values that nobody wants, those used longest ago first. If the caller may `steal`,
   wanted values come next, those needed last first. This is the optimal replacement of Belady ("A study of replacement
   algorithms", 1966, section on MIN), which is possible because the order of uses is known here.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..monitor import Condition
from ..protocols import Started
from .transfers import END, InFlight

Memory = TypeVar("Memory")
PASSING_SLOTS = 4  # for tiles that are read, updated and written: two on their way, as a disk needs, each way


def resident_slots(slots: int, tiles: int) -> int:
    """The number of slots whose tile stays from one update to the next, where `tiles` tiles use `slots` slots.

    All, if every tile has a slot. Else PASSING_SLOTS are left for the other tiles: a slot whose tile stays saves a read
    and a write in each step, one more passing slot saves neither.
    """
    return slots if slots >= tiles else max(0, slots - PASSING_SLOTS)


@dataclass(eq=False)
class Slot(Generic[Memory]):
    """One piece of memory. `key`: the tile or unit whose values it has, or will have when filled; None: it is empty."""

    memory: Memory
    in_flight: InFlight
    key: Any = None  # hashable
    holders: set[str] = field(default_factory=set)
    due: Any = None  # when its values are needed next, in an order of the pool's users; None: nobody wants them
    # Values that no tier has: each with a function that begins to store it and returns its place. Prevents eviction.
    unsaved: dict[Hashable, Callable[[], Hashable]] = field(default_factory=dict)

    def fills(self, request: Started) -> None:
        """Records that the request brings the slot's values, or a part of them."""
        self.in_flight.begin(request, self, writes=True)

    def leaves(self, request: Started, start: int = 0, stop: int = END) -> None:
        """Records that the request reads bytes [start, stop) of the slot."""
        self.in_flight.begin(request, self, start, stop, writes=False)

    def filled(self) -> bool:
        return all(each.done() for each in self.in_flight.of(self, writes=True))

    def wait_filled(self) -> None:
        """Returns when the values are there. They may still be leaving. Raises a failed read's error, each time."""
        self.in_flight.wait(self.in_flight.of(self, writes=True))

    def changeable(self, start: int = 0, stop: int = END) -> bool:
        """Whether wait_changeable would return at once."""
        return all(each.done() for each in self.moving(start, stop))

    def wait_changeable(self, start: int = 0, stop: int = END) -> None:
        """Returns when the values are there and nothing reads bytes [start, stop) any more."""
        self.in_flight.wait(self.moving(start, stop))

    def moving(self, start: int = 0, stop: int = END) -> list[Started]:
        """The requests that fill the slot or read these bytes of it."""
        return self.in_flight.of(self, start, stop)


Fill = Callable[[Slot[Memory]], object]


class Slots(Generic[Memory]):
    """A pool of equal slots. `condition` guards it; without one, a single thread uses it at a time.

    blocked: called under the condition while every slot is held; it waits for a change, or raises.
    follow: called with each request in flight, instead of waiting for it, to order the slot's next use after it.
    """

    def __init__(
        self,
        memories: Iterable[Memory],
        in_flight: InFlight,
        condition: Condition | None = None,
        *,
        blocked: Callable[[], object] | None = None,
        follow: Callable[[Any], object] | None = None,
    ) -> None:
        # Ordered by when they were let go of, the longest ago first.
        self._slots = OrderedDict((Slot(memory, in_flight), None) for memory in memories)
        self._by_key: dict[Hashable, Slot[Memory]] = {}
        self._condition = condition or Condition()
        self._in_flight, self._blocked, self._follow = in_flight, blocked or self._all_held, follow
        self._numbers = itertools.count(1)

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot[Memory]]:
        return iter(list(self._slots))  # a copy, because a slot that is let go of moves to the end

    def idle(self, *, steal: bool = True) -> list[Slot[Memory]]:
        """The slots that nobody holds, in the order in which they are evicted; wanted ones only with `steal`.

        Valid only while the caller holds the condition.
        """
        idle = [slot for slot in self if not slot.holders and not slot.unsaved]
        unwanted = sorted((slot for slot in idle if slot.due is None), key=lambda slot: slot.key is not None)
        if not steal:
            return unwanted
        return [*unwanted, *sorted((s for s in idle if s.due is not None), key=lambda s: s.due, reverse=True)]

    def find(self, key: Hashable) -> Slot[Memory] | None:
        """The slot that has the values of `key`, or soon will."""
        return self._by_key.get(key)

    def try_take(
        self, key: Hashable, holder: str = "", *, fill: Fill[Memory] | None = None, steal: bool = False
    ) -> Slot[Memory] | None:
        """The slot with the values of `key`, or another one for them, held: it is not evicted until the holder lets go.

        None if that would wait. fill: begins to fill another slot, before another thread finds it. Raises the error of
        a failed request of a slot that is taken.
        """
        with self._condition:
            slot = self.find(key)
            if slot is not None:
                slot.holders.add(holder)
                return slot
            for slot in self.idle(steal=steal):
                if self._follow is not None or slot.changeable():
                    return self._assign(slot, key, holder, fill)
            return None

    def take(
        self,
        key: Hashable,
        holder: str = "",
        *,
        fill: Fill[Memory] | None = None,
        steal: Callable[[], bool] = lambda: True,
        blocked: Callable[[], object] | None = None,
    ) -> Slot[Memory]:
        """As `try_take`, but waits for requests, or until a slot is let go of. `blocked`: the pool's, for this call."""
        while True:
            with self._condition:
                idle = self.idle(steal=steal())
                slot = self.try_take(key, holder, fill=fill, steal=bool(idle) and idle[0].due is not None)
                if slot is not None:
                    return slot
                moving = idle[0].moving() if idle else []
                if not idle:
                    (blocked or self._blocked)()
            for each in moving:  # not under the condition: other threads go on meanwhile
                with suppress(Exception):  # whoever takes the slot raises it
                    self._in_flight.wait([each])

    def _assign(self, slot: Slot[Memory], key: Hashable, holder: str, fill: Fill[Memory] | None) -> Slot[Memory]:
        filling = self._in_flight.of(slot, writes=True)
        try:
            for each in slot.moving():
                self._follow(each) if self._follow is not None else self._in_flight.wait([each])
            self._forget(slot)
        except BaseException:
            if filling:  # else the values are whole, whatever became of their way to the tier
                self._forget(slot)
            raise
        finally:
            self._in_flight.forget(slot)
        slot.key = key
        if key is not None:
            self._by_key[key] = slot
        slot.holders.add(holder)
        if fill is not None:
            try:
                fill(slot)
            except BaseException:
                self.give(slot, holder)
                raise
        return slot

    def keep(self, slot: Slot[Memory], holder: str = "", *, due: Any = None) -> None:
        """The holder lets go. The slot has its values until it is evicted: see `idle`."""
        with self._condition:
            slot.holders.discard(holder)
            slot.due = due
            if slot in self._slots:
                self._slots.move_to_end(slot)
            self._condition.notify_all()

    def tick(self) -> int:
        """A number larger than all before. As `due`, it orders slots by the time at which they were kept."""
        return next(self._numbers)

    def give(self, slot: Slot[Memory], holder: str = "") -> None:
        """The holder lets go of a slot whose values nobody will use again."""
        with self._condition:
            self._forget(slot)
            self.keep(slot, holder)

    def forget(self, but: Collection[Hashable] = ()) -> None:
        """Frees all kept slots, except those of the keys in `but`. Held slots stay held."""
        with self._condition:
            for slot in self.idle():
                if slot.key is not None and slot.key not in but:
                    self.give(slot)

    def unsaved(self) -> list[tuple[Slots[Memory], Slot[Memory]]]:
        """This pool and each slot with values that no tier has."""
        return [(self, slot) for slot in self if slot.unsaved]

    def saved(self, slot: Slot[Memory]) -> None:
        """Records that the tier has the slot's values, or will have them when the transfer ends."""
        with self._condition:
            slot.unsaved.clear()
            self._condition.notify_all()

    def drain(self) -> None:
        """Returns when nothing is in flight. Raises the first error, after everything has ended."""
        failure: Exception | None = None
        for each in [each for slot in self for each in slot.moving()]:
            try:
                self._in_flight.wait([each])
            except Exception as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def forget_leaving(self) -> set[Any]:
        """After a transfer failed: forgets all reads of slots, once they have ended, failed or not. Returns the keys of
        the slots, whose values are in memory either way.
        """
        with suppress(Exception):
            self.drain()
        for slot in self:
            self._in_flight.forget(slot, writes=False)
        return {slot.key for slot in self if slot.key is not None}

    def clear(self) -> None:
        """Drops the memory. Called while nothing is in flight."""
        for slot in self:
            self._in_flight.forget(slot)
        self._slots.clear()
        self._by_key.clear()

    def _forget(self, slot: Slot[Memory]) -> None:
        self._by_key.pop(slot.key, None)
        slot.key, slot.due = None, None
        slot.unsaved.clear()

    def _all_held(self) -> None:
        raise AssertionError(f"all {len(self)} slots are held by whoever wants another one")
