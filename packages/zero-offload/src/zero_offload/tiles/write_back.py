"""Knows which slots have values that no tier has yet, and stores them when somebody asks for it.

Owns no memory. Whose values stay in their slots is for the stores of states, parameters and gradients to say.

[Note: written back]
A tile that stays in its slot until it is needed again is not written after each change: its slot is held by DIRTY, so
that nothing evicts it. Its values go to the tier when another tile is to stay in its place, or before the memory goes
(sleep, a second stage). A process that is killed leaves older values on the tier than its last step's, and so only
stores that are not durable write back: nobody reads those values again.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

from ..arena import Block
from ..monitor import Condition
from ..slots import DIRTY, Slot, Slots

__all__ = ["WriteBack"]

Write = Callable[[], Hashable]  # begins to store a part of a slot's values, and returns the place that this writes


class WriteBack:
    """Of one attached store. Any thread marks slots, and whoever may use a slot's values stores or drops them."""

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._dirty: dict[Slot[Block], tuple[Slots[Block], dict[Hashable, Write]]] = {}

    def stay(self, slots: Slots[Block], slot: Slot[Block], what: Hashable, write: Write) -> None:
        """`what` in the slot has new values, which `write` will store."""
        with self._condition:
            slot.holders.add(DIRTY)
            self._dirty.setdefault(slot, (slots, {}))[1][what] = write

    def drop(self, slot: Slot[Block]) -> None:
        """Nobody needs the values any more."""
        with self._condition:
            if self._dirty.pop(slot, None) is not None:
                slot.holders.discard(DIRTY)
                self._condition.notify_all()

    def begin(self, slot: Slot[Block]) -> None:
        """Begin to store the values; the slot is another's as soon as that is done."""
        slots, writes = self._dirty[slot]
        for write in writes.values():
            write()
        with self._condition:
            del self._dirty[slot]
            slots.keep(slot, DIRTY, due=slot.due)

    def settle(self, of: Iterable[Slot[Block]] | None = None) -> None:
        """Return when everything is stored, or what these slots have. No slot in question is used meanwhile.

        Raises the first error of a write. What could not be stored is still in its slot, and the next call stores it.
        """
        with self._condition:
            dirty = [slot for slot in (self._dirty if of is None else of) if slot in self._dirty]
        failure: Exception | None = None
        begun: list[tuple[Slot[Block], list[Hashable], bool]] = []
        for slot in dirty:
            places: list[Hashable] = []
            try:
                places.extend(write() for write in self._dirty[slot][1].values())
                begun.append((slot, places, True))
            except Exception as error:
                failure = failure or error
                begun.append((slot, places, False))
        for slot, places, whole in begun:
            try:
                slot.wait_changeable()
            except Exception as error:  # forgotten, so that the next call can write the same bytes
                failure = failure or error
                slot.in_flight.forget(slot, writes=False)
                for place in places:
                    slot.in_flight.forget(place)
                continue
            if whole:
                with self._condition:
                    slots, _ = self._dirty.pop(slot)
                    slots.keep(slot, DIRTY, due=slot.due)
        if failure is not None:
            raise failure
