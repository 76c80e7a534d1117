"""Finds the best block size and number of bytes in flight for a folder, by measuring. Leaves no file behind."""

from __future__ import annotations

import datetime
import statistics
from collections.abc import Callable
from dataclasses import dataclass

from zero_nvme.io.options import Options
from zero_nvme.tools.measure import KINDS, MIB, Testbed

BLOCKS = (MIB // 2, MIB, 2 * MIB, 4 * MIB)
IN_FLIGHT = (2 * MIB, 4 * MIB, 8 * MIB, 16 * MIB, 32 * MIB, 64 * MIB)
ROUNDS = 3  # each tries all configurations, so that a drifting disk affects them equally
AS_FAST = 0.98  # of the fastest; a smaller difference drowns in the drift, so the cheapest in CPU time is chosen


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
