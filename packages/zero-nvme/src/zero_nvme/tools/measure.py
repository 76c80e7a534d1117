"""Times reads and writes of a prepared file without a name. The caller says what to measure, and how."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Literal

from zero_nvme.buffers import as_memory, empty
from zero_nvme.files.filesystem import open_nameless, opened, reserve
from zero_nvme.io import probe
from zero_nvme.io.io_queue import IOQueue
from zero_nvme.io.options import Options
from zero_nvme.io.ticket import wait_all

MIB = 1 << 20
Kind = Literal["read", "write", "mixed"]
KINDS: tuple[Kind, ...] = ("read", "write", "mixed")


class Testbed(ExitStack):
    """A file of `nbytes` in a folder, allocated and written once with incompressible bytes. A context manager."""

    def __init__(self, folder: str, nbytes: int, options: Options) -> None:
        super().__init__()
        self.options, self.reason = probe.choose([folder], options)
        self.nbytes = nbytes
        self._path = open_nameless(folder, direct=bool(self.options.direct))
        self.callback(os.close, self._path.fd)
        self.buffer = empty(min(nbytes, 64 * MIB))
        try:
            reserve(self._path, nbytes)
            self.buffer[:] = os.urandom(len(self.buffer))
            self.seconds("write")
        except BaseException:
            self.close()
            raise

    def seconds(
        self, kind: Kind, *, block_bytes: int | None = None, inflight_bytes: int | None = None
    ) -> tuple[float, float]:
        """Moves as many bytes as the file has. Returns wall time and the CPU time of all threads.

        Both run from the first request to the last completion. `mixed` reads the first half of the file while it writes
        the second.
        """
        options = replace(
            self.options,
            block_bytes=block_bytes or self.options.block_bytes,
            inflight_bytes=inflight_bytes or self.options.inflight_bytes,
        )
        path = opened(os.dup(self._path.fd), self._path.label, direct=self._path.direct)
        with IOQueue("measurement", [path], options) as queue:
            start, cpu = time.perf_counter(), time.process_time()
            moves = self._moves(kind)
            wait_all([queue._start(write, at, as_memory(part, writable=not write)) for write, at, part in moves])
            return time.perf_counter() - start, time.process_time() - cpu

    def _moves(self, kind: Kind) -> list[tuple[bool, int, memoryview]]:
        """Returns the requests in order: whether each writes, its offset in the file, its memory."""
        if kind != "mixed":
            return self._passes(kind == "write", 0, self.nbytes, self.buffer)
        half, middle = len(self.buffer) // 2, self.nbytes // 2 // 4096 * 4096
        reads = self._passes(False, 0, middle, self.buffer[:half])
        return reads + self._passes(True, middle, self.nbytes, self.buffer[half:])

    @staticmethod
    def _passes(write: bool, start: int, stop: int, memory: memoryview) -> list[tuple[bool, int, memoryview]]:
        step = len(memory)
        return [(write, offset, memory[: min(step, stop - offset)]) for offset in range(start, stop, step)]

    def gigabytes_per_second(self, seconds: float) -> float:
        return self.nbytes / seconds / 1e9


def measure_weights(folders: Sequence[str], options: Options, nbytes: int = 64 << 20) -> list[float]:
    """Returns the bandwidth of each folder in GB/s, over one write and one read of `nbytes` that it then frees."""
    rates = []
    for folder in folders:
        with Testbed(folder, nbytes, options) as bed:
            rates.append(bed.gigabytes_per_second((bed.seconds("write")[0] + bed.seconds("read")[0]) / 2))
    return rates
