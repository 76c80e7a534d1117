"""Lends units and takes gradients where the compute device is a discrete one. On the CPU there is a `HostPath` instead.

Owns the units that stay there as a whole: zero-core's DeviceStore updates them, in stream order. Not here: units whose
parameters alone are on the device (in tiles/device_tier.py), and copies of other units (in device_link/).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import replace

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..core import DeviceStore, GroupStep, ShardSpec, give_memory, take_memory
from ..device_link.d2h import Downloads
from ..device_link.h2d import Upload, Uploads
from ..streams import Mark, Streams
from ..tier import Tier
from ..tiles.device_tier import Homes
from ..tiles.store_context import Shared
from .host_path import HostPath


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
        return {*self.lent, *self.up.waiting}

    @property
    def device_bytes(self) -> int:
        return self._plan.bytes_of(Tier.DEVICE, "buffers") + sum(lent.nbytes for lent in self.lent.values())

    def whole(self, i: int) -> DeviceStore | None:
        return self._store if self._units[i].whole else None

    def follow_copies(self, i: int) -> None:
        """Makes the caller's stream wait for the last copy out of a whole unit, so that it can change the unit."""
        for copy in self._in_flight.of(("whole", i)):
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
        squared, device = super().norm_squared(), self._context.device
        if device.type != "cpu":  # pinned: from pageable memory the copy would wait for all kernels
            squared = squared.pin_memory().to(device, non_blocking=True)
        return self._store.gradient_norm_squared() + squared if self._has_whole else squared

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        here = [i for i in order if self._units[i].whole]
        for i in here:
            self.follow_copies(i)
        if self._has_whole:
            self._store.update(groups, scale, here, steps)

    def options_there(self, groups: Sequence[GroupStep]) -> Mark | None:
        """This thread's stream writes the tensors, and the update thread reads them."""
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
        for i in range(len(self._units)):
            self._in_flight.forget(("whole", i))

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
