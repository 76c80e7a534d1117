"""Turns a caller's buffer into an address and a length, and allocates buffers on huge pages. Does no I/O."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any, NamedTuple

from zero_nvme.extension import native

HUGE_PAGE_BYTES = 2 << 20


class Memory(NamedTuple):  # one is made for every request: half the time of a frozen dataclass
    address: int
    nbytes: int
    keep: object  # the object that keeps the address valid


def as_memory(buffer: Any, *, writable: bool) -> Memory:
    """Returns the address and length of a contiguous buffer, without a copy.

    Where the extension is not built, a read-only buffer is copied.

    `buffer` has `data_ptr()` and `nbytes` (a CPU tensor), or the buffer protocol (bytearray, numpy array, mmap,
    `zero_nvme.empty`). `writable` says that bytes will be read into it.

    Raises TypeError for memory that is not on the CPU, not contiguous, or read-only although `writable` is set.
    """
    if isinstance(buffer, memoryview):
        view = buffer
    elif hasattr(buffer, "data_ptr") and hasattr(buffer, "nbytes"):
        return _tensor_memory(buffer)
    else:
        view = memoryview(buffer)
    if not view.c_contiguous:
        raise TypeError(
            f"a buffer of shape {view.shape} and strides {view.strides} is not contiguous; "
            "pass a contiguous copy, for instance numpy.ascontiguousarray(x)"
        )
    if writable and view.readonly:
        raise TypeError(f"cannot read into read-only {type(buffer).__name__} of {view.nbytes} bytes; pass a bytearray")
    nbytes = view.nbytes
    if native is None and view.readonly:
        view = memoryview(bytearray(view))  # ctypes has no public way to a read-only buffer's address
    return Memory(_address(view), nbytes, view) if nbytes else Memory(0, 0, None)


def _tensor_memory(tensor: Any) -> Memory:
    device = getattr(tensor, "device", None)
    if getattr(device, "type", "cpu") != "cpu":
        raise TypeError(f"a tensor on {device} has no CPU address; copy it to CPU memory first")
    if hasattr(tensor, "is_contiguous") and not tensor.is_contiguous():
        raise TypeError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous; pass tensor.contiguous()")
    return Memory(int(tensor.data_ptr()), int(tensor.nbytes), tensor)


def _address(view: memoryview) -> int:
    if native is not None:
        return native.address_of(view)
    return ctypes.addressof(ctypes.c_char.from_buffer(view.cast("B")))


def bytes_at(memory: Memory) -> memoryview:
    """Returns a writable view of the memory. It is valid while `memory.keep` lives."""
    return memoryview((ctypes.c_char * memory.nbytes).from_address(memory.address)).cast("B")


def empty(nbytes: int) -> memoryview:
    """Returns a zeroed buffer, aligned to 2 MiB and on 2 MiB pages if the kernel provides them.

    Where the extension is not built it is aligned to a page: its transfers go through the page cache.

    Direct I/O into huge pages was 3 times as fast as into 4 KiB pages on the reference disk. The memory is mapped for
    this buffer alone and unmapped with its last view. A forked child sees zeros in it. It can be wrapped without a
    copy: `torch.frombuffer(empty(n), dtype=...)`, `numpy.frombuffer(empty(n), dtype=...)`.

    Raises ValueError for a negative size, OSError (ENOMEM) when the address space is short.

    Examples:
        >>> import zero_nvme
        >>> buffer = zero_nvme.empty(1000)
        >>> len(buffer), sum(buffer)
        (1000, 0)
    """
    if nbytes < 0:
        raise ValueError(f"empty({nbytes}): the size in bytes cannot be negative")
    if native is not None:
        return memoryview(native.HugeBuffer(nbytes))
    return memoryview(mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS))[:nbytes]
