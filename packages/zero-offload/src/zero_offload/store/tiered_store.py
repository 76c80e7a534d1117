"""Implements zero-core's ShardStore as `TieredStore`, over host memory, NVMe and any other tier.

Owns the arguments and the legal order of calls. Not here: the bytes and threads from attach to close (in
attached_store.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..core import Arrival, DeviceStore, ElementBytes, GroupStep, ShardSpec, ShardStore, StoreContext
from ..durable.generations import Generations
from ..errors import AsleepError, BudgetError, ClosedError, GenerationError, OffloadError, PlacementError, gib
from ..layout.footprint import STATE_KINDS, StorePlan
from ..layout.store_plan import plan_store
from ..layout.tile import Placement, check_tile_numel, shares
from ..memory.arena import HostBudget
from ..memory.transfers import InFlight, Stores
from ..protocols import ByteStore, UpdateStep
from ..streams import Streams, streams_of
from ..tier import Tier, tiers_with
from ..tiles.gradients import GradientStore
from ..tiles.value_access import PinnedValues
from ..timeline import Timeline
from ..torch_step import TorchStep
from ..uncut_step import UncutStep, step_for
from ..update_thread.pipeline import tasks_of
from .attached_store import COMMITS, Attached
from .read_generation import generation_layout


class TieredStore(ShardStore):
    """Keeps a rank's shards on the tiers given, per kind: "device", "host", "nvme", one of `tiers`, or fractions.

    nvme: a ByteStore such as zero_nvme.Slab; needed as soon as anything is on nvme. Its owner closes it.
    step: an UpdateStep such as zero_optim_cpu.CpuStep; None: the slow reference, TorchStep.
    plan: a zero_offload.Plan; its placement, tile size and slots take the place of those arguments.
    tile_numel: elements of a tile, a multiple of 1 << 20.
    slots: number for states, and for gradients if they are on nvme; None: a quarter of their bytes, at least 3.
    host_bytes: budget of the arena; attach raises BudgetError when it is too small. A HostBudget: several stores share.
    overlap: False makes update() return after the update; the bits are the same.
    accumulate: gradients of a unit that reach the store before a step; `plan` has its own. 1: a gradient takes the
        reduce dtype's bytes, and a second one before step() raises OffloadError; None, or more: 4 an element, for sums.
    streams: makes the Streams of a discrete device, given the host memory to copy from; None: the compute device's.
    tiers: more ByteStores, each by the name that placements give it, from fast to slow. They come between "host" and
        "nvme". A store that is slower than nvme follows "nvme", which is given here then.

    durable: each step stays on nvme as a generation, from which another process can continue after this one is killed:
        see zero_core.resume. nvme is then a NamedByteStore, such as zero_nvme.Slab([path], name="run"), with room for
        all trained values twice. True: steps survive a power cut; "process": they survive only the end of the process.

    On the CPU the device tier is host memory. A discrete device has whole units, and a unit's gradient iff it has the
    states; the update then runs there, by torch's own optimizer, and has that one's bits, not the step's. So does that
    of each parameter that the optimizer needs whole, wherever it is kept.

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

    lends_masters, updates_later = False, True

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
        durable: bool | str = False,
    ) -> None:
        given = _stored(tiers or {}, nvme)
        names = tiers_with(given)
        if plan is not None:
            parameters, gradients, optimizer = (plan.placements[kind] for kind in STATE_KINDS)
            tile_numel, slots, accumulate, names = plan.tile_numel, plan.slots, plan.shape.arriving, plan.shape.tiers
        self._accumulate, self._planned = accumulate, plan
        self._budget = host_bytes if isinstance(host_bytes, HostBudget) else None
        self._arguments: dict[str, Any] = dict(
            parameters=parameters, gradients=gradients, optimizer=optimizer, tile_numel=tile_numel, slots=slots,
            host_bytes=host_bytes, tiers=names,
        )  # fmt: skip
        for kind in STATE_KINDS:
            for tier, share in shares(self._arguments[kind], kind, names).items():
                if share > 0 and tier.stored and tier not in given:
                    raise PlacementError(f"{kind}={self._arguments[kind]!r} needs {_argument(tier)}")
        check_tile_numel(tile_numel)
        self.overlap = overlap
        self.step: UpdateStep = TorchStep() if step is None else step
        self.timeline = Timeline()
        self._make_streams = streams
        self.stores = Stores(given, InFlight(self.timeline))  # the stored tiers, which activations share
        self._attached: Attached | None = None
        self._closed = False
        if durable not in (False, True, "process"):
            raise ValueError(f'durable={durable!r} must be False, True or "process"')
        self._durable = durable

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Tells `step` which optimizer it updates for. Parameters that it cannot update in parts are stepped whole."""
        step_for(optimizer, self.step)

    # -- attach -------------------------------------------------------------------------------------------------

    def attach(
        self,
        shards: Sequence[ShardSpec],
        optimizer: torch.optim.Optimizer,
        initial: Callable[[int], Tensor],
        *,
        context: StoreContext,
    ) -> None:
        """Plans, reserves every byte, then takes over the shards one at a time. See ShardStore."""
        if self._attached is not None or self._closed:
            raise OffloadError("this TieredStore has a model already: make a new one")
        if context.keeps_gradients and self._planned is not None and not self._planned.shape.keeps_gradients:
            raise OffloadError(
                "shard() keeps whole gradients until the step, as stage=1 and find_unused_parameters=True ask for, and "
                "this store's plan counts no memory for them: give zero_offload.plan the same arguments as shard()"
            )
        self.step = step_for(optimizer, self.step, by_itself=False)
        make_streams = self._make_streams or streams_of(context.device)
        with nullcontext() if self._budget is None else self._budget.explained():
            plan = plan_store(
                shards,
                self.step,
                prefetch_bytes=context.prefetch_bytes,
                shard_count=context.shard_count,
                alignment=math.lcm(*(transfers.alignment for transfers in self.stores.values())),
                landing_dtype=context.reduce_dtype if make_streams is not None else None,
                gradient_itemsize=ElementBytes(context.reduce_dtype, context.reduce_dtype).gradient(self._accumulate),
                **self._arguments | ({} if self._budget is None else {"host_bytes": self._budget.free_bytes}),
            )
        if self.durable:
            plan = replace(plan, durable_on=Tier.NVME)
        if make_streams is None:
            _check_slots(plan, context)
        generations = self._go_on(plan, optimizer, context) if self.durable else None  # before files that were cut grow
        for tier, transfers in self.stores.items():
            if nbytes := plan.extent_bytes(tier):
                transfers.store.reserve(nbytes)
        self.timeline.of_rank(context.rank)
        try:
            self._attached = Attached(plan, context, self.step, self.stores, self._budget, make_streams, generations)
            self._attached.lay_out(optimizer, initial)
        except BaseException:
            with suppress(Exception):
                self.close()
            raise
        for transfers in self.stores.values():
            transfers.laid_out()

    def _go_on(self, plan: StorePlan, optimizer: torch.optim.Optimizer, context: StoreContext) -> Generations:
        """Returns the generations on nvme, after adopting the last one that all ranks have, if there is one."""
        transfers = self.stores.get(Tier.NVME)
        if transfers is None:
            raise GenerationError(f"durable needs {_argument(Tier.NVME)}, with name= given")
        layout = generation_layout(plan, self.step, optimizer, context)
        generations = Generations(transfers, layout, sync=self._durable != "process")
        generations.adopt(context.agree([each.number for each in generations.found]))
        return generations

    @property
    def _on(self) -> Attached:
        """Returns the Attached. Raises the background's error, ClosedError or AsleepError."""
        attached = self._made
        attached.monitor.check()
        return attached

    @property
    def _made(self) -> Attached:
        if self._attached is None and self._closed:
            raise ClosedError("the TieredStore is closed")
        if self._attached is None:
            raise ClosedError("the TieredStore is not attached yet: zero_core.shard(..., store=store) does it")
        return self._attached

    @property
    def plan(self) -> StorePlan | None:
        """The reserved bytes and slots; None before attach."""
        return None if self._attached is None else self._attached.plan

    @property
    def swaps_in(self) -> bool:
        """Whether units are copied to a discrete device, into memory that the caller brings."""
        return self.streams is not None

    @property
    def streams(self) -> Streams | None:
        """The streams of the discrete device, also for offloaded activations; None if the device is the CPU."""
        return None if self._attached is None else self._attached.path.streams

    # -- ShardStore, documented in zero_core.store ----------------------------------------------------------------

    def prefetch(self, i: int) -> None:
        on = self._on
        if not on.monitor.updates[i]:  # else the update hands it over from memory
            with on.monitor.guard():
                on.path.prefetch(i)

    def swap_in(self, i: int, out: Tensor) -> Arrival:
        on = self._on
        with on.monitor.guard():
            return on.path.swap_in(i, out)

    def parameters(self, i: int) -> Tensor:
        on = self._updated(i)
        with on.monitor.guard():
            return on.path.parameters(i)

    def release(self, i: int) -> None:
        self._on.path.release(i)

    def gradient_buffer(self, i: int) -> Tensor | None:
        on = self._on
        with on.monitor.guard():
            return on.path.gradient_buffer(i)

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        on = self._updated(i)
        if on.order.units and not on.path.gradients.begun():
            on.pipeline.read_early(on.order.units)
        on.path.gradients.check(i, gradient)
        with torch.no_grad(), on.monitor.guard():
            on.path.accept(i, gradient.detach())

    def discard_gradients(self) -> None:
        on = self._settled()
        on.path.discard()
        on.path.gradients.discard()

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        with self._gradient_of(i, start, stop) as gradient:
            gradient.discard_gradient(i, start, stop)

    def read_gradient(self, i: int, start: int, stop: int) -> Tensor:
        with self._gradient_of(i, start, stop) as gradient:
            return gradient.read_gradient(i, start, stop)

    def write_gradient(self, i: int, start: int, values: Tensor) -> None:
        with self._gradient_of(i, start, start + values.numel()) as gradient:
            self._on.path.gradients.check_fits(i, values)
            gradient.write_gradient(i, start, values)

    def gradient_norm_squared(self) -> Tensor:
        return self._settled().path.norm_squared()

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        on = self._settled()
        taken = ((i, on.path.gradients.take(i)) for i in order)
        tasks = [task for i, dtype in taken for task in tasks_of(on.plan.units[i], dtype, steps[i], groups)]
        written = on.path.update(groups, scale, order, steps)
        on.order.learn(order, len(on.plan.units))
        if tasks:
            on.pipeline.submit(tasks, float(scale), written)
        if not self.overlap:
            self.wait()

    def wait(self) -> None:
        on = self._settled()
        with on.monitor.guard():
            on.pipeline.wait()

    def state_names(self) -> tuple[str, ...]:
        return ("master", *self.step.state_names())

    def state_shapes(self, group: int, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return self.step.state_shapes(group, shape) if isinstance(self.step, UncutStep) else {}

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        self._check_range(i, name, start, stop)
        with self._still() as on:
            return on.states_of(i).read_state(i, name, start, stop)

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        self._check_range(i, name, start, start + values.numel())
        with self._still() as on:
            on.path.follow_copies(i)
            on.states_of(i).write_state(i, name, start, values)

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        with self._still() as on:
            return on.states_of(i).read_shaped(i, k, name, start, stop)

    def write_shaped(self, i: int, k: int, name: str, start: int, values: Tensor) -> None:
        with self._still() as on:
            on.path.follow_copies(i)
            on.states_of(i).write_shaped(i, k, name, start, values)

    @property
    def durable(self) -> bool:
        return self._durable is not False

    @property
    def resumed(self) -> bytes | None:
        generations = None if self._attached is None else self._attached.generations
        return None if generations is None else generations.blob

    def make_room(self, nbytes: int) -> None:
        generations = self._on.generations
        assert generations is not None
        generations.make_room(nbytes)

    def commit(self, blob: bytes) -> None:
        self._settled().commit(blob)

    def committed(self) -> None:
        self._on.monitor.wait_for_unit(COMMITS, "a commit")

    def pin(self) -> PinnedValues:
        return self._settled().pin()

    def give_up(self, i: int) -> bool:
        self.wait()
        return self._on.memory.give_up(i)

    def take_up(self, i: int) -> None:
        on = self._on
        if (whole := on.path.whole(i)) is not None:
            whole.take_up(i)
            return
        spec = on.plan.units[i].spec
        on.memory.take_up(i)
        with torch.no_grad(), on.monitor.guard():
            on.values.first(i, torch.zeros(spec.numel, dtype=spec.master_dtype))

    # -- waits ----------------------------------------------------------------------------------------------------

    def _updated(self, i: int) -> Attached:
        """The parts, when unit i has no update left."""
        on = self._on
        on.monitor.wait_for_unit(i, on.plan.units[i].spec.name)
        return on

    def _settled(self) -> Attached:
        """The parts, when every accepted gradient is at its place."""
        on = self._on
        on.path.landed()
        return on

    @contextmanager
    def _gradient_of(self, i: int, start: int, stop: int) -> Iterator[DeviceStore | GradientStore]:
        """The store of unit i's gradient, settled. Raises for a range outside the shard."""
        self._check_range(i, "master", start, stop)
        self._updated(i)
        on = self._settled()
        with torch.no_grad(), on.monitor.guard():
            yield on.path.whole(i) or on.path.gradients

    @contextmanager
    def _still(self) -> Iterator[Attached]:
        """The parts, when no update is under way."""
        on = self._on
        with torch.no_grad(), on.monitor.guard():
            on.pipeline.wait()
            yield on

    def _check_range(self, i: int, name: str, start: int, stop: int) -> None:
        numel = self._on.plan.units[i].spec.numel
        if not 0 <= start <= stop <= numel:
            raise ValueError(f"elements [{start}, {stop}) are not all in shard {i}, which has {numel}")
        if name not in self.state_names():
            raise KeyError(f"no state is called {name!r}; states are {', '.join(self.state_names())}")

    # -- asleep -------------------------------------------------------------------------------------------------

    def sleep(self, to: ByteStore | None = None) -> None:
        """Finishes the updates, moves the values in host and device memory into `to`, and frees that memory.

        to: None means the slowest stored tier (nvme, if there is one). Raises PlacementError if there is none. It has
        to stay open until wake() or close(). Stored values are not written again. Gradients that wait for a step are
        kept. Until wake(), every other method raises AsleepError, except close(), stats() and describe(). A second
        sleep() changes nothing. The bytes of sleep are not in stats(). Device memory returns to torch's allocator;
        zero_core.sleep, which also frees unsharded units first, empties that too.

        Raises AsleepError while a unit is in use, and SwapError if a write fails or there is no room. Then the store is
        awake and has lost no value.
        """
        if self.asleep:
            return
        on = self._on
        slowest = next((self.stores[tier].store for tier in reversed(on.plan.tiers) if tier in self.stores), None)
        keeper = slowest if to is None else to
        if keeper is None:
            raise PlacementError(
                "sleep() has nowhere to put its bytes: this store has no nvme= and no tiers=; give sleep(to=) a "
                "ByteStore, such as zero_nvme.Slab([path])"
            )
        self.wait()
        if used := on.path.in_use():
            names = ", ".join(on.plan.units[i].spec.name for i in sorted(used))
            raise AsleepError(f"cannot sleep while {names} is in use: zero_core.sleep(model) gives units back first")
        on.path.drain()
        on.memory.put_into(keeper)

    def wake(self) -> None:
        """Restores the memory that sleep() freed, with the same bits. Does nothing if the store is awake.

        Raises BudgetError if there is no memory, or none left of a shared budget; SwapError if the bytes cannot be read
        or the device has no room. Then the store still sleeps, and wake() may be called again.
        """
        if self.asleep:
            self._made.memory.take_back()
        else:
            self._on  # noqa: B018  raises where there is none

    @property
    def asleep(self) -> bool:
        """Whether sleep() was called, and wake() or close() was not."""
        return self._attached is not None and self._attached.monitor.asleep and not self._closed

    # -- facts --------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Returns sums since attach (whose own writes are `setup_write_bytes`). Take differences for one step.

        nvme_read_bytes, nvme_write_bytes, and the same of every other stored tier; exposed_seconds: the training thread
        waited; host_bytes: the arena; device_bytes: values placed on the device, buffers, and lent parameters;
        link_up_bytes, link_down_bytes: copied to the device and from it; huge_pages: "ok", or why the kernel refused
        them to the arena, which costs direct I/O speed and no bits. A store that sleeps has no bytes of host or device.
        """
        attached, moved, asleep = self._made, {"nvme_read_bytes": 0, "nvme_write_bytes": 0}, self.asleep
        plan, arena = attached.plan, attached.arena
        for tier, transfers in self.stores.items():
            moved[f"{tier}_read_bytes"], moved[f"{tier}_write_bytes"] = transfers.read_bytes, transfers.write_bytes
        device = sum(plan.bytes_of("device", kind) for kind in STATE_KINDS)
        return {
            **moved,
            "setup_write_bytes": sum(transfers.setup_write_bytes for transfers in self.stores.values()),
            "exposed_seconds": attached.monitor.exposed_ns / 1e9,
            "host_bytes": 0 if asleep else arena.nbytes - (0 if self.swaps_in else device),
            "device_bytes": 0 if asleep else device + attached.path.device_bytes,
            "link_up_bytes": self.stores.in_flight.moved("swap_in"),
            "link_down_bytes": self.stores.in_flight.moved("swap_out"),
            "huge_pages": arena.advice["MADV_HUGEPAGE"],
        }

    def describe(self) -> StorePlan:
        """Returns the reserved bytes per tier and kind, the slots and the arena."""
        return self._made.plan

    def close(self) -> None:
        """Ends the background threads, frees extents and memory. Idempotent, also after a failure or Ctrl-C in close().

        Raises OffloadError if an update or a transfer does not end. Then the memory that it uses is not freed.
        """
        self._closed = True
        if self._attached is not None:
            self._attached.close()


def _check_slots(plan: StorePlan, context: StoreContext) -> None:
    """Raises BudgetError if stored units lack slots: stages 0 to 2 on one rank keep lent parameters until the step."""
    streamed = [unit.spec.name for i, unit in enumerate(plan.units) if unit.streamed and i not in plan.own_slots]
    if context.keeps_parameters and context.shard_count == 1 and len(streamed) > plan.unit_slots:
        raise BudgetError(
            f"stages 0 to 2 keep every unit in memory until the step, and {len(streamed)} units whose "
            f"parameters are stored share {plan.unit_slots} slots of {gib(plan.unit_slot_bytes)}; use stage=3, or "
            'put parameters on the "host", or raise prefetch_bytes to the bytes of all of them'
        )


def _stored(tiers: Mapping[str, ByteStore], nvme: ByteStore | None) -> dict[str, ByteStore]:
    """Returns every ByteStore by the name of its tier."""
    for name in tiers:
        if not Tier(name).stored or (name == Tier.NVME and nvme is not None):
            raise PlacementError(f"tiers={{{name!r}: ...}}: this name is taken; give the ByteStore another one")
    return dict(tiers) if nvme is None else {**tiers, str(Tier.NVME): nvme}


def _argument(tier: Tier) -> str:
    """Returns the argument that gives a stored tier, for an error."""
    given = "nvme=" if tier == Tier.NVME else f'tiers={{"{tier}": ...}}'
    return f"{given}, a ByteStore such as zero_nvme.Slab([path])"
