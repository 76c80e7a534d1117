"""The way between host memory and the compute device: streams, events, registered memory. On the CPU: nothing.

Written for CUDA and NOT YET RUN on a GPU; the tests run its CPU side only, tests/gpu holds what is to be run there.

[Note: stream order]
    swap_in stream   H2D of unit i ──event──>             the caller's stream waits for the event in parameters(i)
    caller's stream  gradient ready ──event──> swap_out stream: D2H ──event──> the host waits before it reads
Device copies are recorded on the caller's stream, so the allocator does not hand them out while kernels still use them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .errors import OffloadError

__all__ = ["Link"]


class Link:
    """Copies of host tensors on the compute device, one per unit, each valid until it is dropped."""

    def __init__(self, device: torch.device, host: Tensor | None) -> None:
        """`host`: the arena's bytes, registered with CUDA once so that copies are asynchronous."""
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._copies: dict[int, tuple[Tensor, torch.cuda.Event]] = {}
        self._registered: int | None = None
        if not self.is_cuda:
            return
        self._swap_in = torch.cuda.Stream(device)
        self._swap_out = torch.cuda.Stream(device)
        if host is not None and host.nbytes:
            status = int(torch.cuda.cudart().cudaHostRegister(host.data_ptr(), host.nbytes, 0))
            if status != 0:
                raise OffloadError(
                    f"cudaHostRegister of the {host.nbytes} byte arena failed with status {status}; "
                    "raise the locked memory limit (ulimit -l) or take fewer slots"
                )
            self._registered = host.data_ptr()

    @property
    def device_bytes(self) -> int:
        """Of the copies that are alive."""
        return sum(copy.nbytes for copy, _ in self._copies.values())

    def upload(self, i: int, host: Tensor) -> None:
        """Begin to copy unit i's parameters to the device."""
        if not self.is_cuda or i in self._copies:
            return
        with torch.cuda.stream(self._swap_in):
            copy = host.to(self.device, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._copies[i] = (copy, event)

    def resident(self, i: int) -> bool:
        return i in self._copies

    def get(self, i: int, host: Tensor) -> Tensor:
        """Unit i's parameters on the compute device, ordered on the caller's stream."""
        if not self.is_cuda:
            return host
        self.upload(i, host)
        copy, event = self._copies[i]
        current = torch.cuda.current_stream(self.device)
        current.wait_event(event)
        copy.record_stream(current)
        return copy

    def drop(self, i: int) -> None:
        """Unit i's copy is not used after what the caller has queued."""
        self._copies.pop(i, None)

    def uploaded(self, i: int) -> None:
        """Return when the host side of unit i's copy may be overwritten."""
        if self.is_cuda and i in self._copies:
            self._copies[i][1].synchronize()

    def download(self, gradient: Tensor, into: Tensor | None) -> Tensor:
        """A gradient in host memory, in `into` where that is given; returns when it is there."""
        if not self.is_cuda:
            return gradient
        target = torch.empty(gradient.shape, dtype=gradient.dtype) if into is None else into
        self._swap_out.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._swap_out):
            target.copy_(gradient, non_blocking=True)
        gradient.record_stream(self._swap_out)
        self._swap_out.synchronize()
        return target

    def close(self) -> None:
        """Unregister the memory. Idempotent."""
        if self._registered is not None:
            torch.cuda.synchronize(self.device)
            torch.cuda.cudart().cudaHostUnregister(self._registered)
            self._registered = None
        self._copies.clear()
