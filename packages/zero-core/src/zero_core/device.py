"""What torch knows of a kind of device: which of them is meant, and over what its ranks meet. Owns no tensor.

The CPU is the host. Every other device has streams, and torch finds its module by its type: `torch.cuda` (also on
ROCm), `torch.xpu`, or what a package registered when it was imported.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

__all__ = ["backend_of", "indexed"]


def indexed(device: torch.device) -> torch.device:
    """The device, with the index of the current one of its type where it has none. The CPU has none."""
    if device.type == "cpu" or device.index is not None:
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def backend_of(device_type: str) -> str:
    """What to start a process group with: gloo for the CPU and, beside it, torch's default for the device."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"
