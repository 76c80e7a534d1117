"""Builds the parts of a TieredStore when it is attached, lays out its shards, and ends the parts.

Not here: the order of calls (in tiered_store.py), and the parts themselves: `tiles` own the bytes, the pipeline owns
the background updates, the paths lend units and take gradients, and the step owns the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor

from ..core import DeviceStore, SavedBytes, StoreContext
from ..durable.generations import Generations
from ..layout.footprint import StorePlan
from ..memory.arena import Arena
from ..memory.finalizer import Ending
from ..memory.host_budget import HostBudget
from ..memory.transfers import Stores
from ..monitor import Monitor
from ..protocols import UpdateStep
from ..streams import Streams, arena_of
from ..tiles.states import StateStore
from ..tiles.store_context import Shared
from ..tiles.value_access import PinnedValues, Values
from ..update_thread.pipeline import Pipeline
from .device_path import DevicePath
from .host_path import HostPath
from .sleep import Memory

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
    ) -> None:
        self.plan, self._context, self._step, self.generations = plan, context, step, generations
        self.monitor = monitor = Monitor(stores.in_flight.timeline, context.observer)
        with ExitStack() as undone:
            undone.callback(stores.free)
            self.arena = arena = arena_of(context.device, plan.arena_bytes, budget)
            undone.callback(arena.close)
            streams = None if make_streams is None else make_streams(arena.whole())
            shared = Shared(plan, context, step, arena, stores, monitor, generations, streams)
            self.path = path = HostPath(shared) if streams is None else DevicePath(shared, streams)
            states, self.order = StateStore(shared), shared.order
            self.values = Values(plan.units, path.host, states, step)
            self.pipeline = Pipeline(shared, path.host, path.gradients, states, path.poll)
            self.memory = Memory(shared, path, states)
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
                taken.sort(key=self.values.at_hand().__contains__, reverse=True)
                for i in taken:
                    with suppress(Exception), torch.no_grad():  # the error names the lost units
                        self._context.rescue(i, self.states_of(i).read_state(i, "master", 0, units[i].spec.numel))
            raise

    def states_of(self, i: int) -> DeviceStore | Values:
        """The store of unit i's states."""
        return self.path.whole(i) or self.values

    # -- durable steps ------------------------------------------------------------------------------------------

    def commit(self, blob: bytes) -> None:
        """As ShardStore.commit. Every gradient has landed."""
        with self.monitor.condition:
            self.monitor.updates[COMMITS] += 1
        self.pipeline.afterwards(partial(self._commit, blob))

    def committed(self) -> None:
        """As ShardStore.committed."""
        self.monitor.wait_for_unit(COMMITS, "a commit")

    def _commit(self, blob: bytes) -> None:
        assert self.generations is not None
        with self.monitor.span("commit", f"generation {self.generations.number + 1}"):
            self.generations.commit(blob)
        with self.monitor.condition:
            self.monitor.updates[COMMITS] -= 1
            self.monitor.condition.notify_all()

    def pin(self) -> PinnedValues:
        """As ShardStore.pin. Every gradient has landed."""
        assert self.generations is not None
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
