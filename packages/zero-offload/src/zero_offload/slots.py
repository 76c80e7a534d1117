"""Slots: the memory that values pass through, and who may use it. Owns no values and begins no transfer.

Parameters, gradients, optimizer states, activations on nvme, mirrors of tiles that live on a device, gradients on their
way from one: each has a pool of equal slots, and all pools are `Slots`.

[Note: a slot]
    free ──take──> held ──give──────────────────────────────> free
                    │ ▲
               keep ▼ │ take_kept                      a kept slot has its values until they are evicted
                   kept ──evicted by take, or forgotten──────> free
Transfers and copies may be in flight into a slot (`filling`) and out of it (`leaving`) in any of these states. These
invariants hold, and tests/unit/zero_offload/test_slots.py tries every order of events for them:

1. A held slot is never evicted.
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

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from .monitor import Condition

__all__ = ["Moving", "Slot", "Slots"]

Memory = TypeVar("Memory")


class Moving(Protocol):
    """A transfer (`tier.Transfer`) or a copy (`streams.Mark`) in flight."""

    def done(self) -> bool: ...

    def wait(self) -> None:
        """Raises the error of a transfer that failed, each time."""


@dataclass(eq=False)
class Slot(Generic[Memory]):
    """`key`: whose values it has, or will have when `filling` is done. None: it has nobody's."""

    memory: Memory
    key: Any = None  # hashable
    holders: set[str] = field(default_factory=set)
    due: Any = None  # when its values are needed next, in an order of the pool's users; None: nobody wants them
    used: int = 0  # when it was last let go of, by the pool's clock
    filling: list[Moving] = field(default_factory=list)
    leaving: dict[Hashable, Moving] = field(default_factory=dict)  # by the part of the slot, None: all of it

    def filled(self) -> bool:
        return all(each.done() for each in self.filling)

    def wait_filled(self) -> None:
        """Return when the values are there; they may still be leaving. Raises the error of a failed read, each time."""
        for each in self.filling:
            each.wait()

    def changeable(self, part: Hashable = None) -> bool:
        """Whether wait_changeable would return at once."""
        return all(each.done() for each in self.moving(part))

    def wait_changeable(self, part: Hashable = None) -> None:
        """Return when the values are there and nothing leaves of the `part`; None stands for all of the slot."""
        for each in self.moving(part):
            each.wait()

    def moving(self, part: Hashable = None) -> list[Moving]:
        """What is in flight into the slot, or out of the `part`, or was when it was last waited for."""
        leaving = [each for whose, each in list(self.leaving.items()) if part is None or whose in (None, part)]
        return [*self.filling, *leaving]


Fill = Callable[[Slot[Memory]], object]


class Slots(Generic[Memory]):
    """A pool of equal slots. `condition` guards it; without one, a single thread uses it at a time.

    blocked: called under the condition while every slot is held; it waits for a change, or raises.
    follow: called for what is in flight in the place of waiting for it; the slot's next use is ordered after it.
    """

    def __init__(
        self,
        memories: Iterable[Memory],
        condition: Condition | None = None,
        *,
        blocked: Callable[[], object] | None = None,
        follow: Callable[[Any], object] | None = None,
    ) -> None:
        self._slots = [Slot(memory) for memory in memories]
        self._by_key: dict[Hashable, Slot[Memory]] = {}
        self._condition = condition or Condition()
        self._blocked, self._follow = blocked or self._all_held, follow
        self._clock = 0

    def __len__(self) -> int:
        return len(self._slots)

    def __iter__(self) -> Iterator[Slot[Memory]]:
        return iter(self._slots)

    def idle(self, *, steal: bool = True) -> list[Slot[Memory]]:
        """The slots that nobody holds, in the order in which they are evicted; wanted ones only with `steal`.

        It is true as long as the caller has the condition.
        """
        idle = [slot for slot in self._slots if not slot.holders]
        unwanted = sorted((s for s in idle if s.due is None), key=lambda s: (s.key is not None, s.used))
        wanted = sorted((s for s in idle if s.due is not None), key=lambda s: s.due, reverse=True)
        return [*unwanted, *wanted] if steal else unwanted

    def find(self, key: Hashable) -> Slot[Memory] | None:
        """The slot that has the values of `key`, or soon will."""
        return self._by_key.get(key)

    def hold(self, key: Hashable, holder: str = "") -> Slot[Memory] | None:
        """As `find`, and the slot is not evicted until the holder lets go."""
        with self._condition:
            slot = self._by_key.get(key)
            if slot is not None:
                slot.holders.add(holder)
            return slot

    def try_take(
        self, key: Hashable, holder: str = "", *, fill: Fill[Memory] | None = None, steal: bool = False
    ) -> Slot[Memory] | None:
        """A slot for `key`, held, if one can be had without waiting. Raises the error of what was in flight there.

        fill: begins what goes into `slot.filling`, before another thread finds the slot.
        """
        with self._condition:
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
        """A slot for `key`, held; waits for what is in flight, or until a slot is let go. `blocked`: for this call."""
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
                    each.wait()

    def _assign(self, slot: Slot[Memory], key: Hashable, holder: str, fill: Fill[Memory] | None) -> Slot[Memory]:
        assert key is None or key not in self._by_key, f"{key} has a slot"
        try:
            for each in slot.moving():
                self._follow(each) if self._follow is not None else each.wait()
        finally:
            slot.filling, slot.leaving = [], {}
            self._forget(slot)
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
            slot.due, slot.used = due, self.tick()
            self._condition.notify_all()

    def tick(self) -> int:
        """A number larger than all before: the `due` of what is needed in the order in which it was kept."""
        self._clock += 1
        return self._clock

    def give(self, slot: Slot[Memory], holder: str = "") -> None:
        """The holder lets go of a slot whose values nobody will ask for."""
        with self._condition:
            self._forget(slot)
            self.keep(slot, holder)

    def forget(self, but: Collection[Hashable] = ()) -> None:
        """Nobody will ask for what is kept, `but` for these keys. What is held stays held."""
        with self._condition:
            for slot in self.idle():
                if slot.key is not None and slot.key not in but:
                    self.give(slot)

    def drain(self) -> None:
        """Return when nothing is in flight. Raises the first error, after everything has ended."""
        failure: Exception | None = None
        for slot in self._slots:
            for each in slot.moving():
                try:
                    each.wait()
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure

    def forget_leaving(self) -> set[Any]:
        """After a transfer failed: whatever leaves has ended, well or not. Returns the keys of the slots, whose values
        are in memory in any case.
        """
        for slot in self._slots:
            for each in slot.leaving.values():
                with suppress(Exception):
                    each.wait()
            slot.leaving = {}
        return set(self._by_key)

    def clear(self) -> None:
        """Drop the memory; nothing is in flight."""
        self._slots.clear()
        self._by_key.clear()

    def _forget(self, slot: Slot[Memory]) -> None:
        self._by_key.pop(slot.key, None)
        slot.key, slot.due = None, None

    def _all_held(self) -> None:
        raise AssertionError(f"all {len(self)} slots are held by whoever wants another one")
