"""Implements zero-core's ShardStore as `TieredStore`, over host memory, NVMe and any other tier.

Owns the legal order of calls. Not here: checks of the arguments (in arguments.py), and the bytes, threads and waits
from attach to close (in attached_store.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ..core import Arrival, GroupStep, Initial, ShardSpec, ShardStore, StoreContext
from ..errors import CLOSED, ClosedError, OffloadError
from ..layout.footprint import StorePlan
from ..layout.tile import Placement
from ..memory.arena import HostBudget
from ..memory.transfers import InFlight, Stores
from ..protocols import ByteStore, UpdateStep
from ..streams import Streams, streams_of
from ..tiles.value_access import PinnedValues
from ..timeline import Timeline
from ..torch_step import TorchStep
from ..uncut_step import UncutStep, step_for, visiting_step
from ..update_thread.pipeline import tasks_of
from .arguments import Arguments
from .attached_store import COMMITS, Attached


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

    update_share: the part of the tiles with states outside of a discrete device that the device updates all the same,
        from 0 to 1, rounded in each unit; `plan` has its own. For AdamW, Adam and SGD of torch.optim, states in fp32.

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
        update_share: float = 0.0,
    ) -> None:
        self.timeline = Timeline()
        self.stores = Stores(tiers or {}, nvme, InFlight(self.timeline))  # the stored tiers, which activations share
        self._arguments = Arguments(
            self.stores, plan, accumulate, durable, parameters=parameters, gradients=gradients, optimizer=optimizer,
            tile_numel=tile_numel, slots=slots, host_bytes=host_bytes, update_share=update_share,
        )  # fmt: skip
        self.overlap, self._make_streams = overlap, streams
        self.step: UpdateStep = TorchStep() if step is None else step
        self._attached: Attached | None = None
        self._closed = False

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Tells `step` which optimizer it updates for. Parameters that it cannot update in parts are stepped whole."""
        step_for(optimizer, self.step)

    def attach(
        self, shards: Sequence[ShardSpec], optimizer: torch.optim.Optimizer, initial: Initial, *, context: StoreContext
    ) -> None:
        """Plans, reserves every byte, then takes over the shards one at a time. See ShardStore."""
        if self._attached is not None or self._closed:
            raise OffloadError("this TieredStore has a model already: make a new TieredStore for this model")
        self.step = step_for(optimizer, self.step, by_itself=False)
        make_streams = self._make_streams or streams_of(context.device)
        plan = self._arguments.plan(shards, self.step, context, make_streams is not None)
        generations = self._arguments.adopted(plan, self.step, optimizer, context)  # before files that were cut grow
        for tier, transfers in self.stores.items():
            if nbytes := plan.extent_bytes(tier):
                transfers.store.reserve(nbytes)
        self.timeline.of_rank(context.rank)
        try:
            there = visiting_step(self.step, optimizer) if self._arguments.update_share else None
            budget = self._arguments.budget
            self._attached = Attached(plan, context, self.step, self.stores, budget, make_streams, generations, there)
            self._attached.lay_out(optimizer, initial)
        except BaseException:
            with suppress(Exception):
                self.close()
            raise
        for transfers in self.stores.values():
            transfers.laid_out()

    @property
    def _on(self) -> Attached:
        """Returns the Attached. Raises the background's error, ClosedError or AsleepError."""
        attached = self._made
        attached.monitor.check()
        return attached

    @property
    def _made(self) -> Attached:
        if self._attached is None:
            unattached = "the TieredStore is not attached yet: first call zero_core.shard(..., store=store)"
            raise ClosedError(CLOSED if self._closed else unattached)
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
        on = self._on.updated(i)
        with on.monitor.guard():
            return on.path.parameters(i)

    def release(self, i: int) -> None:
        self._on.path.release(i)

    def gradient_buffer(self, i: int) -> Tensor | None:
        on = self._on
        with on.monitor.guard():
            return on.path.gradient_buffer(i)

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        on = self._on.updated(i)
        if on.order.units and not on.path.gradients.begun():
            on.pipeline.read_early(on.order.units)
        on.path.gradients.check(i, gradient)
        with torch.no_grad(), on.monitor.guard():
            on.path.accept(i, gradient.detach())

    def discard_gradients(self) -> None:
        on = self._on.settled()
        on.path.discard()
        on.path.gradients.discard()

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        with self._on.gradient_of(i, start, stop) as gradient:
            gradient.discard_gradient(i, start, stop)

    def read_gradient(self, i: int, start: int, stop: int) -> Tensor:
        with self._on.gradient_of(i, start, stop) as gradient:
            return gradient.read_gradient(i, start, stop)

    def write_gradient(self, i: int, start: int, values: Tensor) -> None:
        with self._on.gradient_of(i, start, start + values.numel()) as gradient:
            self._on.path.gradients.check_fits(i, values)
            gradient.write_gradient(i, start, values)

    def gradient_norm_squared(self) -> Tensor:
        return self._on.settled().path.norm_squared()

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        on = self._on.settled()
        taken = [(i, dtype) for i in order if (dtype := on.path.gradients.take(i)) is not None]
        tasks = [task for i, dtype in taken for task in tasks_of(on.plan.units[i], dtype, steps[i], groups)]
        written = on.path.update(groups, scale, order, steps)
        on.order.learn(order, len(on.plan.units))
        if tasks:
            on.pipeline.submit(tasks, float(scale), written)
        if not self.overlap:
            self.wait()

    def wait(self) -> None:
        on = self._on.settled()
        with on.monitor.guard():
            on.pipeline.wait()

    def state_names(self) -> tuple[str, ...]:
        return ("master", *self.step.state_names())

    def state_shapes(self, group: int, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        return self.step.state_shapes(group, shape) if isinstance(self.step, UncutStep) else {}

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        with self._on.states(i, name, start, stop) as states:
            return states.read_state(i, name, start, stop)

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        with self._on.states(i, name, start, start + values.numel(), change=True) as states:
            states.write_state(i, name, start, values)

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        with self._on.states(i) as states:
            return states.read_shaped(i, k, name, start, stop)

    def write_shaped(self, i: int, k: int, name: str, start: int, values: Tensor) -> None:
        with self._on.states(i, change=True) as states:
            states.write_shaped(i, k, name, start, values)

    @property
    def durable(self) -> bool:
        return bool(self._arguments.durable)

    @property
    def resumed(self) -> bytes | None:
        generations = None if self._attached is None else self._attached.generations
        return None if generations is None else generations.blob

    def make_room(self, nbytes: int) -> None:
        self._on.generations.make_room(nbytes)

    def commit(self, blob: bytes) -> None:
        self._on.settled().commit(blob)

    def committed(self) -> None:
        self._on.monitor.wait_for_unit(COMMITS, "a commit")

    def pin(self) -> PinnedValues:
        return self._on.settled().pin()

    def give_up(self, i: int) -> bool:
        self.wait()
        return self._on.memory.give_up(i)

    def take_up(self, i: int) -> None:
        self._on.memory.take_up(i)

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
        self.wait()
        self._on.memory.put_into(to)

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
        return self._made.stats(asleep=self.asleep)

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
