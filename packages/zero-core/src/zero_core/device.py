"""Asks torch about a device: its index, streams, backend for process groups, free memory and random state.

The CPU is the host. Every other device has streams, and torch finds its module by its type: `torch.cuda` (also on
ROCm), `torch.xpu`, or the module that a package registered when it was imported. Owns the stream for gathers ahead.

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

import os
import random
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .errors import ZeroError


def has_streams(device: torch.device) -> bool:
    """Whether the host queues work on the device and goes on. False for the CPU and for meta, which has no memory."""
    return device.type not in ("cpu", "meta")


def indexed(device: torch.device) -> torch.device:
    """Returns the device, with the index of its type's current one where it has no index. The CPU keeps none."""
    if device.index is not None or not has_streams(device):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def sent(values: Tensor, device: torch.device) -> Tensor:
    """Copies `values` of the host to the device. Pins them first, so that the host does not wait for the copy."""
    return values.pin_memory().to(device, non_blocking=True) if has_streams(device) else values.to(device)


def later(values: Tensor) -> Callable[[], list[float]]:
    """Returns a function that reads `values` (n,) on the host. It waits for work queued by now, not for later work."""
    if not has_streams(values.device):
        return values.tolist
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True, device="cpu")
    host.copy_(values, non_blocking=True)
    event = torch.get_device_module(values.device).Event()
    event.record(torch.get_device_module(values.device).current_stream(values.device))

    def read() -> list[float]:
        event.synchronize()
        return host.tolist()

    return read


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


def backend_in(group: Any, device: torch.device) -> str:
    """Returns the backend of a process group for this device. Raises ZeroError where it cannot average there."""
    if device.type == "meta":
        return ""  # nothing is sent: a rehearsal with sizes only
    config = dist.get_backend_config(group)
    by_type = dict(pair.split(":", 1) for pair in config.split(",") if ":" in pair)
    found = by_type.get(device.type, "")
    if not found or (found == "gloo" and device.type != "cpu"):
        lacks = "uses gloo, which cannot average there" if found else "has no backend"
        raise ZeroError(
            f"the model computes on {device}, where the process group ({config}) {lacks}: start the group with "
            f'torch.distributed.init_process_group("{backend_of(device.type)}")'
        )
    return found


def backend_of(device_type: str) -> str:
    """Returns the backends to start a process group with: gloo for the CPU, and torch's default for the device."""
    if device_type == "cpu":
        return "gloo"
    return f"cpu:gloo,{device_type}:{dist.get_default_backend_for_device(device_type)}"


def available_host_bytes() -> int:
    """Returns bytes that new processes may use without swapping: MemAvailable, or the control group's room if less.

    A virtual machine may show less than it gets once it uses the memory.
    """
    room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    with suppress(OSError, ValueError, IndexError):  # no limit ("max"), no control groups, or no /proc
        with open("/proc/meminfo") as file:
            found = [line.split() for line in file if line.startswith("MemAvailable:")]
        room = int(found[0][1]) * 1024
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as used:
            room = min(room, int(limit.read()) - int(used.read()))
    return room


def available_bytes(device: torch.device) -> int | None:
    """Returns bytes of the device that this process may still use; of the host, for the CPU. None if unknown."""
    if device.type == "cpu":
        return available_host_bytes()
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):
        return None
    kept = module.memory_reserved(device) - module.memory_allocated(device)  # by torch's allocator, for later tensors
    return int(module.mem_get_info(device)[0] + kept)


def random_state_of(device: torch.device) -> dict[str, Any]:
    """Returns the state of this process's generators: torch's, Python's, numpy's, and that of a device with streams."""
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = numpy.random.get_state(legacy=True)
        state["numpy"] = str(kind), torch.from_numpy(words.astype("int64")), *rest
    if has_streams(device):
        state["device"] = (device.type, torch.get_device_module(device).get_rng_state(device))
    return state


def restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if "numpy" in state and (numpy := sys.modules.get("numpy")) is not None:
        kind, words, *rest = state["numpy"]
        numpy.random.set_state((kind, words.numpy().astype("uint32"), *rest))
    kind, own = state.get("device") or ("cuda", state.get("cuda"))  # the key of older checkpoints
    if own is not None and kind == device.type:  # the generator of another type of device draws other numbers
        torch.get_device_module(device).set_rng_state(own, device)
