"""Times reads and writes of a prepared file without a name, and finds the best block size and bytes in flight."""

from __future__ import annotations

import datetime
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Literal

from zero_nvme.buffers import as_memory, empty
from zero_nvme.files.filesystem import open_nameless, opened, reserve
from zero_nvme.io.io_queue import IOQueue, Options, choose
from zero_nvme.io.ticket import wait_all

MIB = 1 << 20
Kind = Literal["read", "write", "mixed"]
KINDS: tuple[Kind, ...] = ("read", "write", "mixed")
BLOCKS = (MIB // 2, MIB, 2 * MIB, 4 * MIB)
IN_FLIGHT = (2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
ROUNDS = 3  # each tries all configurations, so that a drifting disk affects them equally
AS_FAST = 0.98  # of the fastest; a smaller difference drowns in the drift, so the cheapest in CPU time is chosen


class Testbed(ExitStack):
    """A file of `nbytes` in a folder, allocated and written once with incompressible bytes. A context manager."""

    def __init__(self, folder: str, nbytes: int, options: Options) -> None:
        super().__init__()
        self.options, self.reason = choose([folder], options)
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


@dataclass(frozen=True)
class Tuned:
    backend: str
    reason: str
    block_bytes: int
    inflight_bytes: int
    read: float  # GB/s
    write: float  # GB/s
    mixed: float  # GB/s, read and written together
    cpu_seconds_per_gib: float  # of the three

    def yaml(self, folder: str) -> str:
        """Returns YAML for conf/io, with the keywords of Slab and File as keys."""
        return "\n".join(
            [
                f"# python -m zero_nvme tune {folder}, {datetime.date.today()}:",
                f"# read {self.read:.2f}, write {self.write:.2f}, both at once {self.mixed:.2f} GB/s; {self.reason}",
                f"backend: {self.backend}",
                f"block_bytes: {self.block_bytes}",
                f"inflight_bytes: {self.inflight_bytes}",
            ]
        )


def tune(
    folder: str, backend: str = "auto", nbytes: int = 256 * MIB, report: Callable[[str], None] = lambda line: None
) -> Tuned:
    """Measures all configurations in a few rounds. Returns the cheapest of the fastest.

    Speed is the harmonic mean of reading, writing and both at once, which is how optimizer states move. Cost is CPU
    time. `report` is called with a line for every configuration. Raises what Slab raises for the folder.
    """
    configurations = [(block, in_flight) for block in BLOCKS for in_flight in IN_FLIGHT if in_flight >= 2 * block]
    passes: dict[tuple[int, int], list[tuple[float, ...]]] = {each: [] for each in configurations}
    with Testbed(folder, nbytes, Options(backend=backend)) as bed:
        for _ in range(ROUNDS):
            for block, in_flight in configurations:
                passes[block, in_flight].append(_measured(bed, block, in_flight))
        found = sorted((_summary(bed, *each, passes[each]) for each in configurations), key=_score)
    for each in found:
        report(
            f"{each.block_bytes / MIB:g} MiB x {each.inflight_bytes // each.block_bytes}: read {each.read:.2f}, "
            f"write {each.write:.2f}, both {each.mixed:.2f} GB/s, {each.cpu_seconds_per_gib:.3f} CPU s/GiB"
        )
    enough = AS_FAST * _score(found[-1])
    return min((each for each in found if _score(each) >= enough), key=lambda each: each.cpu_seconds_per_gib)


def _measured(bed: Testbed, block: int, in_flight: int) -> tuple[float, ...]:
    """Returns the seconds of each kind, then the CPU seconds of all."""
    runs = [bed.seconds(kind, block_bytes=block, inflight_bytes=in_flight) for kind in KINDS]
    return *(seconds for seconds, _ in runs), sum(cpu for _, cpu in runs)


def _summary(bed: Testbed, block: int, in_flight: int, passes: list[tuple[float, ...]]) -> Tuned:
    *seconds, cpu = (statistics.median(column) for column in zip(*passes, strict=True))
    rates = dict(zip(KINDS, map(bed.gigabytes_per_second, seconds), strict=True))
    gib = len(KINDS) * bed.nbytes / 2**30
    return Tuned(bed.options.backend, bed.reason, block, in_flight, **rates, cpu_seconds_per_gib=cpu / gib)


def _score(tuned: Tuned) -> float:
    """Returns the bandwidth of a workload that is a third reads, a third writes and a third both at once."""
    return statistics.harmonic_mean([tuned.read, tuned.write, tuned.mixed])
