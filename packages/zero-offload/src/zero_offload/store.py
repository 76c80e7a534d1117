"""`TieredStore`: zero-core's ShardStore over host memory, NVMe and any other tier.

Owns the wiring and the order of calls. Bytes are the tiers', the background the pipeline's, arithmetic the step's.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zero_core.memory import ElementBytes
from zero_core.saved_bytes import SavedBytes
from zero_core.store import GroupStep, ShardSpec, StoreContext

from .arena import Arena
from .asleep import Memory
from .ending import Ending
from .errors import AsleepError, BudgetError, ClosedError, OffloadError, PlacementError, gib
from .host_budget import HostBudget
from .monitor import Monitor
from .placement import Placement, shares
from .protocols import ByteStore, SegmentStep, UpdateStep
from .running.link import Link
from .running.pipeline import Pipeline, TileTask, UpdateJob
from .running.uploads import Arrival
from .step_probe import check_change, check_cuts
from .streams import Streams, arena_of, streams_of
from .tier import Stores, Tier, Transfers, tiers_with
from .tiles.device_tier import DeviceTier
from .tiles.footprint import StorePlan, UnitPlan, plan_store
from .tiles.gradients import GradientStore
from .tiles.parameters import ParameterStore
from .tiles.states import StateStore
from .tiles.tile import Tile, check_tile_numel, covers, segment_steps
from .tiles.values import Values
from .timeline import Timeline
from .torch_step import TorchStep

__all__ = ["TieredStore"]


class TieredStore:
    """Keeps a rank's shards on the tiers given, per kind: "device", "host", "nvme", one of `tiers`, or fractions.

    nvme: a ByteStore such as zero_nvme.Slab; needed as soon as anything is on nvme. Its owner closes it.
    step: an UpdateStep such as zero_optim_cpu.CpuStep; None: the slow reference, TorchStep.
    plan: a zero_offload.Plan; its placement, tile size and slots take the place of those arguments.
    tile_numel: elements of a tile, a multiple of 1 << 20.
    slots: of states, and of gradients where they are on nvme; None: a quarter of their bytes, at least 3.
    host_bytes: budget of the arena; attach raises BudgetError when it is too small. A HostBudget: several stores share.
    overlap: False makes update() return when it is done; the bits are the same.
    accumulate: gradients of a unit that reach the store before a step; `plan` has its own. 1: a gradient takes the
        reduce dtype's bytes, and a second one before step() raises OffloadError; None, or more: 4 an element, for sums.
    streams: makes the Streams of a device apart from the host memory that they copy from; None: the compute device's.
    tiers: more ByteStores, each by the name that placements give it, from fast to slow. They come between "host" and
        "nvme". A store that is slower than nvme follows "nvme", which is given here then.

    On the CPU the device tier is host memory. A discrete device has whole units, and a unit's gradient iff it has the
    states; the update then runs there, by torch's own optimizer, and has that one's bits, not the step's.

    Examples:
        >>> import torch, zero_core, zero_offload
        >>> model = torch.nn.Linear(64, 64)
        >>> disk = zero_offload.MemoryByteStore()  # stands for a zero_nvme.Slab
        >>> store = zero_offload.TieredStore("host", "host", "nvme", nvme=disk)
        >>> optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> optimizer.step()
        >>> store.describe().bytes_of("nvme", "optimizer")  # two moments of 4160 parameters, in blocks of 4096 bytes
        36864
        >>> optimizer.close()
        >>> disk.used_bytes
        0
        >>> disk.close()
    """

    def __init__(
        self,
        parameters: Placement = "host",
        gradients: Placement = "host",
        optimizer: Placement = "host",
        nvme: ByteStore | None = None,
        step: UpdateStep | None = None,
        plan: Any = None,
        tile_numel: int = 1 << 22,
        slots: int | None = None,
        host_bytes: int | HostBudget | None = None,
        overlap: bool = True,
        accumulate: int | None = None,
        streams: Callable[[Tensor], Streams] | None = None,
        tiers: Mapping[str, ByteStore] | None = None,
    ) -> None:
        self._budget = host_bytes if isinstance(host_bytes, HostBudget) else None
        self._arguments: dict[str, Any] = dict(
            parameters=parameters, gradients=gradients, optimizer=optimizer, tile_numel=tile_numel, slots=slots,
            host_bytes=None if isinstance(host_bytes, HostBudget) else host_bytes,
        )  # fmt: skip
        self._accumulate = accumulate if plan is None else plan.shape.arriving
        if plan is not None:
            self._arguments.update(_from_plan(plan))
        given = _stored(tiers or {}, nvme)
        self._arguments["tiers"] = names = tiers_with(given) if plan is None else plan.shape.tiers
        for kind in ("parameters", "gradients", "optimizer"):
            for tier, share in shares(self._arguments[kind], kind, names).items():
                if share > 0 and tier.stored and tier not in given:
                    raise PlacementError(f"{kind}={self._arguments[kind]!r} needs {_argument(tier)}")
        check_tile_numel(self._arguments["tile_numel"])
        self.overlap = overlap
        self.step: UpdateStep = TorchStep() if step is None else step
        self.timeline = Timeline()
        self.plan: StorePlan | None = None
        self._monitor = Monitor(self.timeline)
        self._make_streams = streams
        self._stores = Stores({name: Transfers(store, self.timeline) for name, store in given.items()})
        self.transfers = self._stores.get(Tier.NVME)  # shared with activations
        self._taken: list[int] = []  # units whose first values attach has laid out
        self._order: list[int] = []
        self._early_asked = True  # until the first update there is nothing to expect
        self._setup: dict[str, tuple[int, int]] = {}  # bytes that attach read and wrote, by tier
        self._closed = False
        self._ending: Ending | None = None
        self._in_use: set[int] = set()  # units that parameters() lent
        self._link: Link | None = None  # to a device apart from the host
        self.swaps_in = False

    # -- attach -------------------------------------------------------------------------------------------------

    def attach(
        self,
        shards: Sequence[ShardSpec],
        optimizer: torch.optim.Optimizer,
        initial: Callable[[int], Tensor],
        *,
        context: StoreContext,
    ) -> None:
        """Plan, reserve every byte, then take over the shards one at a time. See ShardStore."""
        if self.plan is not None or self._closed:
            raise OffloadError("a TieredStore is attached once; make another one")
        self._monitor.process = os.getpid()
        self.step.bind(optimizer)
        self._optimizer = optimizer
        self._make_streams = self._make_streams or streams_of(context.device)
        with nullcontext() if self._budget is None else self._budget.explained():
            plan = plan_store(
                shards,
                self.step,
                prefetch_bytes=context.prefetch_bytes,
                shard_count=context.shard_count,
                alignment=math.lcm(*(transfers.alignment for transfers in self._stores.values())),
                landing_dtype=context.reduce_dtype if self._make_streams is not None else None,
                gradient_itemsize=ElementBytes(context.reduce_dtype, context.reduce_dtype).gradient(self._accumulate),
                **self._arguments | ({} if self._budget is None else {"host_bytes": self._budget.free_bytes}),
            )
        self._check_slots(plan, context)
        if context.shard_count > 1 or any(run.unit.cuts for run in plan.runs):
            for dtype in {unit.spec.dtype for unit in plan.units if unit.spec.trained}:
                check_cuts(self.step, optimizer, dtype)
        for tier, transfers in self._stores.items():
            if nbytes := plan.extent_bytes(tier):
                transfers.store.reserve(nbytes)
        self.plan, self._context = plan, context
        self.timeline.rank, self._monitor.observer = context.rank, context.observer
        try:
            self._build(plan, context)
            with torch.no_grad(), self._guard():
                self._lay_out(optimizer, initial)
            self._pipeline.wait()
        except BaseException:
            with suppress(Exception):  # what failed first is what is told
                self._rescue(context)
            with suppress(Exception):
                self.close()
            raise
        self._setup = {tier: (each.read_bytes, each.write_bytes) for tier, each in self._stores.items()}

    def _check_slots(self, plan: StorePlan, context: StoreContext) -> None:
        """Stages 0 to 2 on one rank keep what the store lends until the step, so every stored unit needs a slot."""
        streamed = [unit.spec.name for i, unit in enumerate(plan.units) if unit.streamed and i not in plan.own_slots]
        lends = context.keeps_parameters and context.shard_count == 1 and self._make_streams is None
        if lends and len(streamed) > plan.unit_slots:
            raise BudgetError(
                f"stages 0 to 2 keep every unit in memory until the step, and {len(streamed)} units whose "
                f"parameters are stored share {plan.unit_slots} slots of {gib(plan.unit_slot_bytes)}; use stage=3, or "
                'put parameters on the "host", or raise prefetch_bytes to the bytes of all of them'
            )

    def _build(self, plan: StorePlan, context: StoreContext) -> None:
        """Reserve every byte, in memory and on the stored tiers."""
        stores, monitor = self._stores, self._monitor
        self._arena = arena = arena_of(context.device, plan.arena_bytes, self._budget)
        streams, device = None, None
        if self._make_streams is not None:
            streams = self._make_streams(arena.whole())
            device = DeviceTier(streams, plan, [arena.take(plan.mirror_slot_bytes) for _ in range(plan.mirror_slots)])
        self._parameters = ParameterStore(plan, arena, stores, monitor, device)
        self._states = StateStore(plan, arena, stores, monitor)
        self._gradients = GradientStore(plan, arena, stores, self.step, monitor, context.reduce_dtype)
        self._values = Values(plan, self._parameters, self._states, self.step)
        told = {}
        if streams is not None and device is not None:
            staging = [arena.take(plan.staging_slot_bytes) for _ in range(plan.staging_slots)]
            self._link = Link(streams, device, plan, self._parameters, self._gradients, monitor, staging)
            told = {"enter_thread": streams.enter_thread, "unit_done": self._link.up.poll}
            self.swaps_in = True
        self._pipeline = pipeline = Pipeline(
            self._parameters, self._gradients, self._states, self.step, monitor, stores, **told
        )
        self._memory = Memory(arena, self._parameters, self._states, self._gradients, self._link, monitor)
        # Also when the store is forgotten, and before the interpreter exits: memory must outlive what is in flight.
        self._ending = Ending(self, partial(_shut_down, pipeline, stores, self._link, arena, self._memory.aside))

    def _lay_out(self, optimizer: torch.optim.Optimizer, initial: Callable[[int], Tensor]) -> None:
        """Take over every shard in order, one in memory at a time; a device apart asks for those that it keeps."""
        following = iter(range(len(self._plan.units)))

        def take(i: int) -> Tensor:
            master = initial(i)
            try:
                self._values.first(i, master)
            except BaseException:
                self._context.rescue(i, master)
                raise
            self._taken.append(i)
            return master

        def up_to(last: int) -> Tensor:
            for i in following:
                master = take(i)
                if i == last:
                    return master
            raise AssertionError(f"unit {last} was asked for twice")

        if self._link is not None:
            self._link.device.attach(optimizer, up_to, replace(self._context, rescue=lambda place, master: None))
        for i in following:
            take(i)

    def _rescue(self, context: StoreContext) -> None:
        """Give the masters back that were taken over, those first that are in memory: reading the others needs it."""
        self._taken.sort(key=self._values.at_hand().__contains__, reverse=True)
        for i in self._taken:
            with suppress(Exception), torch.no_grad():  # the user is told which are lost
                context.rescue(i, self._read(i, "master", 0, self._plan.units[i].spec.numel))

    # -- parameters ---------------------------------------------------------------------------------------------

    def prefetch(self, i: int) -> None:
        self._monitor.check()
        if self._pipeline.behind(i):
            return  # the update hands it over from memory
        with self._guard():
            self._parameters.prefetch(i)
            if self._link is not None:
                self._link.up.poll()

    def swap_in(self, i: int, out: Tensor) -> Arrival:
        self._monitor.check()
        assert self._link is not None, "swap_in without swaps_in"
        with self._guard():
            return self._link.swap_in(i, out)

    def parameters(self, i: int) -> Tensor:
        self._monitor.check()
        self._wait_for(i)
        with self._guard():
            lent = self._parameters.acquire(i) if self._link is None else self._link.parameters(i)
        self._in_use.add(i)
        return lent

    def release(self, i: int) -> None:
        self._monitor.check()
        (self._parameters if self._link is None else self._link).release(i)
        self._in_use.discard(i)

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient_buffer(self, i: int) -> Tensor | None:
        self._monitor.check()
        if self._link is not None:
            with self._guard():
                return self._link.gradient_buffer(i)
        self._wait_for(i)
        return self._gradients.lend(i)

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        self._monitor.check()
        self._wait_for(i)
        if not self._early_asked:
            self._early_asked = True
            self._pipeline.read_early([tile for unit in self._order for tile in self._plan.units[unit].tiles])
        self._gradients.check(i, gradient)
        with torch.no_grad(), self._guard():
            if self._link is not None:
                self._link.accept(i, gradient.detach())
                return
            with self._monitor.span("norm", self._plan.units[i].spec.name):
                self._gradients.accept(i, gradient.detach())

    def discard_gradients(self) -> None:
        self._monitor.check()
        self._landed()
        if self._link is not None:
            self._link.discard()
        self._gradients.discard()

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        self._monitor.check()
        self._wait_for(i)
        self._landed()
        with torch.no_grad(), self._guard():
            (self._whole(i) or self._gradients).zero(i, start, stop)

    def read_gradient(self, i: int, start: int, stop: int) -> Tensor:
        self._settle_gradient(i, start, stop)
        with torch.no_grad(), self._guard():
            device = self._whole(i)
            return self._gradients.read(i, start, stop) if device is None else device.read_gradient(i, start, stop)

    def write_gradient(self, i: int, start: int, values: Tensor) -> None:
        self._settle_gradient(i, start, start + values.numel())
        self._gradients.check_fits(i, values)
        with torch.no_grad(), self._guard():
            device = self._whole(i)
            (self._gradients.write if device is None else device.write_gradient)(i, start, values)

    def _settle_gradient(self, i: int, start: int, stop: int) -> None:
        """Wait for what is under way of elements [start, stop)."""
        self._check_range(i, "master", start, stop)
        self._wait_for(i)
        self._landed()

    def gradient_norm_squared(self) -> Tensor:
        self._monitor.check()
        self._landed()
        squared = torch.tensor(self._gradients.norm_squared(), dtype=torch.float64)
        if self._context.device.type != "cpu":  # pinned: from pageable memory the copy would wait for all kernels
            squared = squared.pin_memory().to(self._context.device, non_blocking=True)
        above = self._link.device.norm_squared() if self._link is not None else None
        return squared if above is None else above + squared

    # -- updates ------------------------------------------------------------------------------------------------

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        self._monitor.check()
        self._landed()
        tasks: list[TileTask] = []
        for i in order:
            taken = self._gradients.take(i)
            if taken is None:
                continue
            unit = self._plan.units[i]
            found = [(tile, segment_steps(tile, unit.spec.segments, steps[i], groups)) for tile in unit.tiles]
            found = [(tile, segments) for tile, segments in found if segments]
            tasks += [
                TileTask(tile, segments, taken, tile is found[-1][0], self._reads(unit, tile, segments))
                for tile, segments in found
            ]
        if self._link is not None:
            self._link.device.update(groups, scale, order, steps)
        self._expect(order)
        if tasks:
            self._pipeline.submit(UpdateJob(tuple(tasks), float(scale)))
        if not self.overlap:
            self.wait()

    @staticmethod
    def _reads(unit: UnitPlan, tile: Tile, segments: Sequence[SegmentStep]) -> bool:
        """Whether an update of these segments needs the tile's parameter as it was."""
        record = unit.records[tile.index]
        has_master = record is not None and any(field.name == "master" for field in record.fields)
        return not (has_master and covers(tile, segments))

    def _expect(self, order: Sequence[int]) -> None:
        """Learn what the next updates read: this order again, or, unit by unit, what followed this unit last time."""
        if len(order) != 1 or len(self._plan.units) == 1:
            self._order, self._early_asked = list(order), False
            self._gradients.expect(order)
            return
        if order[0] in self._order:
            at = self._order.index(order[0])
            self._order = [*self._order[at + 1 :], *self._order[: at + 1]]
        else:
            self._order.append(order[0])
        self._early_asked = False

    def switch_options(self, group: int, before: Sequence[Mapping[str, Any]], what: str) -> None:
        """As zero_core.store.SwitchesOptions: compares the step with the optimizer over the change."""
        self._monitor.check()
        self.wait()  # the step is the background's until then
        check_change(self.step, self._optimizer, group, before, what)
        if self._link is not None:
            self._link.device.switch_options(group, before, what)

    def wait(self) -> None:
        self._monitor.check()
        self._landed()
        with self._guard():
            self._pipeline.wait()

    def _landed(self) -> None:
        """Return when every gradient that was accepted is on the host."""
        if self._link is not None:
            self._link.down.wait()

    def _wait_for(self, i: int) -> None:
        if self._pipeline.behind(i):
            self._monitor.wait_until(lambda: not self._pipeline.behind(i), self._plan.units[i].spec.name)

    # -- state for checkpoints ----------------------------------------------------------------------------------

    def state_names(self) -> tuple[str, ...]:
        return ("master", *self.step.state_names())

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        self._check_range(i, name, start, stop)
        with torch.no_grad(), self._guard():
            self._pipeline.wait()
            return self._read(i, name, start, stop)

    def _read(self, i: int, name: str, start: int, stop: int) -> Tensor:
        return (self._whole(i) or self._values).read(i, name, start, stop)

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        self._check_range(i, name, start, start + values.numel())
        with torch.no_grad(), self._guard():
            self._pipeline.wait()
            (self._whole(i) or self._values).write(i, name, start, values)

    def _whole(self, i: int) -> DeviceTier | None:
        """Where unit i's values are, if they are all on a discrete device."""
        return self._link.device if self._link is not None and self._plan.units[i].whole else None

    def _check_range(self, i: int, name: str, start: int, stop: int) -> None:
        self._monitor.check()
        numel = self._plan.units[i].spec.numel
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"elements [{start}, {stop}) of shard {i}, which has {numel}")
        if name not in self.state_names():
            raise KeyError(f"state {name!r}; known: {', '.join(self.state_names())}")

    @property
    def streams(self) -> Streams | None:
        """Of the device apart; None where computing is done in host memory. Activations that are set aside use them."""
        return None if self._link is None else self._link.streams

    # -- asleep -------------------------------------------------------------------------------------------------

    def sleep(self, to: ByteStore | None = None) -> None:
        """Finish the updates, put what lies in host and device memory into `to`, and give that memory back.

        to: the slowest stored tier (nvme, where there is one) if it is None; raises PlacementError if there is none. It
        has to stay open until wake() or close(). What is stored already is not written again. Gradients that wait for a
        step are kept. Until wake(), every other method raises AsleepError, except close(), stats() and describe(). A
        second sleep() changes nothing. Its bytes are not in stats(). Device memory goes back to torch's allocator;
        zero_core.sleep, which also gives units back first, empties that too.

        Raises AsleepError while a unit is in use, and SwapError where a write fails or there is no room: the store is
        awake then and has lost nothing.
        """
        self._plan  # noqa: B018  raises where there is none
        if self.asleep:
            return
        self._monitor.check()
        keeper = self._slowest() if to is None else to
        self.wait()
        used = {*self._in_use, *(self._link.up.waiting if self._link is not None else ())}
        if used:
            names = ", ".join(self._plan.units[i].spec.name for i in sorted(used))
            raise AsleepError(f"sleep() while {names} is in use: zero_core.sleep(model) gives units back first")
        if self._link is not None:
            self._link.streams.drain()
        self._memory.put_into(keeper)

    def wake(self) -> None:
        """Take the memory back that sleep() gave away, with the same bits. Of a store that is awake it changes nothing.

        Raises BudgetError where there is no memory, or none left of a shared budget; SwapError where the bytes cannot
        be read, or the device has no room. The store still sleeps then, and wake() may be called again.
        """
        if not self.asleep:
            self._monitor.check()
            return
        self._memory.take_back()

    @property
    def asleep(self) -> bool:
        """Whether sleep() was called, and wake() or close() was not."""
        return self._monitor.asleep and not self._closed

    def _slowest(self) -> ByteStore:
        """The stored tier that a sleeping store's bytes go to."""
        for tier in reversed(self._plan.tiers):
            if tier in self._stores:
                return self._stores[tier].store
        raise PlacementError(
            "sleep() has nowhere to put its bytes: this store has no nvme= and no tiers=; give sleep(to=) a ByteStore, "
            "such as zero_nvme.Slab([path])"
        )

    # -- facts --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Sums since attach (whose own writes are `setup_write_bytes`); take differences for one step.

        nvme_read_bytes, nvme_write_bytes, and the same of every other stored tier; exposed_seconds: the training thread
        waited; host_bytes: the arena; device_bytes: what is placed on the device, and what passes through it;
        link_up_bytes, link_down_bytes: copied to the device and from it; huge_pages: "ok", or why the kernel refused
        them to the arena, which costs direct I/O speed and no bits. A store that sleeps has no bytes of host or device.
        """
        plan, moved, asleep = self._plan, {"nvme_read_bytes": 0, "nvme_write_bytes": 0}, self.asleep
        for tier, transfers in self._stores.items():
            read, written = self._setup.get(tier, (0, 0))
            moved[f"{tier}_read_bytes"] = transfers.read_bytes - read
            moved[f"{tier}_write_bytes"] = transfers.write_bytes - written
        device = sum(plan.bytes_of("device", kind) for kind in ("parameters", "gradients", "optimizer"))
        return {
            **moved,
            "setup_write_bytes": sum(written for _, written in self._setup.values()),
            "exposed_seconds": self._monitor.exposed_ns / 1e9,
            "host_bytes": 0 if asleep else self._arena.nbytes - (device if self._link is None else 0),
            "device_bytes": 0 if asleep else device + (self._link.device_bytes if self._link is not None else 0),
            "link_up_bytes": self._link.up_bytes if self._link is not None else 0,
            "link_down_bytes": self._link.down_bytes if self._link is not None else 0,
            "huge_pages": self._arena.advice["MADV_HUGEPAGE"],
        }

    def describe(self) -> StorePlan:
        """What was reserved: bytes per tier and kind, slots, the arena."""
        return self._plan

    @property
    def _plan(self) -> StorePlan:
        if self.plan is None:
            raise ClosedError("the TieredStore is not attached yet: zero_core.shard(..., store=store) does it")
        return self.plan

    def close(self) -> None:
        """End the background, give extents and memory back. Idempotent; works after a failure, and after Ctrl-C in it.

        Raises OffloadError where an update or a transfer does not end; what it uses is not given back then.
        """
        closed, self._closed = self._closed, True
        if self._ending is not None:
            self._ending()
        elif not closed:
            self._monitor.stop()
            self._stores.free()  # attach failed before there was a background
            if (arena := getattr(self, "_arena", None)) is not None:
                arena.close()

    def _guard(self) -> _Guard:
        return _Guard(self._monitor)


class _Guard:
    """An error of a transfer or of the step on the training thread is final, as one in the background is."""

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, ClosedError):
            self._monitor.fail(error)


def _shut_down(pipeline: Pipeline, stores: Stores, link: Link | None, arena: Arena, aside: SavedBytes) -> None:
    """End the background, then give extents and memory back, unless a thread that uses them does not end."""
    if link is not None:
        link.down.close()  # it may wait for slots that the pipeline gives back
    pipeline.close()
    with ExitStack() as ending:  # from the last to the first, each whatever those before it raised
        ending.callback(arena.close)
        if link is not None:
            ending.callback(link.close)
        ending.callback(aside.free)
        ending.callback(stores.free)
        ending.callback(stores.drain)


def _from_plan(plan: Any) -> dict[str, Any]:
    """The arguments that a `zero_offload.Plan` decides."""
    kinds = ("parameters", "gradients", "optimizer")
    return {kind: plan.placements[kind] for kind in kinds} | {"tile_numel": plan.tile_numel, "slots": plan.slots}


def _stored(tiers: Mapping[str, ByteStore], nvme: ByteStore | None) -> dict[str, ByteStore]:
    """Every ByteStore by the name of its tier."""
    for name in tiers:
        if not Tier(name).stored or (name == Tier.NVME and nvme is not None):
            raise PlacementError(f"tiers={{{name!r}: ...}} is a tier already; give the ByteStore another name")
    return dict(tiers) if nvme is None else {**tiers, str(Tier.NVME): nvme}


def _argument(tier: Tier) -> str:
    """The argument that a stored tier comes by."""
    given = "nvme=" if tier == Tier.NVME else f'tiers={{"{tier}": ...}}'
    return f"{given}, a ByteStore such as zero_nvme.Slab([path])"
