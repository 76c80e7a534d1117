"""Lends units and takes gradients: `HostPath` where the CPU computes, `DevicePath` where a discrete device does.

`HostPath` lends host memory, without a copy.
`DevicePath` owns the units that stay on the device as a whole: zero-core's DeviceStore updates them, in stream order.
Not here: units whose parameters alone are on the device (in tiles/device_tier.py), copies of other units (in
device_link.py), and waits for updates and errors of the background (in tiered_store.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core import Arrival, DeviceStore, GroupStep, ShardSpec, give_memory, sent, take_memory
from ..device_link import Downloads, Upload, Uploads
from ..streams import Mark, Streams
from ..tier import Tier
from ..tiles.device_tier import Homes
from ..tiles.gradients import GradientStore
from ..tiles.parameters import ParameterStore
from ..tiles.store_context import Shared


class HostPath:
    """The way of one attached store's values to the CPU, and back. `lent`: by unit, what release() has not ended."""

    streams: Streams | None = None

    def __init__(self, shared: Shared, homes: Homes | None = None) -> None:
        self._units, self._monitor = shared.plan.units, shared.monitor
        self.host, self.gradients = ParameterStore(shared, homes), GradientStore(shared)
        self.lent: dict[int, Tensor] = {}

    def lay_out(self, take: Callable[[int], Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Calls `take(i)` for every unit, in order. It lays out a unit in host memory, and returns the master."""
        for i in range(len(self._units)):
            take(i)

    # -- parameters ---------------------------------------------------------------------------------------------

    def prefetch(self, i: int) -> None:
        self.host.prefetch(i)

    def parameters(self, i: int) -> Tensor:
        self.lent[i] = lent = self._lend(i)
        return lent

    def _lend(self, i: int) -> Tensor:
        return self.host.acquire(i)

    def release(self, i: int) -> None:
        self.host.release(i)
        self.lent.pop(i, None)

    def swap_in(self, i: int, out: Tensor) -> Arrival:
        raise AssertionError("swap_in without swaps_in")

    def poll(self) -> None:
        """Begins copies that wait for an update or a read. Any thread."""

    def in_use(self) -> Collection[int]:
        """Units that are lent, or on their way."""
        return self.lent.keys()

    @property
    def device_bytes(self) -> int:
        """Bytes of a discrete device for buffers and lent parameters, beside those of the placement."""
        return 0

    def whole(self, i: int) -> DeviceStore | None:
        """The store of unit i's values if all of them are on a discrete device, else None."""
        return None

    def follow_copies(self, i: int) -> None:
        """Orders changes of unit i after copies of its parameters."""

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient_buffer(self, i: int) -> Tensor | None:
        self._monitor.wait_for_unit(i, self._units[i].spec.name)
        return self.gradients.lend(i)

    def accept(self, i: int, gradient: Tensor) -> None:
        with self._monitor.span("norm", self._units[i].spec.name):
            self.gradients.accept(i, gradient)

    def landed(self) -> None:
        """Waits until every accepted gradient is on the host."""

    def discard(self) -> None:
        """Forgets every gradient that is on a discrete device."""

    def norm_squared(self) -> Tensor:
        """() float64 on the compute device."""
        return torch.tensor(self.gradients.norm_squared(), dtype=torch.float64, device="cpu")

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> Mark | None:
        """Queues the updates of units that are whole on a discrete device. As ShardStore.update.

        Returns the mark after which option tensors on a discrete device have their values; None: there are none.
        """
        return None

    # -- memory, the end ----------------------------------------------------------------------------------------

    def values(self) -> list[Tensor]:
        """Every tensor of a discrete device whose values are nowhere else, in a fixed order."""
        return []

    def let_go(self, arena: Tensor | None) -> None:
        """Frees a discrete device's memory. Every lane is empty. arena: its bytes, if it has memory."""

    def take_back(self, arena: Tensor) -> None:
        """The inverse of `let_go`; the values are undefined."""

    def restored(self) -> None:
        """Called when the tensors of `values` are filled again."""

    def drain(self) -> None:
        """Returns when every lane is empty."""

    def end_thread(self) -> None:
        """Ends the thread that adds gradients, which may wait for slots of the update thread's."""

    def close(self) -> None:
        """Waits until the lanes are empty. The host memory may be freed after this."""
        self.lent.clear()


class DevicePath(HostPath):
    """As HostPath, for a discrete device. When a unit is updated, the update thread may begin its copy."""

    streams: Streams

    def __init__(self, shared: Shared, streams: Streams) -> None:
        self.homes = Homes(shared, streams)
        super().__init__(shared, self.homes)
        self._plan, self._context = shared.plan, shared.context
        self.streams, self._in_flight = streams, shared.in_flight
        self._store = DeviceStore()  # every unit, by its number; those that are not whole have no elements there
        self._has_whole = any(unit.whole for unit in self._units)
        self.up = Uploads(shared, streams, self.host, self._copy_into)
        self.down = Downloads(shared, streams, self.gradients)

    def lay_out(self, take: Callable[[int], Tensor], optimizer: torch.optim.Optimizer) -> None:
        """As HostPath.lay_out. The device's own store takes over whole units; of other units it gets no elements."""
        if not self._has_whole:
            super().lay_out(take, optimizer)
            return
        others = (ShardSpec(unit.spec.name, 0, unit.spec.dtype, (), trained=False) for unit in self._units)
        specs = [unit.spec if unit.whole else other for unit, other in zip(self._units, others, strict=True)]

        def whole(i: int) -> Tensor:
            master = take(i)
            return master if self._units[i].whole else master.new_empty(0)

        def rescue(i: int, master: Tensor) -> None:
            if specs[i].trained:
                self._context.rescue(i, master)

        # `_copy_into` reads the shards in the parameter dtype, so they are kept at stages 1 and 2 too.
        on_device = replace(self._context, keeps_parameters=False, rescue=rescue)
        self._store.attach(specs, optimizer, whole, context=on_device)

    # -- parameters ---------------------------------------------------------------------------------------------

    def prefetch(self, i: int) -> None:
        super().prefetch(i)
        self.up.poll()

    def _lend(self, i: int) -> Tensor:
        """In newly allocated device memory."""
        spec, copy = self._units[i].spec, self.lent.get(i)
        if copy is None:
            copy = self.streams.empty(spec.numel, spec.dtype)
            self.swap_in(i, copy).wait()
        return copy

    def swap_in(self, i: int, out: Tensor) -> Upload:
        return self.up.begin(i, out)

    def poll(self) -> None:
        self.up.poll()

    def in_use(self) -> Collection[int]:
        return {*self.lent, *(upload.unit for upload in self.up.waiting)}

    @property
    def device_bytes(self) -> int:
        return self._plan.bytes_of(Tier.DEVICE, "buffers") + sum(lent.nbytes for lent in self.lent.values())

    def whole(self, i: int) -> DeviceStore | None:
        return self._store if self._units[i].whole else None

    def follow_copies(self, i: int) -> None:
        """Makes the caller's stream wait for the last copy out of a whole unit, so that it can change the unit."""
        copies: list[Any] = self._in_flight.of(("whole", i))
        for copy in copies:
            self.streams.follow(copy)
        self._in_flight.forget(("whole", i))

    def _copy_into(self, i: int, out: Tensor, after: Mark) -> Mark | None:
        """Queues a copy of unit i to `out`, and returns its mark; None: its parameters are not on the device."""
        if self._units[i].whole:
            mark = self.streams.copy("swap_in", out, self._store.parameters(i), (after,))
            self._in_flight.begin(mark, ("whole", i), writes=False)
            return mark
        return self.streams.copy("swap_in", out, self.homes[i], (after,)) if i in self.homes else None

    # -- gradients and updates ------------------------------------------------------------------------------------

    def gradient_buffer(self, i: int) -> Tensor | None:
        self.up.poll()
        return self._store.gradient_buffer(i) if self._units[i].whole else self.down.lend(i)

    def accept(self, i: int, gradient: Tensor) -> None:
        """A whole unit's gradient stays on the device, any other is copied to the host."""
        (self._store.accept_gradient if self._units[i].whole else self.down.accept)(i, gradient)

    def landed(self) -> None:
        self.down.wait()

    def discard(self) -> None:
        self.down.forget()
        self._store.discard_gradients()

    def norm_squared(self) -> Tensor:
        squared = sent(super().norm_squared(), self._context.device)
        return self._store.gradient_norm_squared() + squared if self._has_whole else squared

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> Mark | None:
        here = [i for i in order if self._units[i].whole]
        for i in here:
            self.follow_copies(i)
        if self._has_whole:
            self._store.update(groups, scale, here, steps)
        # This thread's stream writes option tensors, and the update thread reads them.
        tensors = (value for value in tree_leaves([group.options for group in groups]) if isinstance(value, Tensor))
        return self.streams.mark() if any(value.device.type != "cpu" for value in tensors) else None

    # -- memory, the end ----------------------------------------------------------------------------------------

    def values(self) -> list[Tensor]:
        return [*self.homes.values(), *self._store.values()]

    def let_go(self, arena: Tensor | None) -> None:
        self.down.let_go()
        self.homes.mirrors.forget()
        give_memory(self.homes.values())
        self._store.let_go()
        if arena is not None:
            self.streams.give_back(arena)

    def take_back(self, arena: Tensor) -> None:
        self.streams.register(arena)
        self.down.take_back()
        take_memory(self.homes.values())
        self._store.take_back()

    def restored(self) -> None:
        self._store.restored()
        self.homes.allocated()

    def drain(self) -> None:
        self.streams.drain()

    def end_thread(self) -> None:
        self.down.close()

    def close(self) -> None:
        with ExitStack() as ending:  # last in, first out; each runs even if another one raises
            ending.callback(super().close)
            ending.callback(give_memory, self.homes.values())
            ending.callback(self._store.close)
            ending.callback(self.down.drop)
            ending.callback(self.streams.close)
