"""Runs one attached TieredStore, its shards on their tiers, from attach to close.

Connects the parts, and decides the order of calls. The stores in `tiles` own the bytes, the pipeline owns the
background updates, and the step owns the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from zero_core.optim.device_store import DeviceStore
from zero_core.saved_bytes import SavedBytes
from zero_core.store import GroupStep, StoreContext

from .arena import Arena
from .asleep import Memory
from .ending import Ending
from .errors import AsleepError
from .host_budget import HostBudget
from .monitor import Monitor
from .protocols import ByteStore, UpdateSegment, UpdateStep
from .running.link import Link
from .running.pipeline import Pipeline, TileTask, UpdateJob
from .running.uploads import Upload
from .running.visits import Visits
from .streams import Mark, Streams, arena_of
from .tier import Tier
from .tiles.device_tier import DeviceTier
from .tiles.footprint import PlacedUnit, StorePlan
from .tiles.generations import Generations
from .tiles.gradients import GradientStore
from .tiles.order import Order
from .tiles.parameters import ParameterStore
from .tiles.states import StateStore
from .tiles.tile import Tile, covers, segment_steps
from .tiles.values import PinnedValues, Values
from .transfers import Stores

__all__ = ["Attached"]


class Attached:
    """Reserves every byte of `plan` when it is built. Implements zero-core's ShardStore."""

    def __init__(
        self,
        plan: StorePlan,
        context: StoreContext,
        optimizer: torch.optim.Optimizer,
        step: UpdateStep,
        stores: Stores,
        budget: HostBudget | None,
        make_streams: Callable[[Tensor], Streams] | None,
        generations: Generations | None = None,
    ) -> None:
        self.plan, self._context, self._optimizer, self._step, self._stores = plan, context, optimizer, step, stores
        self.monitor = monitor = Monitor(stores.in_flight.timeline, context.observer)
        self._order, self._generations = Order(), generations
        self._commits = 0  # that have begun and not ended
        self._lent: dict[int, Tensor] = {}  # tensors of parameters() that release() has not ended, by unit
        with ExitStack() as undone:
            undone.callback(stores.free)
            self.arena = arena = arena_of(context.device, plan.arena_bytes, budget)
            undone.callback(arena.close)
            streams, device = None, None
            if make_streams is not None:
                streams = make_streams(arena.whole())
                mirrors = [arena.take(plan.mirror_slot_bytes) for _ in range(plan.mirror_slots)]
                device = DeviceTier(streams, plan, mirrors, stores.in_flight)
            self._streams = streams
            self._parameters = ParameterStore(plan, arena, stores, monitor, device, generations)
            self._states = StateStore(plan, arena, stores, monitor, generations)
            self._gradients = GradientStore(
                plan, arena, stores, step, monitor, context.reduce_dtype, self._order, writes_back=generations is None
            )
            self._values = Values(plan, self._parameters, self._states, step)
            self.link = link = (
                None
                if streams is None or device is None
                else Link(
                    streams,
                    device,
                    plan,
                    self._parameters,
                    self._gradients,
                    monitor,
                    [arena.take(plan.staging_slot_bytes) for _ in range(plan.staging_slots)],
                    stores.in_flight,
                )
            )
            self._pipeline = Pipeline(
                self._parameters,
                self._gradients,
                self._states,
                step,
                monitor,
                stores.in_flight,
                enter_thread=None if streams is None else streams.enter_thread,
                unit_done=None if link is None else link.up.poll,
                visits=None if streams is None else Visits(streams, stores.in_flight),
            )
            self.memory = Memory(arena, self._parameters, self._states, self._gradients, link, monitor)
            undone.pop_all()
        # Also when the store is garbage-collected, and before the interpreter exits: memory must outlive its transfers.
        end = partial(_shut_down, self._pipeline, stores, link, arena, self.memory.aside, self._lent, generations)
        self.close = Ending(self, end)

    def lay_out(self, initial: Callable[[int], Tensor]) -> None:
        """Takes over every shard in order, one in memory at a time. A discrete device asks for those that it keeps.

        On an error, gives the masters back, those in memory first, because reading the others takes memory.
        """
        units, taken = self.plan.units, list[int]()

        def take(i: int) -> Tensor:
            master = initial(i)
            try:
                self._values.first(i, master, kept=self._generations is not None and self._generations.adopted)
            except BaseException:
                self._context.rescue(i, master)
                raise
            taken.append(i)
            return master

        def whole(i: int) -> Tensor:
            master = take(i)
            return master if units[i].whole else master.new_empty(0)

        try:
            with torch.no_grad(), self.monitor.guard():
                if self._generations is not None and self._generations.adopted:
                    self._generations.load_sources()
                if self.link is not None and self.link.device.has_whole:
                    self.link.device.attach(self._optimizer, whole, self._context)
                else:
                    for i in range(len(units)):
                        take(i)
            self._pipeline.wait()
        except BaseException:
            with suppress(Exception):  # the first error is the one to raise
                taken.sort(key=self._values.at_hand().__contains__, reverse=True)
                for i in taken:
                    with suppress(Exception), torch.no_grad():  # the error names the lost units
                        self._context.rescue(i, self._states_of(i).read_state(i, "master", 0, units[i].spec.numel))
            raise

    # -- parameters ---------------------------------------------------------------------------------------------

    def prefetch(self, i: int) -> None:
        if self._pipeline.behind(i):
            return  # the update hands it over from memory
        with self.monitor.guard():
            self._parameters.prefetch(i)
            if self.link is not None:
                self.link.up.poll()

    def swap_in(self, i: int, out: Tensor) -> Upload:
        assert self.link is not None, "swap_in without swaps_in"
        with self.monitor.guard():
            return self.link.swap_in(i, out)

    def parameters(self, i: int) -> Tensor:
        self._wait_for(i)
        with self.monitor.guard():
            if self.link is None:
                self._lent[i] = self._parameters.acquire(i)
            elif i not in self._lent:
                self._lent[i] = self.link.parameters(i)
        return self._lent[i]

    def release(self, i: int) -> None:
        if self.link is None:
            self._parameters.release(i)
        self._lent.pop(i, None)

    @property
    def device_bytes(self) -> int:
        """Bytes of a discrete device for buffers and lent parameters, beside those of the placement."""
        return (
            0
            if self.link is None
            else self.plan.bytes_of(Tier.DEVICE, "buffers") + sum(lent.nbytes for lent in self._lent.values())
        )

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient_buffer(self, i: int) -> Tensor | None:
        if self.link is not None:
            with self.monitor.guard():
                return self.link.gradient_buffer(i)
        self._wait_for(i)
        return self._gradients.lend(i)

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        self._wait_for(i)
        if self._order.units and not self._gradients.begun():
            self._pipeline.read_early(self._order.units)
        self._gradients.check(i, gradient)
        with torch.no_grad(), self.monitor.guard():
            if self.link is not None:
                self.link.accept(i, gradient.detach())
                return
            with self.monitor.span("norm", self.plan.units[i].spec.name):
                self._gradients.accept(i, gradient.detach())

    def discard_gradients(self) -> None:
        self._landed()
        if self.link is not None:
            self.link.discard()
        self._gradients.discard()

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        self._wait_for(i)
        self._landed()
        with torch.no_grad(), self.monitor.guard():
            self._gradient_of(i).discard_gradient(i, start, stop)

    def read_gradient(self, i: int, start: int, stop: int) -> Tensor:
        self._settle_gradient(i, start, stop)
        with torch.no_grad(), self.monitor.guard():
            return self._gradient_of(i).read_gradient(i, start, stop)

    def write_gradient(self, i: int, start: int, values: Tensor) -> None:
        self._settle_gradient(i, start, start + values.numel())
        self._gradients.check_fits(i, values)
        with torch.no_grad(), self.monitor.guard():
            self._gradient_of(i).write_gradient(i, start, values)

    def _gradient_of(self, i: int) -> DeviceStore | GradientStore:
        """Returns the store of unit i's gradient."""
        return self._whole(i) or self._gradients

    def _settle_gradient(self, i: int, start: int, stop: int) -> None:
        """Waits for the unit's updates and for gradients in flight. Raises for a range outside the shard."""
        self._check_range(i, "master", start, stop)
        self._wait_for(i)
        self._landed()

    def gradient_norm_squared(self) -> Tensor:
        self._landed()
        squared = torch.tensor(self._gradients.norm_squared(), dtype=torch.float64)
        if self._context.device.type != "cpu":  # pinned: from pageable memory the copy would wait for all kernels
            squared = squared.pin_memory().to(self._context.device, non_blocking=True)
        if self.link is None or not self.link.device.has_whole:
            return squared
        return self.link.device.whole.gradient_norm_squared() + squared

    # -- updates ------------------------------------------------------------------------------------------------

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        self._landed()
        tasks: list[TileTask] = []
        for i in order:
            taken = self._gradients.take(i)
            if taken is None:
                continue
            unit = self.plan.units[i]
            found = [(tile, segment_steps(tile, unit.spec.segments, steps[i], groups)) for tile in unit.tiles]
            found = [(tile, segments) for tile, segments in found if segments]
            tasks += [
                TileTask(tile, segments, taken, tile is found[-1][0], self._reads(unit, tile, segments))
                for tile, segments in found
            ]
        if self.link is not None and self.link.device.has_whole:
            self.link.device.update(groups, scale, order, steps)
        self._order.learn(order, len(self.plan.units))
        if tasks:
            self._pipeline.submit(UpdateJob(tuple(tasks), float(scale), self._options_there(groups)))

    def _options_there(self, groups: Sequence[GroupStep]) -> Mark | None:
        """Returns the mark after which option tensors on a discrete device have their values, or None without any.

        This thread's stream writes them, and the update thread reads them.
        """
        if self._streams is None:
            return None
        tensors = (value for value in tree_leaves([group.options for group in groups]) if isinstance(value, Tensor))
        return self._streams.mark() if any(value.device.type != "cpu" for value in tensors) else None

    @staticmethod
    def _reads(unit: PlacedUnit, tile: Tile, segments: Sequence[UpdateSegment]) -> bool:
        """Whether an update of these segments reads the tile's old parameter."""
        record = unit.records[tile.index]
        has_master = record is not None and any(field.name == "master" for field in record.fields)
        return not (has_master and covers(tile, segments))

    def make_room(self, nbytes: int) -> None:
        """As zero_core.store.Durable."""
        assert self._generations is not None
        self._generations.make_room(nbytes)

    def commit(self, blob: bytes) -> None:
        """As zero_core.store.Durable."""
        assert self._generations is not None
        self._landed()
        with self.monitor.condition:
            self._commits += 1
        self._pipeline.afterwards(partial(self._commit, blob))

    def committed(self) -> None:
        """As zero_core.store.Durable."""
        self.monitor.wait_until(lambda: not self._commits, "a commit")

    def pin(self) -> PinnedValues:
        """As zero_core.store.Durable."""
        assert self._generations is not None
        generations, condition = self._generations, self.monitor.condition
        self._landed()
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

        self._pipeline.afterwards(pin)
        return PinnedValues(self.plan, self._step, generations, ready)

    def _commit(self, blob: bytes) -> None:
        assert self._generations is not None
        with self.monitor.span("commit", f"generation {self._generations.number + 1}"):
            self._generations.commit(blob)
        with self.monitor.condition:
            self._commits -= 1

    def wait(self) -> None:
        self._landed()
        with self.monitor.guard():
            self._pipeline.wait()

    def _landed(self) -> None:
        """Waits until every accepted gradient is on the host."""
        if self.link is not None:
            self.link.down.wait()

    def _wait_for(self, i: int) -> None:
        if self._pipeline.behind(i):
            self.monitor.wait_until(lambda: not self._pipeline.behind(i), self.plan.units[i].spec.name)

    # -- state for checkpoints ----------------------------------------------------------------------------------

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        self._check_range(i, name, start, stop)
        with torch.no_grad(), self.monitor.guard():
            self._pipeline.wait()
            return self._states_of(i).read_state(i, name, start, stop)

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        self._check_range(i, name, start, start + values.numel())
        with torch.no_grad(), self.monitor.guard():
            self._pipeline.wait()
            self._changing(i).write_state(i, name, start, values)

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        with torch.no_grad(), self.monitor.guard():
            self._pipeline.wait()
            return self._states_of(i).read_shaped(i, k, name, start, stop)

    def write_shaped(self, i: int, k: int, name: str, start: int, values: Tensor) -> None:
        with torch.no_grad(), self.monitor.guard():
            self._pipeline.wait()
            self._changing(i).write_shaped(i, k, name, start, values)

    def _states_of(self, i: int) -> DeviceStore | Values:
        """Returns the store of unit i's states."""
        return self._whole(i) or self._values

    def _changing(self, i: int) -> DeviceStore | Values:
        """Returns the store of unit i's states, for a change: it waits for copies of the unit's parameters."""
        if self.link is not None:
            self.link.device.follow_copies(i)
        return self._states_of(i)

    def _whole(self, i: int) -> DeviceStore | None:
        """Returns the store of unit i's values if all of them are on a discrete device, else None."""
        return self.link.device.whole if self.link is not None and self.plan.units[i].whole else None

    def _check_range(self, i: int, name: str, start: int, stop: int) -> None:
        numel = self.plan.units[i].spec.numel
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"elements [{start}, {stop}) are not all in shard {i}, which has {numel}")
        known = ("master", *self._step.state_names())
        if name not in known:
            raise KeyError(f"no state is called {name!r}; states are {', '.join(known)}")

    # -- asleep -------------------------------------------------------------------------------------------------

    def sleep(self, to: ByteStore) -> None:
        """See `TieredStore.sleep`."""
        self.wait()
        used = {*self._lent, *(self.link.up.waiting if self.link is not None else ())}
        if used:
            names = ", ".join(self.plan.units[i].spec.name for i in sorted(used))
            raise AsleepError(f"cannot sleep while {names} is in use: zero_core.sleep(model) gives units back first")
        if self.link is not None:
            self.link.streams.drain()
        self.memory.put_into(to)

    # -- while another store takes the shards over --------------------------------------------------------------

    def give_up(self, i: int) -> bool:
        self.wait()
        if (whole := self._whole(i)) is None:
            return self.memory.give_up(i, len(self.plan.units))
        if self.link is not None:
            self.link.streams.drain()
        return whole.give_up(i)

    def take_up(self, i: int) -> None:
        spec = self.plan.units[i].spec
        if (whole := self._whole(i)) is not None:
            whole.take_up(i)
            return
        self.memory.take_up(i)
        with torch.no_grad(), self.monitor.guard():
            self._values.first(i, torch.zeros(spec.numel, dtype=spec.master_dtype))


def _shut_down(
    pipeline: Pipeline,
    stores: Stores,
    link: Link | None,
    arena: Arena,
    aside: SavedBytes,
    lent: dict[int, Tensor],
    generations: Generations | None,
) -> None:
    """Ends the background threads, then frees extents and memory, unless a thread that uses them does not end."""
    if generations is not None:
        generations.pins.give_up()  # an update may wait for a copy
    if link is not None:
        link.down.close()  # it may wait for slots that the pipeline gives back
    pipeline.close()
    with ExitStack() as ending:  # last in, first out; each runs even if another one raises
        ending.callback(arena.close)
        ending.callback(lent.clear)
        if link is not None:
            ending.callback(link.close)
        ending.callback(aside.free)
        ending.callback(stores.free)
        ending.callback(stores.in_flight.drain)
