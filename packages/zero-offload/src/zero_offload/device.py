"""What only a device's vendor provides: registering host memory, so that the device copies from and to it by itself.

CUDA's and ROCm's runtime registers memory that is there already (`cudart().cudaHostRegister`, under this name on both).
A device whose module offers the same call is used in the same way. For any other device torch allocates pinned memory
(`Arena(pinned=True)`), which its allocator rounds up, perhaps to a power of two, and which has no huge pages.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from .errors import OffloadError

__all__ = ["event", "register", "registers", "unregister"]


def registers(device: torch.device) -> bool:
    """Whether `register` works for the device. Where not, host memory that it copies from is to be pinned by torch."""
    return hasattr(torch.get_device_module(device), "cudart")


def register(host: Tensor, device: torch.device) -> None:
    """Let the device copy from and to `host` by itself: whole pages, which are all in memory from here on."""
    way_out = (
        "; all of it must fit in memory: take fewer slots or put more on nvme, or raise the limit of locked memory"
    )
    _call(device, "cudaHostRegister", host, host.nbytes, 0, way_out=way_out)


def unregister(host: Tensor, device: torch.device) -> None:
    """The inverse; no copy is under way."""
    _call(device, "cudaHostUnregister", host)


def event(device: torch.device) -> Any:
    """An event of the device's. The host sleeps while it waits for it, where the device has such events."""
    module = torch.get_device_module(device)
    try:
        return module.Event(blocking=True)
    except TypeError:  # XPU's have no such option
        return module.Event()


def _call(device: torch.device, name: str, host: Tensor, *options: int, way_out: str = "") -> None:
    module = torch.get_device_module(device)
    with module.device(device):
        status = int(getattr(module.cudart(), name)(host.data_ptr(), *options))
    if status == 0:
        return
    with suppress(RuntimeError):  # torch leaves the error for the next kernel to report
        torch.zeros(1, device=device)
    what = f"{name} of {host.nbytes} bytes"
    raise OffloadError(f"{what} failed with status {status} of the {device.type} runtime{way_out}")
