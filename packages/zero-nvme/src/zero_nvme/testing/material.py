"""Data and buffers for the suites."""

from __future__ import annotations

import random
from typing import Any

from zero_nvme import empty
from zero_nvme.buffers import as_memory

PAGE = 4096
BLOCK = 64 << 10  # small blocks, so that small requests are cut


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def mapped(data: bytes) -> memoryview:
    """The bytes in aligned memory, so that direct I/O takes them as they are."""
    buffer = empty(len(data))
    buffer[:] = data
    return buffer


class Tensorlike:
    """What a CPU tensor shows of itself: an address and a size, and nothing else."""

    def __init__(self, nbytes: int, *, contiguous: bool = True) -> None:
        self.memory = empty(nbytes)
        self._contiguous = contiguous
        self.shape = (nbytes,)

    def data_ptr(self) -> int:
        return as_memory(self.memory, writable=True).address

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def is_contiguous(self) -> bool:
        return self._contiguous


async def awaited(ticket: Any) -> int:
    return int(await ticket)
