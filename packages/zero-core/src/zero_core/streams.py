"""Runs gathers ahead on a stream beside the compute stream. On the CPU there is none, and nothing happens.

[Note: streams]
A wait for a copy or for other ranks must not hold up kernels that need neither. Four streams, on one GPU:

    compute   | unit 0 ........ | unit 1 ........ | unit 2
    side        \\ wait(copy of 1)  \\ wait(copy of 2)            begun by prefetch(), after compute's queued work
    NCCL           \\ gather 1 ..../  \\ gather 2 .../             follows the stream on which it is called: side
    store     copy 1 ...../     copy 2 ..../                     its own, after compute's queued work at swap_in

- Only `unshard()` makes compute wait: for the store's arrival on one shard, for the gather on several. It is the first
  that needs the memory.
- Memory is allocated and freed with compute as the current stream, also memory that only the others write. Freed memory
  may still be read by kernels that compute has queued, so a stream that writes into new memory first waits for compute:
  side does in `after_current`, NCCL behind it, and the store in swap_in.
- Nothing is freed, or given back to a pool or a store, before compute waits for its last reader or writer on another
  stream. Where the unit is used, unshard() did. Where it is not, `Arrival.drop()` does (the store), and the wait for
  the gather. So `record_stream` is not needed, which would keep memory until the host sees an event pass. For
  `resize_(0)` it is the one way that holds whether or not the collectives' library keeps its tensors.
- Gradients are reduced behind compute, which produces them, and waited for when the next unit's reduction begins. The
  calls of one communicator run in the order in which they were made: a gather that waits for a late copy holds up the
  reduction called after it, not compute.
- Hooks run on the stream that autograd gives them: a visit's on its forward's, a parameter's gradient on the one that
  was current when autograd first met the parameter, the end of backward on the caller's. `go_on()` puts them in one
  order: compute, above, is the current stream, which waits for the work that the last hook queued on another.
- The host waits for none of this. It runs ahead by as many units as it has launched; memory follows compute's order.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from .device import has_streams


class Side:
    """The stream for gathers that are begun ahead. `streams`: replaces the device's module."""

    def __init__(self, device: torch.device, streams: Any = None) -> None:
        self._device = device
        self._streams = torch.get_device_module(device) if streams is None and has_streams(device) else streams
        self._stream: Any = None
        self._compute: Any = None  # where the last call of go_on() found the caller

    def go_on(self) -> None:
        """Makes the current stream wait for the work that the last caller's stream has queued."""
        if self._streams is None:
            return
        current = self._streams.current_stream(self._device)
        if self._compute is not None and current != self._compute:
            current.wait_stream(self._compute)
        self._compute = current

    def after_current(self) -> AbstractContextManager[None]:
        """Inside, the current stream is the side stream, which goes on from where the caller's is now."""
        if self._streams is None:
            return nullcontext()
        if self._stream is None:
            self._stream = self._streams.Stream(self._device)
        self._stream.wait_stream(self._streams.current_stream(self._device))
        return self._streams.stream(self._stream)
