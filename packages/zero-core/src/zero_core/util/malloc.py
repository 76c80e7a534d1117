"""Tunes and trims glibc's heap. The process decides about its memory: only sleeping and moving shards trim it here."""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
_PIECES = 64  # about three returns in a step of 10 units and 8 parts
_MOST = 1 << 30  # mallopt takes an int; beyond HEAP_MAX/2 on 64 bit the mmap threshold is refused, so it is tried first


def keep_freed_memory() -> bool:
    """Asks glibc to keep freed blocks instead of returning them to the kernel; False where there is no glibc.

    Training frees and allocates the same activations every step. Returned to the kernel, each costs page faults at its
    next use: 70-80 thousand a step for a 120 M model on the CPU. The price is that memory once used stays with the
    process. Call it first, before tensors are made. `THP_MEM_ALLOC_ENABLE=1` in the environment, which torch reads at
    its first tensor, takes more of the page faults away, and less memory: docs/results/parts.md, "Huge pages".
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    mallopt.argtypes, mallopt.restype = [ctypes.c_int, ctypes.c_int], ctypes.c_int
    kept = any(mallopt(_M_MMAP_THRESHOLD, size) for size in (_MOST, 32 << 20))
    return bool(kept and mallopt(_M_TRIM_THRESHOLD, (1 << 31) - 1))


def give_back_freed_memory() -> None:
    """Returns freed blocks to the kernel once, where there is a glibc. Blocks of 32 MiB and less stay otherwise."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)


class FreedMemory:
    """Returns freed blocks to the kernel between pieces of work, when the memory gained is worth the page faults.

    Blocks that stay with the process save the next piece its page faults, until they are holes too small for any
    request. So they are returned once the process has grown by twice the growth in the first piece after the last
    return. That piece may not be typical, so they are also returned, and the growth measured again, after `_PIECES`
    pieces.
    """

    def __init__(self) -> None:
        # Bytes resident after the last return, bytes above which to return again, pieces begun. None: not known yet.
        self._state: tuple[int | None, int | None, int] = (None, None, 0)

    def begin(self) -> None:
        """Marks the beginning of a piece of work. Call it in any thread."""
        found, (least, most, begun) = _resident_bytes(), self._state
        if least is not None and most is None:
            most = least + 2 * max(found - least, 1 << 20)
        elif most is None or found > most or begun >= _PIECES:
            give_back_freed_memory()
            least, most, begun = _resident_bytes(), None, 0
        self._state = least, most, begun + 1


def _resident_bytes() -> int:
    """Returns the process's resident bytes, 0 where there is no /proc."""
    with suppress(OSError), open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
