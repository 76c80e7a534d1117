"""Provides `torch.sim`, with the functions of `torch.cuda`, and registers the device's name with torch."""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.accelerator import (  # noqa: F401 (names of torch.sim)
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
)

from .build import native

NAME = "sim"
CYCLES_PER_US = 2000  # of `_sleep`: a clock of 2 GHz
Device: TypeAlias = "torch.device | str | int | None"

torch.utils.rename_privateuse1_backend(NAME)


def _index(given: Device = None) -> int:
    """Returns a device's number; the current one's for None, "sim" and negative numbers."""
    if given is None:
        return int(native.current_device())
    if isinstance(given, int):
        return given if given >= 0 else int(native.current_device())
    found = torch.device(given)
    if found.type != NAME:
        raise ValueError(f"Expected a {NAME} device, but got: {found}")
    return int(native.current_device()) if found.index is None else found.index


_initialized = True  # which torch.utils.checkpoint asks before it keeps the random state


# -- devices -----------------------------------------------------------------------------------------------------------
def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


def _lazy_init() -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return int(native.devices())


def current_device() -> int:
    return int(native.current_device())


def set_device(device: Device) -> None:
    if not isinstance(device, int) or device >= 0:
        native.set_device(_index(device))


class device(torch.accelerator.device_index):
    """Makes a device the current one inside a with statement."""

    def __init__(self, device: Device) -> None:
        super().__init__(_index(device))


def _exchange_device(device: int) -> int:
    before = current_device()
    set_device(device)
    return before


_maybe_exchange_device = _exchange_device


def synchronize(device: Device = None) -> None:
    """Waits for all streams of a device. Raises the error of a kernel that failed."""
    torch.accelerator.synchronize(_index(device))


@dataclass(frozen=True)
class Properties:
    """A device's properties, with the names that torch.cuda's properties have."""

    name: str
    total_memory: int  # bytes
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 1
    pci_domain_id: int = 0
    pci_bus_id: int = 0
    pci_device_id: int = 0


def get_device_properties(device: Device = None) -> Properties:
    return Properties(get_device_name(device), int(native.total_memory(_index(device))))


def get_device_name(device: Device = None) -> str:
    return f"zero-sim simulated accelerator {_index(device)}"


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.bfloat16, torch.float16]


# -- streams and events ------------------------------------------------------------------------------------------------
class Stream(torch.Stream):
    """An order of work on a device. `Stream(device)` is one of 32, given out in turn, as CUDA's are."""

    def __new__(cls, device: Device = None, priority: int = 0, **keywords: Any) -> Stream:
        if keywords:  # stream_id, device_index, device_type: an existing stream
            return super().__new__(cls, **keywords)
        return super().__new__(cls, device=torch.device(NAME, _index(device)), priority=priority)

    def __repr__(self) -> str:
        return f"<torch.sim.Stream device={self.device} stream={self.stream_id}>"


class Event(torch.Event):
    """A point in a stream. With `enable_timing`, `first.elapsed_time(second)` is in milliseconds."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        if interprocess:
            raise NotImplementedError("events of sim cannot be shared between processes")
        made = super().__new__(cls, device=NAME, enable_timing=enable_timing, blocking=blocking)
        made._timed = enable_timing
        return made

    _timed: bool

    def record(self, stream: torch.Stream | None = None) -> None:
        super().record(current_stream() if stream is None else stream)

    def elapsed_time(self, end_event: torch.Event) -> float:  # torch's own takes no subclass of torch.Event
        if not (self._timed and getattr(end_event, "_timed", False)):
            raise ValueError("both events must be made with enable_timing=True")
        return float(native.milliseconds_between(self.event_id, end_event.event_id))

    def wait(self, stream: torch.Stream | None = None) -> None:
        super().wait(current_stream() if stream is None else stream)


def _known(stream: torch.Stream) -> Stream:
    return Stream(stream_id=stream.stream_id, device_index=stream.device_index, device_type=stream.device_type)


def current_stream(device: Device = None) -> Stream:
    return _known(torch.accelerator.current_stream(_index(device)))


def default_stream(device: Device = None) -> Stream:
    here = torch.accelerator.current_stream(_index(device))
    return Stream(stream_id=0, device_index=here.device_index, device_type=here.device_type)


def set_stream(stream: torch.Stream | None) -> None:
    if stream is not None:
        torch.accelerator.set_stream(stream)


class StreamContext:
    """Makes a stream the current one, and its device; does nothing for None."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        if self.stream is None:
            return
        self._device, self._before = current_device(), current_stream(self.stream.device)
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        if self.stream is None:
            return
        set_stream(self._before)
        set_device(self._device)


def stream(stream: torch.Stream | None) -> StreamContext:
    return StreamContext(stream)


def _sleep(cycles: int) -> None:
    """Keeps the current stream busy."""
    native.spin(native.current_stream_index(-1), int(cycles) // CYCLES_PER_US)


_MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(debug_mode: int | str) -> None:
    """Sets the reaction, "default", "warn" or "error", to implicit waits for a device where CUDA's host would wait."""
    mode = _MODES.get(debug_mode, debug_mode) if isinstance(debug_mode, str) else debug_mode
    if mode not in (0, 1, 2):
        raise RuntimeError(f"invalid value of debug_mode, {debug_mode!r}: expected one of {list(_MODES)}")
    native.set_sync_debug_mode(mode)


def get_sync_debug_mode() -> int:
    return int(native.get_sync_debug_mode())


# -- memory ------------------------------------------------------------------------------------------------------------
OutOfMemoryError = torch.OutOfMemoryError
mem_get_info = torch.accelerator.get_memory_info


def set_per_process_memory_fraction(fraction: float, device: Device = None) -> None:
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
    native.set_memory_limit(_index(device), int(fraction * native.total_memory(_index(device))))


class _Runtime:
    """The functions of `torch.cuda.cudart()` for host memory. They return 0 for success, else a cudaError_t."""

    cudaError = types.SimpleNamespace(success=0)

    @staticmethod
    def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
        return int(native.host_register(address, nbytes))

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        return int(native.host_unregister(address))

    @staticmethod
    def cudaMemGetInfo(device: int) -> tuple[int, int]:
        return mem_get_info(device)


def cudart() -> type[_Runtime]:
    return _Runtime


# -- random numbers ----------------------------------------------------------------------------------------------------
def _generator(device: Device = NAME) -> torch.Generator:
    found: torch.Generator = native.default_generator(_index(device))
    return found


def get_rng_state(device: Device = NAME) -> torch.Tensor:
    return _generator(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: Device = NAME) -> None:
    _generator(device).set_state(new_state)


def manual_seed(seed: int) -> None:
    _generator().manual_seed(int(seed))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _generator(index).manual_seed(int(seed))


torch._register_device_module(NAME, sys.modules[__name__])
torch.utils.generate_methods_for_privateuse1_backend(for_packed_sequence=True, for_storage=True)
