"""Finds block size and bytes in flight for a folder. Measures; writes nothing but its own nameless file."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass

from zero_nvme.measure import MIB, Testbed
from zero_nvme.options import Options

BLOCKS = (MIB, 2 * MIB, 4 * MIB, 8 * MIB)
MOST_IN_FLIGHT = 16 * MIB  # beyond it reads lose and system time grows, on the reference disk
WORTHWHILE = 1.03  # twice the bytes in flight must gain 3 %, else the latency is not worth it


@dataclass(frozen=True)
class Tuned:
    backend: str
    reason: str
    block_bytes: int
    inflight_bytes: int
    read: float  # GB/s
    write: float  # GB/s

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
    """For each block size: two in flight, doubled while that gains 3 % in reads and writes together.

    `report` is told of every configuration tried. Raises what Slab raises for the folder.
    """
    best: Tuned | None = None
    with Testbed(folder, nbytes, Options(backend=backend)) as bed:
        for block in BLOCKS:
            reached = 0.0
            in_flight = 2 * block
            while in_flight <= MOST_IN_FLIGHT:
                tried = _measure(bed, block, in_flight)
                report(
                    f"{block // MIB} MiB x {in_flight // block}: read {tried.read:.2f}, write {tried.write:.2f} GB/s"
                )
                if best is None or _score(tried) > WORTHWHILE * _score(best):
                    best = tried
                if _score(tried) < WORTHWHILE * reached:
                    break
                reached = _score(tried)
                in_flight *= 2
    assert best is not None
    return best


def _measure(bed: Testbed, block: int, in_flight: int) -> Tuned:
    """The better of two rounds each."""
    seconds = {
        write: min(bed.seconds(write=write, block_bytes=block, inflight_bytes=in_flight) for _ in range(2))
        for write in (False, True)
    }
    read, write = bed.gigabytes_per_second(seconds[False]), bed.gigabytes_per_second(seconds[True])
    return Tuned(bed.backend, bed.reason, block, in_flight, read, write)


def _score(tuned: Tuned) -> float:
    """Bytes per second of a step that reads what it writes."""
    return 2 / (1 / tuned.read + 1 / tuned.write)
