"""Writes a slot's values to their tier where no other copy has them.

Owns nothing. The stores of states, parameters and gradients decide which values stay in their slots.

[Note: written back]
A tile that stays in its slot until it is needed again is not written after each change: the slot is `unsaved`, so that
nothing evicts it. Its values go to the tier when another tile is to stay in its place, or before the memory goes
(sleep, a second stage). A process that is killed leaves older values on the tier than its last step's, and so only
stores that are not durable write back: nobody reads those values again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from ..memory.arena import Block
from ..memory.slots import Slot, Slots


def begin_saving(slots: Slots[Block], slot: Slot[Block]) -> None:
    """Begins to store the slot's values. Once they are stored, another tile or unit may take the slot."""
    for write in slot.unsaved.values():
        write()
    slots.saved(slot)


def save(unsaved: Iterable[tuple[Slots[Block], Slot[Block]]]) -> None:
    """Returns when the values of these slots are stored. The caller ensures that nobody uses the slots meanwhile.

    Raises the first error of a write. Slots whose write failed stay unsaved, so that another call can try again.
    """
    failure: Exception | None = None
    begun: list[tuple[Slots[Block], Slot[Block], list[Hashable]]] = []
    for slots, slot in unsaved:
        begun.append((slots, slot, []))
        try:
            for write in slot.unsaved.values():
                begun[-1][2].append(write())
        except Exception as error:
            failure = failure or error
    for slots, slot, places in begun:
        try:
            slot.wait_changeable()
            if len(places) == len(slot.unsaved):
                slots.saved(slot)
        except Exception as error:  # forgotten, so that the next call can write the same bytes
            failure = failure or error
            for place in places:
                slot.in_flight.forget(place)
            slot.in_flight.forget(slot, writes=False)
    if failure is not None:
        raise failure
