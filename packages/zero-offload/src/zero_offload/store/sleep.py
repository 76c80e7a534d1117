"""Frees a TieredStore's memory: all of it while the store sleeps, or unit by unit while another store takes over.

Owns the bytes of a sleeping store. Waits for no other thread: the store decides when it may sleep.
"""

from __future__ import annotations

from torch import Tensor

from ..core import SavedBytes
from ..errors import START_AGAIN, BudgetError, SwapError
from ..protocols import ByteStore
from ..tiles.states import StateStore
from ..tiles.store_context import Shared
from ..tiles.write_back import save
from .host_path import HostPath

_STILL_AWAKE = "the store is awake and has lost nothing: make room there, or give sleep(to=) another ByteStore"
_STILL_ASLEEP = (
    "the store still sleeps and nothing was freed: call wake() again when the cause is gone. If its bytes cannot be "
    f"read any more, end the run and {START_AGAIN}"
)


class Memory:
    """The memory of one attached store. Callers ensure that no transfer is in flight and no parameter is lent."""

    def __init__(self, shared: Shared, path: HostPath, states: StateStore) -> None:
        self._arena, self._path, self._monitor = shared.arena, path, shared.monitor
        self._host, self._states, self._gradients = path.host, states, path.gradients
        self._units = len(shared.plan.units)
        self.aside = SavedBytes()  # the bytes of a sleeping store
        self._given_up: set[int] = set()  # units whose shards another store has taken

    def put_into(self, keeper: ByteStore) -> None:
        """Moves the bytes in memory into `keeper`, and frees the memory.

        Raises SwapError if a write fails or there is no room. Then the memory is unchanged.
        """
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
        """Allocates the memory and reads the bytes back. Raises BudgetError or SwapError, and sleeps on."""
        try:
            self._arena.take_back()
            self._path.take_back(self._arena.whole())
            self.aside.take(self._values())
        except BaseException as error:
            self._let_go()
            if isinstance(error, BudgetError) or not isinstance(error, Exception):
                raise
            raise _failed("wake", error, _STILL_ASLEEP) from error
        self._path.restored()
        self._monitor.asleep = False
        self.aside.free()

    def give_up(self, i: int) -> bool:
        """Gives up unit i: only parameters and states of units that were not given up keep their memory.

        Returns False if unit i had no memory, and if a device has registered the memory, which is then kept.
        """
        if (whole := self._path.whole(i)) is not None:
            self._path.drain()
            return whole.give_up(i)
        if self._path.streams is not None:
            return False
        self._save()
        self._given_up.add(i)
        for slots in (self._host, self._states.slots, self._gradients.slots):
            slots.forget()
        blocks = {j: [*self._host.blocks(j), *self._states.blocks(j)] for j in range(self._units)}
        self._arena.keep_only(block for j, each in blocks.items() if j not in self._given_up for block in each)
        return bool(blocks[i])

    def _save(self) -> None:
        """Stores the values that are only in slots. Raises SwapError without losing any."""
        save([*self._host.unsaved(), *self._states.slots.unsaved(), *self._gradients.slots.unsaved()])

    def take_up(self, i: int) -> None:
        """Undoes `give_up`: unit i's blocks are kept again."""
        self._given_up.discard(i)

    def _values(self) -> list[Tensor]:
        """Returns the tensors that are in no ByteStore. Their order does not change during sleep. Slots hold copies."""
        here = [*self._host.in_memory(), *self._states.in_memory(), *self._gradients.kept_in_memory()]
        return [*here, *self._path.values()]

    def _let_go(self) -> None:
        """Frees all memory. Idempotent."""
        for slots in (self._host, self._states.slots, self._gradients.slots):
            slots.forget()
        self._path.let_go(self._arena.whole() if self._arena.has_memory else None)
        self._arena.give_back()


def _failed(call: str, error: Exception, way_out: str) -> SwapError:
    explained = SwapError(f"{call}() failed: {error}; {way_out}")
    explained.errno = getattr(error, "errno", None)
    return explained
