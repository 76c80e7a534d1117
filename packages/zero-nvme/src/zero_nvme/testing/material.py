"""Makes data and buffers for the suites."""

from __future__ import annotations

import random

from zero_nvme import empty

PAGE = 4096
BLOCK = 64 << 10  # small blocks, so that small requests are cut


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def mapped(data: bytes) -> memoryview:
    """The bytes in aligned memory, so that direct I/O takes them as they are."""
    buffer = empty(len(data))
    buffer[:] = data
    return buffer


class Bytes(bytearray):
    """A bytearray that weak references may be made of."""
