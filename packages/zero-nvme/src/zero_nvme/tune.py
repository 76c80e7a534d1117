"""Finds block size and bytes in flight for a folder. Measures; writes nothing but its own nameless file."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from zero_nvme.measure import MIB, Testbed
from zero_nvme.options import Options

BLOCKS = (MIB, 2 * MIB, 4 * MIB, 8 * MIB)
IN_FLIGHT = (4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
ROUNDS = 3  # all configurations once, and again: a disk that drifts drifts under all of them
AS_FAST = 0.98  # of the fastest: less is not seen above the drift, and then the cheapest in CPU time is taken


@dataclass(frozen=True)
class Tuned:
    backend: str
    reason: str
    block_bytes: int
    inflight_bytes: int
    read: float  # GB/s
    write: float  # GB/s
    cpu_seconds_per_gib: float  # of reading and writing it

    def yaml(self, folder: str) -> str:
        """Keys as the keywords of Slab and File, for conf/io."""
        return "\n".join(
            [
                f"# python -m zero_nvme tune {folder}, {datetime.date.today()}:",
                f"# read {self.read:.2f} GB/s, write {self.write:.2f} GB/s; {self.reason}",
                f"backend: {self.backend}",
                f"block_bytes: {self.block_bytes}",
                f"inflight_bytes: {self.inflight_bytes}",
            ]
        )


def tune(
    folder: str, backend: str = "auto", nbytes: int = 256 * MIB, report: Callable[[str], None] = lambda line: None
) -> Tuned:
    """Medians of a few rounds over all block sizes and bytes in flight; of those as fast as any, the cheapest.

    `report` is told of every configuration tried. Raises what Slab raises for the folder.
    """
    configurations = [(block, in_flight) for block in BLOCKS for in_flight in IN_FLIGHT if in_flight >= 2 * block]
    passes: dict[tuple[int, int], list[tuple[float, float, float]]] = {each: [] for each in configurations}
    with Testbed(folder, nbytes, Options(backend=backend)) as bed:
        for _ in range(ROUNDS):
            for block, in_flight in configurations:
                passes[block, in_flight].append(_read_and_write(bed, block, in_flight))
    tried = [_summary(bed, block, in_flight, passes[block, in_flight]) for block, in_flight in configurations]
    for each in tried:
        report(
            f"{each.block_bytes // MIB} MiB x {each.inflight_bytes // each.block_bytes}: read {each.read:.2f}, "
            f"write {each.write:.2f} GB/s, {each.cpu_seconds_per_gib:.3f} CPU s/GiB"
        )
    enough = AS_FAST * max(map(_score, tried))
    return min((each for each in tried if _score(each) >= enough), key=lambda each: each.cpu_seconds_per_gib)


def _read_and_write(bed: Testbed, block: int, in_flight: int) -> tuple[float, float, float]:
    """Seconds of a read and of a write of the whole file, CPU seconds of both."""
    read, read_cpu = bed.seconds(write=False, block_bytes=block, inflight_bytes=in_flight)
    write, write_cpu = bed.seconds(write=True, block_bytes=block, inflight_bytes=in_flight)
    return read, write, read_cpu + write_cpu


def _summary(bed: Testbed, block: int, in_flight: int, passes: list[tuple[float, float, float]]) -> Tuned:
    read, write, cpu = (statistics.median(column) for column in zip(*passes, strict=True))
    rates = bed.gigabytes_per_second(read), bed.gigabytes_per_second(write)
    return Tuned(bed.backend, bed.reason, block, in_flight, *rates, cpu / (bed.nbytes / 2**30))


def _score(tuned: Tuned) -> float:
    """Bytes per second of a step that reads what it writes."""
    return 2 / (1 / tuned.read + 1 / tuned.write)
