"""Builds the parts of a TieredStore when it is attached, lays out its shards, frees their memory and ends the parts.

The memory goes all at once while the store sleeps, or unit by unit while another store takes over. Owns the bytes of a
sleeping store. Not here: the order of calls, and when a store may sleep (in tiered_store.py), and the parts themselves:
`tiles` own the bytes, the pipeline owns the background updates, the paths lend units and take gradients, and the step
owns the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..core import DeviceStore, SavedBytes, StoreContext
from ..durable.generations import Generations
from ..errors import START_AGAIN, AsleepError, BudgetError, PlacementError, SwapError
from ..layout.footprint import STATE_KINDS, StorePlan
from ..memory.arena import Arena, HostBudget
from ..memory.transfers import Stores
from ..monitor import Ending, Monitor
from ..protocols import ByteStore, UpdateStep
from ..streams import Streams, arena_of
from ..tier import Tier
from ..tiles.gradients import GradientStore
from ..tiles.states import StateStore
from ..tiles.store_context import Shared, save
from ..tiles.value_access import PinnedValues, Values
from ..update_thread.pipeline import Pipeline
from .paths import DevicePath, HostPath

_STILL_AWAKE = "the store is awake and has lost nothing: call sleep() once more. Or give sleep(to=) another ByteStore"
_STILL_ASLEEP = f"the store sleeps and has lost nothing: remove the cause and call wake() again. Or else {START_AGAIN}"


class Memory:
    """The memory of one attached store. Callers ensure that no update is under way."""

    def __init__(self, shared: Shared, path: HostPath, states: StateStore, values: Values) -> None:
        self._shared, self._path, self._states, self._first = shared, path, states, values.first
        self.aside = SavedBytes()  # the bytes of a sleeping store
        self._given_up: set[int] = set()  # units whose shards another store has taken

    def put_into(self, to: ByteStore | None) -> None:
        """Moves the bytes in memory into `to`, by default the slowest stored tier, and frees the memory.

        Raises PlacementError if there is no such tier, AsleepError while a parameter is lent, and SwapError if a write
        fails or there is no room. Then the memory is unchanged.
        """
        plan, stores = self._shared.plan, self._shared.stores
        slowest = next((stores[tier].store for tier in reversed(plan.tiers) if tier in stores), None)
        keeper = slowest if to is None else to
        if keeper is None:
            raise PlacementError(
                "sleep() has nowhere to put the bytes of this store, which has no nvme= and no tiers=; give sleep(to=) "
                "a ByteStore, such as zero_nvme.Slab([path])"
            )
        if used := self._path.in_use():
            names = ", ".join(plan.units[i].spec.name for i in sorted(used))
            raise AsleepError(f"sleep() with units in use ({names}): call zero_core.sleep(model), which frees them")
        self._path.drain()
        values = self._values()
        try:
            self._save()
            self.aside.put(keeper, values)
        except Exception as error:
            raise _failed("sleep", error, _STILL_AWAKE) from error
        del values  # views of the arena keep its memory
        self._shared.monitor.asleep = True
        self._let_go()

    def take_back(self) -> None:
        """Allocates the memory and reads the bytes back. Raises BudgetError or SwapError, and sleeps on."""
        try:
            self._shared.arena.take_back()
            self._path.take_back(self._shared.arena.whole())
            self.aside.take(self._values())
        except BaseException as error:
            self._let_go()
            if isinstance(error, BudgetError) or not isinstance(error, Exception):
                raise
            raise _failed("wake", error, _STILL_ASLEEP) from error
        self._path.restored()
        self._shared.monitor.asleep = False
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
        for slots in self._shared.pools:
            slots.forget()
        units = range(len(self._shared.plan.units))
        blocks = {j: [*self._path.host.blocks(j), *self._states.blocks(j)] for j in units}
        self._shared.arena.keep_only(block for j, each in blocks.items() if j not in self._given_up for block in each)
        return bool(blocks[i])

    def _save(self) -> None:
        """Stores the values that are only in slots. Raises SwapError without losing any."""
        save([each for slots in self._shared.pools for each in slots.unsaved()])

    def take_up(self, i: int) -> None:
        """Undoes `give_up`: unit i has memory again, and zeros in it."""
        if (whole := self._path.whole(i)) is not None:
            whole.take_up(i)
            return
        spec = self._shared.plan.units[i].spec
        self._given_up.discard(i)
        with torch.no_grad(), self._shared.monitor.guard():
            self._first(i, torch.zeros(spec.numel, dtype=spec.master_dtype, device="cpu"))

    def _values(self) -> list[Tensor]:
        """Returns the tensors that are in no ByteStore. Their order does not change during sleep. Slots hold copies."""
        path = self._path
        here = [*path.host.in_memory(), *self._states.in_memory(), *path.gradients.kept_in_memory()]
        return [*here, *path.values()]

    def _let_go(self) -> None:
        """Frees all memory. Idempotent."""
        arena = self._shared.arena
        for slots in self._shared.pools:
            slots.forget()
        self._path.let_go(arena.whole() if arena.has_memory else None)
        arena.give_back()


def _failed(call: str, error: Exception, way_out: str) -> SwapError:
    explained = SwapError(f"{call}() failed: {str(error).removesuffix(f', then {START_AGAIN}')}; {way_out}")
    explained.errno = getattr(error, "errno", None)
    return explained


COMMITS = -1  # the key of commits under way in `Monitor.updates`, where units have their numbers


class Attached:
    """The parts of one store from attach to close. Reserves every byte of `plan` when it is built."""

    def __init__(
        self,
        plan: StorePlan,
        context: StoreContext,
        step: UpdateStep,
        stores: Stores,
        budget: HostBudget | None,
        make_streams: Callable[[Tensor], Streams] | None,
        generations: Generations | None = None,
        there: UpdateStep | None = None,
    ) -> None:
        """there: as in `Shared`."""
        self.plan, self._context, self._step, self._stores = plan, context, step, stores
        self.generations: Any = generations  # None: the store is not durable, and no call below is made
        self.monitor = monitor = Monitor(stores.in_flight.timeline, context.observer)
        with ExitStack() as undone:
            undone.callback(stores.free)
            self.arena = arena = arena_of(context.device, plan.arena_bytes, budget)
            undone.callback(arena.close)
            streams = None if make_streams is None else make_streams(arena.whole())
            shared = Shared(plan, context, step, arena, stores, monitor, generations, streams, there)
            self.path = path = HostPath(shared) if streams is None else DevicePath(shared, streams)
            states, self.order, self._pools = StateStore(shared), shared.order, shared.pools
            self.values = Values(plan.units, path.host, states, step)
            self.pipeline = Pipeline(shared, path.host, path.gradients, states, path.poll)
            self.memory = Memory(shared, path, states, self.values)
            undone.pop_all()
        # Also when the store is garbage-collected, and before the interpreter exits: memory must outlive its transfers.
        end = partial(_shut_down, self.pipeline, stores, path, arena, self.memory.aside, generations)
        self.close = Ending(self, end)

    def lay_out(self, optimizer: torch.optim.Optimizer, initial: Callable[[int], Tensor]) -> None:
        """Takes over every shard in order, one in memory at a time. A discrete device asks for those that it keeps.

        On an error, gives the masters back, those in memory first, because reading the others takes memory.
        """
        units, taken, generations = self.plan.units, list[int](), self.generations
        adopted = generations is not None and generations.blob is not None

        def take(i: int) -> Tensor:
            master = initial(i)
            try:
                self.values.first(i, master, kept=adopted)
            except BaseException:
                self._context.rescue(i, master)
                raise
            taken.append(i)
            return master

        try:
            with torch.no_grad(), self.monitor.guard():
                if generations is not None and adopted:
                    generations.load_sources()
                self.path.lay_out(take, optimizer)
            self.pipeline.wait()
        except BaseException:
            with suppress(Exception):  # the first error is the one to raise
                at_hand = {key for slots in self._pools for key in slots.forget_leaving()}
                taken.sort(key=at_hand.__contains__, reverse=True)
                for i in taken:
                    with suppress(Exception), torch.no_grad():  # the error names the lost units
                        states = self.path.whole(i) or self.values
                        self._context.rescue(i, states.read_state(i, "master", 0, units[i].spec.numel))
            raise

    # -- waits ----------------------------------------------------------------------------------------------------

    def updated(self, i: int) -> Attached:
        """Returns itself, when unit i has no update left."""
        self.monitor.wait_for_unit(i, self.plan.units[i].spec.name)
        return self

    def settled(self) -> Attached:
        """Returns itself, when every accepted gradient is at its place."""
        self.path.landed()
        return self

    @contextmanager
    def gradient_of(self, i: int, start: int, stop: int) -> Iterator[DeviceStore | GradientStore]:
        """The store of unit i's gradient, settled. Raises for a range outside the shard."""
        self._check_range(i, start, stop)
        self.updated(i).settled()
        with torch.no_grad(), self.monitor.guard():
            yield self.path.whole(i) or self.path.gradients

    @contextmanager
    def states(
        self, i: int, name: str = "master", start: int = 0, stop: int = 0, *, change: bool = False
    ) -> Iterator[DeviceStore | Values]:
        """The store of unit i's states, while no update is under way. Raises for an unknown name, and as gradient_of.

        change: they will be written, after the copies of the unit's parameters that are under way.
        """
        self._check_range(i, start, stop)
        if name not in (names := ("master", *self._step.state_names())):
            raise KeyError(f"no state is called {name!r}; states are {', '.join(names)}")
        with torch.no_grad(), self.monitor.guard():
            self.pipeline.wait()
            if change:
                self.path.follow_copies(i)
            yield self.path.whole(i) or self.values

    def _check_range(self, i: int, start: int, stop: int) -> None:
        numel = self.plan.units[i].spec.numel
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"elements [{start}, {stop}) are not all in shard {i}, which has {numel}")

    def stats(self, *, asleep: bool) -> dict[str, Any]:
        """As TieredStore.stats."""
        plan, stores, moved = self.plan, self._stores, {"nvme_read_bytes": 0, "nvme_write_bytes": 0}
        for tier, transfers in stores.items():
            moved |= {f"{tier}_read_bytes": transfers.moved("swap_in")}
            moved |= {f"{tier}_write_bytes": transfers.moved("swap_out")}
        device = sum(plan.bytes_of(Tier.DEVICE, kind) for kind in STATE_KINDS)
        return {
            **moved,
            "setup_write_bytes": sum(stores.in_flight.moved((each, "swap_out", "setup")) for each in stores.values()),
            "exposed_seconds": self.monitor.exposed_ns / 1e9,
            "host_bytes": 0 if asleep else self.arena.nbytes - (0 if self.path.streams is not None else device),
            "device_bytes": 0 if asleep else device + self.path.device_bytes,
            "link_up_bytes": stores.in_flight.moved("swap_in"),
            "link_down_bytes": stores.in_flight.moved("swap_out"),
            "huge_pages": self.arena.advice["MADV_HUGEPAGE"],
        }

    # -- durable steps ------------------------------------------------------------------------------------------

    def commit(self, blob: bytes) -> None:
        """As ShardStore.commit. Every gradient has landed."""
        with self.monitor.condition:
            self.monitor.updates[COMMITS] += 1
        self.pipeline.afterwards(partial(self._commit, blob))

    def _commit(self, blob: bytes) -> None:
        with self.monitor.span("commit", f"generation {self.generations.number + 1}"):
            self.generations.commit(blob)
        with self.monitor.condition:
            self.monitor.updates[COMMITS] -= 1
            self.monitor.condition.notify_all()

    def pin(self) -> PinnedValues:
        """As ShardStore.pin. Every gradient has landed."""
        generations, condition = self.generations, self.monitor.condition
        pinned = False

        def pin() -> None:
            nonlocal pinned
            generations.pin()
            with condition:
                pinned = True
                condition.notify_all()

        def ready() -> None:
            with condition:
                condition.wait_for(lambda: pinned or self.monitor.failure is not None)
            if not pinned:
                self.monitor.check()

        self.pipeline.afterwards(pin)
        return PinnedValues(self.plan.units, self._step, self.plan.alignment, generations, ready)


def _shut_down(
    pipeline: Pipeline, stores: Stores, path: HostPath, arena: Arena, aside: SavedBytes, generations: Generations | None
) -> None:
    """Ends the background threads, then frees extents and memory, unless a thread that uses them does not end."""
    if generations is not None:
        generations.pins.give_up()  # an update may wait for a copy
    path.end_thread()  # it may wait for slots that the pipeline gives back
    pipeline.close()
    with ExitStack() as ending:  # last in, first out; each runs even if another one raises
        ending.callback(arena.close)
        ending.callback(path.close)
        ending.callback(aside.free)
        ending.callback(stores.free)
        ending.callback(stores.in_flight.drain)
