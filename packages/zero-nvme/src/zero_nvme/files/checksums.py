"""Keeps checksums of written chunks, by extent, in memory while the slab lives.

The thread that submits a write computes its checksums, and the thread that waits for a read verifies them. With the
processor's CRC instruction that takes 0.12 s per GiB (Xeon, 2.5 GHz). Without it, zlib's CRC-32 takes 0.35 to 0.6 s.
"""

from __future__ import annotations

import errno
import threading
import zlib
from collections.abc import Callable

from zero_nvme.buffers import Memory, bytes_at
from zero_nvme.errors import ChecksumError
from zero_nvme.extension import native
from zero_nvme.extents import Extent

CHUNK_BYTES = 1 << 20


def by_zlib(address: int, nbytes: int) -> list[int]:
    return [zlib.crc32(bytes_at(Memory(address, nbytes, None)))]


checksum = native.checksum if native is not None and native.has_checksum() else by_zlib


class Checksums:
    """The checksums of chunks that were written as a whole.

    Writing a part of a chunk forgets its checksum. A read verifies the known chunks that it
    covers entirely.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[int, dict[int, list[int]]] = {}  # extent offset -> chunk index -> checksum

    def observe(self, write: bool, extent: Extent, offset: int, memory: Memory) -> Callable[[], None] | None:
        """Records a write that begins. For a read, returns the check to run once it completes: raises ChecksumError."""
        whole = list(_whole_chunks(extent, offset, memory.nbytes))
        if write:
            self._note(extent, offset, memory, whole)
            return None
        with self._lock:
            known = dict(self._known.get(extent.offset_bytes, {}))
        expected = [(index, start, stop, known[index]) for index, start, stop in whole if index in known]
        if not expected:
            return None

        def verify() -> None:
            for index, start, stop, wanted in expected:
                got = checksum(memory.address + start - offset, stop - start)
                if got != wanted:
                    raise ChecksumError(
                        errno.EILSEQ,
                        f"{extent}: bytes [{start}, {stop}), chunk {index}, have checksum {_text(got)}, "
                        f"{_text(wanted)} was written; the device or the memory is faulty, restore a checkpoint",
                        offset=extent.offset_bytes + start,
                        wanted=stop - start,
                    )

        return verify

    def _note(self, extent: Extent, offset: int, memory: Memory, whole: list[tuple[int, int, int]]) -> None:
        if memory.nbytes == 0:
            return
        sums = {index: checksum(memory.address + start - offset, stop - start) for index, start, stop in whole}
        with self._lock:
            known = self._known.setdefault(extent.offset_bytes, {})
            for index in range(offset // CHUNK_BYTES, (offset + memory.nbytes - 1) // CHUNK_BYTES + 1):
                known.pop(index, None)
            known.update(sums)

    def forget(self, extent: Extent) -> None:
        with self._lock:
            self._known.pop(extent.offset_bytes, None)


def _text(parts: list[int]) -> str:
    return "".join(f"{part:08x}" for part in parts)


def _whole_chunks(extent: Extent, offset: int, nbytes: int) -> list[tuple[int, int, int]]:
    """Returns (index, start, stop) of the chunks within [offset, offset + nbytes). The last may be short."""
    chunks = []
    for index in range(-(-offset // CHUNK_BYTES), -(-extent.nbytes // CHUNK_BYTES)):
        start, stop = index * CHUNK_BYTES, min((index + 1) * CHUNK_BYTES, extent.nbytes)
        if stop > offset + nbytes:
            break
        chunks.append((index, start, stop))
    return chunks
