"""What torch knows of a kind of device: which of them is meant, over what its ranks meet, and how the host goes on.

The CPU is the host. Every other device has streams, and torch finds its module by its type: `torch.cuda` (also on
ROCm), `torch.xpu`, or what a package registered when it was imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ZeroError

__all__ = [
    "available_bytes",
    "available_host_bytes",
    "backend_in",
    "backend_of",
    "has_streams",
    "indexed",
    "later",
    "queued",
    "sent",
]


def has_streams(device: torch.device) -> bool:
    """Whether the host queues work on the device and goes on. Not on the CPU, nor where there is no memory at all."""
    return device.type not in ("cpu", "meta")


def indexed(device: torch.device) -> torch.device:
    """The device, with the index of the current one of its type where it has none. The CPU has none."""
    if device.index is not None or not has_streams(device):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def sent(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on the device. The host does not wait for it: from memory that is not pinned, it would."""
    return values.pin_memory().to(device, non_blocking=True) if has_streams(device) else values.to(device)


def later(values: Tensor) -> Callable[[], list[float]]:
    """What reads `values` (n,) on the host, which then waits for what is queued by now and for nothing after it."""
    if not has_streams(values.device):
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    wait = queued(values.device)

    def read() -> list[float]:
        wait()
        return host.tolist()

    return read


def queued(device: torch.device) -> Callable[[], None]:
    """What waits, on the host, for what the current stream of the device has queued by now."""
    module = torch.get_device_module(device)
    event = module.Event()
    event.record(module.current_stream(device))
    wait: Callable[[], None] = event.synchronize
    return wait


def backend_in(group: Any, device: torch.device) -> str:
    """The backend that a process group has for this device. Raises ZeroError where that cannot average there."""
    if device.type == "meta":
        return ""  # nothing is sent: a rehearsal with sizes only
    config = dist.get_backend_config(group)
    by_type = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    found = by_type.get(device.type, "")
    if not found or (found == "gloo" and device.type != "cpu"):
        lacks = (
            "has no backend for it" if not found else "would move its tensors by gloo, which cannot average them there"
        )
        raise ZeroError(
            f"the model computes on {device}, and the process group ({config}) {lacks}: start it with "
            f'torch.distributed.init_process_group("{backend_of(device.type)}")'
        )
    return found


def backend_of(device_type: str) -> str:
    """What to start a process group with: gloo for the CPU and, beside it, torch's default for the device."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def available_host_bytes() -> int:
    """Memory that new processes may use without swapping: MemAvailable, or the control group's room if that is less.

    A virtual machine may show less than it will be given once it is used.
    """
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        with open("/proc/meminfo") as file:
            found = [line.split() for line in file if line.startswith("MemAvailable:")]
        room = int(found[0][1]) * 1024
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            room = min(room, int(limit.read()) - int(used.read()))
    except (OSError, ValueError, IndexError):
        pass  # no limit ("max"), no control groups, or no /proc: what is known stands
    return room


def available_bytes(device: torch.device) -> int | None:
    """Memory of the device that this process may still use, of the host's for the CPU. None: nobody knows."""
    if device.type == "cpu":
        return available_host_bytes()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    kept = module.memory_reserved(device) - module.memory_allocated(device)  # by torch's allocator, for whoever asks
    return int(module.mem_get_info(device)[0] + kept)
