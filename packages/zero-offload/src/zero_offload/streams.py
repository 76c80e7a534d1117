"""Orders copies between host memory and the compute device: each waits for marks, and others wait for it.

Owns the lanes of copies, the marks (events) that order them, and the registration of host memory. Not here: what to
copy, and whether its memory is free (in device_link.py). A CPU run has no streams.

The tests run it on a simulated device. They also run its users over streams without a device, whose copies happen as
late as the marks allow. tests/device has run on one NVIDIA H200.

[Note: stream order]
    swap_in lane     H2D of unit i ──mark──>        the compute stream follows it before it reads the unit
    compute stream   gradient of i ready ──mark──>  swap_out lane: D2H ──mark──> a background thread waits for it, the
                                                    compute stream follows it before that memory is overwritten
    update_in lane  H2D of a tile ──mark──> update lane: its update ──mark──> update_out lane: D2H ──mark──> the update
                                                    thread waits for it
The training thread makes streams wait for marks. It waits itself at the norm; where a unit's update or its read from
nvme is not done; where gradients are added more slowly than they come; and where a slot it needs is still being copied
from. A lane uses the compute stream's memory only between two of its marks, so the allocator need not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Literal, get_args

import torch
from torch import Tensor

from .errors import OffloadError
from .memory.arena import Arena, HostBudget
from .memory.host_registration import event, parts, register, registers, unregister

Lane = Literal["swap_in", "swap_out", "update_in", "update", "update_out"]


class Mark:
    """A point in a stream's work, which has ended when all work queued before it is over: an event of the device.

    It sleeps in wait(): spinning would take a core from the update.
    """

    __slots__ = ("event",)

    def __init__(self, stream: torch.Stream) -> None:
        self.event = event(stream.device)
        self.event.record(stream)

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


class Streams:
    """A device's streams, one a lane: copies beside the caller's current stream. Any thread may call any method.

    `host`: the arena's bytes (uint8), registered once, exactly sized; or pinned. `TieredStore(streams=)` also takes a
    maker of other objects with these methods, whose marks have `done` and `wait`, as the simulated ones of the tests.
    """

    def __init__(self, device: torch.device, host: Tensor) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._lanes = {lane: self._module.Stream(device) for lane in get_args(Lane)}
        self._registered: dict[int, Tensor] = {}  # by address, kept alive until unregistered
        self._registers = registers(device)
        self.register(host)

    def register(self, host: Tensor) -> None:
        """Lets copies use this host memory (uint8) too, until it is given back or these streams are closed."""
        if self._registers and host.nbytes:
            register(host, self.device)
            self._registered[host.data_ptr()] = host

    def enter_thread(self) -> None:
        """Called first on each thread of the store: sets its device, on which marks are queried, whatever their own."""
        self._module.set_device(self.device)

    def mark(self) -> Mark:
        """A mark behind all work that the caller's current stream has queued so far."""
        return Mark(self._module.current_stream(self.device))

    def follow(self, mark: Mark) -> None:
        """Makes the caller's current stream wait for `mark`. The host goes on."""
        self._module.current_stream(self.device).wait_event(mark.event)

    def copy(self, lane: Lane, into: Tensor, source: Tensor, after: Sequence[Mark] = ()) -> Mark:
        """Queues a copy between contiguous tensors of equal shape, after earlier copies of the lane and the marks."""
        stream = self._lanes[lane]
        for mark in after:
            stream.wait_event(mark.event)
        with self.inside(lane), torch.no_grad():
            for into_part, source_part in self._in_blocks(into, source):
                into_part.copy_(source_part, non_blocking=True)
        return Mark(stream)

    @contextmanager
    def inside(self, lane: Lane) -> Iterator[None]:
        """Makes the lane the caller's current stream, so kernels and allocations come in order with its copies."""
        stream = self._lanes[lane]
        if self._module.current_stream(self.device) == stream:  # to enter it takes as long as to launch a copy
            yield
            return
        # Also the device: leaving a stream sets the thread's former one, which for a thread made here is device 0's,
        # and setting that would give this process a context there.
        with self._module.device(self.device), self._module.stream(stream):
            yield

    def _in_blocks(self, into: Tensor, source: Tensor) -> Iterable[tuple[Tensor, Tensor]]:
        """The pair, or pairs of parts whose host memory was registered in one piece."""
        host = into if into.device.type == "cpu" else source
        for memory in list(self._registered.values()):  # a copy: any thread may register
            if 0 <= host.data_ptr() - memory.data_ptr() < memory.nbytes:
                cuts = list(parts(host, memory))
                if len(cuts) > 1:
                    into, source = into.view(-1), source.view(-1)
                    return [(into[start:stop], source[start:stop]) for start, stop in cuts]
        return [(into, source)]

    def empty(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,) on the compute device."""
        return torch.empty(numel, dtype=dtype, device=self.device)

    def host(self, nbytes: int) -> Tensor:
        """(nbytes,) uint8 of host memory for copies, until it is given back or these streams are closed."""
        memory = Arena(nbytes, pinned=not self._registers).whole()
        self.register(memory)
        return memory[:nbytes]

    def give_back(self, memory: Tensor) -> None:
        """Gives back memory from `host` or `register`, which no copy uses any more."""
        if (registered := self._registered.pop(memory.data_ptr(), None)) is not None:
            unregister(registered, self.device)

    def drain(self) -> None:
        """Returns when every lane is empty."""
        for stream in self._lanes.values():
            stream.synchronize()

    def close(self) -> None:
        """Returns when every lane is empty, and gives back all host memory. Idempotent."""
        with ExitStack() as ending:  # from the last to the first, each even if one before it raised
            for memory in list(self._registered.values()):
                ending.callback(self.give_back, memory)
            for stream in self._lanes.values():
                ending.callback(stream.synchronize)


def streams_of(device: torch.device) -> Callable[[Tensor], Streams] | None:
    """A function from host memory to register to the device's streams. None for the CPU."""
    if device.type == "cpu":
        return None
    try:
        torch.get_device_module(device).Stream  # noqa: B018
    except (RuntimeError, AttributeError) as error:
        raise OffloadError(
            f"a TieredStore computes on the CPU or on a device that torch has streams for, not on {device}; leave "
            "`store` out"
        ) from error
    return partial(Streams, device)


def arena_of(device: torch.device, nbytes: int, budget: HostBudget | None = None) -> Arena:
    """An arena from which these streams can copy."""
    return Arena(nbytes, pinned=device.type != "cpu" and not registers(device), budget=budget)
