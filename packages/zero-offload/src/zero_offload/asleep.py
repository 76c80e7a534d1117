"""The memory of a TieredStore that gives it away: for a while, put aside, or unit by unit to a store that follows it.

Owns the bytes that were put aside. It waits for nothing: when a store may sleep is the store's to say.
"""

from __future__ import annotations

from torch import Tensor

from zero_core.saved_bytes import SavedBytes

from .arena import Arena
from .errors import START_AGAIN, BudgetError, SwapError
from .monitor import Monitor
from .protocols import ByteStore
from .running.link import Link
from .tiles.gradients import GradientStore
from .tiles.parameters import ParameterStore
from .tiles.states import StateStore
from .tiles.write_back import save

__all__ = ["Memory"]

_STILL_AWAKE = "the store is awake and has lost nothing: make room there, or give sleep(to=) another ByteStore"
_STILL_ASLEEP = (
    "the store still sleeps and nothing was freed: call wake() again when the cause is gone. If its bytes cannot be "
    f"read any more, end the run and {START_AGAIN}"
)


class Memory:
    """Of one attached store. Nothing is in flight, and nothing is lent, when its methods are called."""

    def __init__(
        self,
        arena: Arena,
        parameters: ParameterStore,
        states: StateStore,
        gradients: GradientStore,
        link: Link | None,
        monitor: Monitor,
    ) -> None:
        self._arena, self._link, self._monitor = arena, link, monitor
        self._parameters, self._states, self._gradients = parameters, states, gradients
        self.aside = SavedBytes()  # the bytes meanwhile
        self._given_up: set[int] = set()  # units whose shards another store has

    def put_into(self, keeper: ByteStore) -> None:
        """Raises SwapError where a write fails or there is no room; everything is where it was then."""
        values = self._values()
        try:
            self._save()
            self.aside.put(keeper, values)
        except Exception as error:
            raise _failed("sleep", error, _STILL_AWAKE) from error
        del values  # views of the arena keep its memory
        self._monitor.asleep = True
        self._let_go()

    def take_back(self) -> None:
        """Raises BudgetError or SwapError; the bytes are still aside then, and the memory is not taken."""
        try:
            self._arena.take_back()
            if self._link is not None:
                self._link.streams.register(self._arena.whole())
                self._link.take_back()
            self.aside.take(self._values())
        except BaseException as error:
            self._let_go()
            if isinstance(error, BudgetError) or not isinstance(error, Exception):
                raise
            raise _failed("wake", error, _STILL_ASLEEP) from error
        if self._link is not None:
            self._link.device.restored()
        self._monitor.asleep = False
        self.aside.free()

    def give_up(self, i: int, units: int) -> bool:
        """Only what is in memory of those of the `units` that were not given up stays there. False: nothing of i was.

        Not where a device has registered the memory.
        """
        if self._link is not None:
            return False
        self._save()
        self._given_up.add(i)
        for slots in (self._parameters, self._states.slots, self._gradients.slots):
            slots.forget()
        blocks = {j: [*self._parameters.blocks(j), *self._states.blocks(j)] for j in range(units)}
        self._arena.keep_only(block for j, each in blocks.items() if j not in self._given_up for block in each)
        return bool(blocks[i])

    def _save(self) -> None:
        """Store what only slots have. Raises SwapError; nothing is lost then."""
        save([*self._parameters.unsaved(), *self._states.slots.unsaved(), *self._gradients.slots.unsaved()])

    def take_up(self, i: int) -> None:
        """What unit i has in memory stays there again."""
        self._given_up.discard(i)

    def _values(self) -> list[Tensor]:
        """Whatever no ByteStore has, in an order that stays while the store sleeps. Slots have only copies."""
        here = [*self._parameters.in_memory(), *self._states.in_memory(), *self._gradients.kept_in_memory()]
        return here if self._link is None else [*here, *self._link.device.values()]

    def _let_go(self) -> None:
        """Give all memory away. Idempotent."""
        for slots in (self._parameters, self._states.slots, self._gradients.slots):
            slots.forget()
        if self._link is not None:
            self._link.let_go()
            if self._arena.has_memory:
                self._link.streams.give_back(self._arena.whole())
        self._arena.give_back()


def _failed(call: str, error: Exception, way_out: str) -> SwapError:
    explained = SwapError(f"{call}() failed: {error}; {way_out}")
    explained.errno = getattr(error, "errno", None)
    return explained
