"""Timed reads and writes of a prepared, nameless file. The clock and nothing else; what to try is the callers'."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from typing import Literal

from zero_nvme import probe
from zero_nvme.buffers import as_memory, empty
from zero_nvme.engine import Engine
from zero_nvme.filesystem import open_nameless, opened, preallocate
from zero_nvme.fio import Kind
from zero_nvme.options import Options
from zero_nvme.ticket import wait_all

MIB = 1 << 20


class Testbed:
    """A file of `nbytes` in a folder, allocated, and written once with what does not compress. A context manager."""

    def __init__(self, folder: str, nbytes: int, options: Options) -> None:
        choice = probe.choose([folder], options)
        self.backend, self.direct, self.reason = choice.backend, choice.direct, choice.reason
        self.nbytes = nbytes
        self._options = replace(options, backend=choice.backend, direct=choice.direct)
        self._path = open_nameless(folder, direct=choice.direct)
        self.buffer = empty(min(nbytes, 64 * MIB))
        try:
            preallocate(self._path, nbytes)
            self.buffer[:] = os.urandom(len(self.buffer))
            self.seconds("write")
        except BaseException:
            self.close()
            raise

    def seconds(
        self, kind: Kind, *, block_bytes: int | None = None, inflight_bytes: int | None = None
    ) -> tuple[float, float]:
        """Time to move as many bytes as the file has, first request to last completion; and CPU time, of all threads.

        `mixed` reads the first half of the file while it writes the second.
        """
        options = replace(
            self._options,
            block_bytes=block_bytes or self._options.block_bytes,
            inflight_bytes=inflight_bytes or self._options.inflight_bytes,
        )
        path = opened(os.dup(self._path.fd), self._path.label, direct=self.direct)
        engine = Engine("measurement", [path], options, backend=self.backend)
        try:
            start, cpu = time.perf_counter(), time.process_time()
            wait_all(
                [
                    engine.submit(write, offset, as_memory(part, writable=not write))
                    for write, offset, part in self._moves(kind)
                ]
            )
            return time.perf_counter() - start, time.process_time() - cpu
        finally:
            engine.close()

    def _moves(self, kind: Kind) -> list[tuple[bool, int, memoryview]]:
        """Write or read, offset in the file, memory: what is moved, in the order of the requests."""
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

    def close(self) -> None:
        os.close(self._path.fd)

    def __enter__(self) -> Testbed:
        return self

    def __exit__(self, *exception: object) -> Literal[False]:
        self.close()
        return False
