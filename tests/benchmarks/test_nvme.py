"""zero_nvme against fio, in turns on one incompressible file that is already written: ratios only.

    python -m tests.benchmarks.test_nvme PATH [--gib 1] [--pairs 7] [--parts read,write,mixed] [--json FILE]

For each kind of pass a sweep over engine, block size and depth, and a final of its best six over the whole file, find
fio's best configuration once, with huge-page buffers; the same sweep finds ours. Then fio, ours, fio, ours, … in which
a ratio is ours over the mean of the two runs around it; their median is reported. fio with ordinary buffers runs
beside. Needs fio. A --json file that exists is kept for the parts that are not run. Under pytest: a small run.
"""

import argparse
import itertools
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

import zero_nvme
from tests.benchmarks import fio
from tests.benchmarks.fio import FioResult
from zero_nvme.tools.measure import Kind

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
KINDS: tuple[Kind, ...] = ("read", "write", "mixed")
AIMS = {"read": 1.0, "write": 1.0, "mixed": 0.97}  # ours over fio's bytes per second, at least
AIM_CPU = 1.2  # ours over fio's CPU seconds per GiB, at most
MOST_IN_FLIGHT = 256 * MIB  # of the sweeps: beyond it a peer only locks memory


@dataclass(frozen=True)
class Grid:
    """What the sweeps try, and on how many bytes, twice each."""

    nbytes: int = 128 * MIB
    blocks: tuple[int, ...] = (256 * KIB, MIB, 4 * MIB, 16 * MIB)
    depths: tuple[int, ...] = (2, 4, 8, 16, 32, 64)
    engines: tuple[str, ...] = ("io_uring", "libaio")

    def points(self) -> list[tuple[int, int]]:
        return [(b, d) for b, d in itertools.product(self.blocks, self.depths) if b * d <= MOST_IN_FLIGHT]


@dataclass(frozen=True)
class Ours:
    """How our stream is cut: requests of `request_bytes`, so many of them at a time that they fill the buffer."""

    backend: str
    block_bytes: int
    inflight_bytes: int
    request_bytes: int
    buffer_bytes: int


def prepare(name: str, nbytes: int) -> None:
    with open(name, "wb") as file:
        for _ in range(0, nbytes, MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())


def best_of(
    settings: list[dict[str, Any]], run: Callable[[dict[str, Any], int], FioResult], few: int, whole: int
) -> dict[str, Any]:
    """The fastest setting. All of them move the few bytes, twice; the best six the whole, three times, and there the
    median decides: a single fast pass is the disk's luck, and the first after a pause more often than not."""
    if len(settings) == 1:
        return settings[0]
    everything = range(len(settings))
    rates: dict[int, list[float]] = {index: [] for index in everything}
    run(settings[0], few)  # a pause has just ended
    for index in [*everything, *everything]:
        rates[index].append(run(settings[index], few).gigabytes_per_second)
    finalists = sorted(everything, key=lambda index: max(rates[index]))[-6:]
    finals: dict[int, list[float]] = {index: [] for index in finalists}
    for index in finalists * 3:
        finals[index].append(run(settings[index], whole).gigabytes_per_second)
    return settings[max(finalists, key=lambda index: statistics.median(finals[index]))]


def fio_best(name: str, nbytes: int, kind: Kind, grid: Grid) -> dict[str, Any]:
    settings = [
        {"engine": engine, "block_bytes": block, "depth": depth}
        for engine in grid.engines
        for block, depth in grid.points()
    ]
    return best_of(settings, lambda chosen, size: fio.run(name, kind, nbytes=size, **chosen), grid.nbytes, nbytes)


def ours(name: str, nbytes: int, kind: Kind, setting: Ours, buffer: memoryview) -> FioResult:
    """One pass over the file; `mixed` reads and writes its first half in turns, each from the start, as fio's does."""
    chosen = {"block_bytes": setting.block_bytes, "inflight_bytes": setting.inflight_bytes}
    step = setting.request_bytes
    slots = [buffer[start : start + step] for start in range(0, setting.buffer_bytes, step)]
    with zero_nvme.File(name, "r+", setting.backend, **chosen) as file:
        moves = {"read": [file.read], "write": [file.write], "mixed": [file.read, file.write]}[kind]
        cpu, start = time.process_time(), time.perf_counter()
        tickets: list[zero_nvme.Ticket] = []
        for index, offset in enumerate(range(0, nbytes, step)):
            if index >= len(slots):
                tickets[index - len(slots)].wait()
            part = slots[index % len(slots)][: nbytes - offset]
            place = offset if len(moves) == 1 else index // 2 * step
            tickets.append(moves[index % len(moves)](part, place))
        zero_nvme.wait_all(tickets)
        seconds, cpu = time.perf_counter() - start, time.process_time() - cpu
    return FioResult(nbytes / seconds / 1e9, cpu / (nbytes / GIB))


def ours_best(name: str, nbytes: int, kind: Kind, grid: Grid, buffer: memoryview) -> Ours:
    """Over fio's engines, blocks and depths. The stream waits for its oldest request: with both at once they are
    smaller, and at least four, so that the writes do not run dry behind a read."""
    settings = []
    for engine in grid.engines:
        for block, depth in grid.points():
            request = max(block, 4 * MIB if kind == "mixed" else 16 * MIB)
            enough = min(2 * block * depth + 4 * request, len(buffer))
            settings.append(Ours(engine, block, block * depth, request, enough // request * request))
    chosen = best_of(
        [vars(setting) for setting in settings],
        lambda setting, size: ours(name, size, kind, Ours(**setting), buffer),
        grid.nbytes,
        nbytes,
    )
    return Ours(**chosen)


def sandwich(mine: Callable[[], FioResult], peer: Callable[[], FioResult], pairs: int) -> dict[str, Any]:
    """Medians, and quartiles of the ratio: ours over the mean of the peer's runs before and after it."""
    peers, our = [peer()], []
    for _ in range(pairs):
        our.append(mine())
        peers.append(peer())
    around = [(a.gigabytes_per_second + b.gigabytes_per_second) / 2 for a, b in itertools.pairwise(peers)]
    ratios = [result.gigabytes_per_second / rate for result, rate in zip(our, around, strict=True)]
    cpu = statistics.median(result.cpu_seconds_per_gib for result in peers)
    our_cpu = statistics.median(result.cpu_seconds_per_gib for result in our)
    return {
        "pairs": pairs,
        "ours": statistics.median(result.gigabytes_per_second for result in our),
        "peer": statistics.median(result.gigabytes_per_second for result in peers),
        "ratio": statistics.median(ratios),
        "ratios": sorted(round(ratio, 3) for ratio in ratios),
        "ours_cpu_seconds_per_gib": our_cpu,
        "peer_cpu_seconds_per_gib": cpu,
        "cpu_ratio": our_cpu / cpu if cpu else float("nan"),
    }


def measure(name: str, nbytes: int, kind: Kind, pairs: int, grid: Grid) -> dict[str, Any]:
    buffer = zero_nvme.empty(min(2 * MOST_IN_FLIGHT, max(16 * MIB, nbytes)))
    buffer[:] = os.urandom(len(buffer))
    setting = ours_best(name, nbytes, kind, grid, buffer)

    def mine() -> FioResult:
        return ours(name, nbytes, kind, setting, buffer)

    def theirs(huge: bool = True) -> FioResult:
        return fio.run(name, kind, nbytes=nbytes, huge=huge, **best)

    best = fio_best(name, nbytes, kind, grid)
    report: dict[str, Any] = {"ours": vars(setting), "fio_best": best, "fio": sandwich(mine, theirs, pairs)}
    report["fio_ordinary_buffers"] = sandwich(mine, lambda: theirs(huge=False), max(1, pairs // 2))
    return report


def run(
    folder: str,
    nbytes: int,
    pairs: int,
    kinds: tuple[Kind, ...] = KINDS,
    grid: Grid | None = None,
    save: Callable[[dict[str, Any]], None] = lambda report: None,
) -> dict[str, Any]:
    """The report, which `save` is also given after each kind."""
    name = os.path.join(folder, "zero_nvme-benchmark")
    grid = grid or Grid(nbytes=min(nbytes, Grid.nbytes))
    report: dict[str, Any] = {
        "machine": platform.platform(),
        "date": time.strftime("%Y-%m-%d"),
        "bytes": nbytes,
        "fio": subprocess.check_output(["fio", "--version"], text=True).strip(),
    }
    try:
        prepare(name, nbytes)
        for kind in kinds:
            report[kind] = measure(name, nbytes, kind, pairs, grid)
            save(report)
        return report
    finally:
        if os.path.exists(name):
            os.unlink(name)


def table(report: dict[str, Any]) -> str:
    """The report's ratios as Markdown."""
    rows = [
        "| | ours, GB/s | fio | ours / fio | aim | its CPU s/GiB | ours / fio, ordinary buffers |",
        "|---|---|---|---|---|---|---|",
    ]
    for kind in KINDS:
        if kind in report:
            part, pair = report[kind], report[kind]["fio"]
            cells = [
                *(f"{pair['ours']:.2f}", f"{pair['peer']:.2f}", f"{pair['ratio']:.2f}", f"{AIMS[kind]:.2f}"),
                f"{pair['cpu_ratio']:.2f} (aim {AIM_CPU})",
                f"{part['fio_ordinary_buffers']['ratio']:.2f}",
            ]
            rows.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", default=".")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--parts", default=",".join(KINDS), help="of read, write, mixed")
    parser.add_argument("--json", help="also write the report to this file")
    options = parser.parse_args()
    kinds = tuple(kind for kind in KINDS if kind in options.parts.split(","))
    if not fio.available():
        print("fio is not installed", file=sys.stderr)
        return 1
    before = {}
    if options.json and os.path.exists(options.json):
        with open(options.json) as file:
            before = json.load(file)

    def save(report: dict[str, Any]) -> None:
        if options.json:
            with open(options.json, "w") as file:
                json.dump({**before, **report}, file, indent=2)

    nbytes = int(options.gib * GIB) // MIB * MIB
    report = {**before, **run(options.path, nbytes, options.pairs, kinds, save=save)}
    print(json.dumps(report, indent=2))
    print(table(report))
    return 0


def test_report_has_its_shape(tmp_path):
    if not fio.available():
        pytest.skip("fio is not installed")
    grid = Grid(nbytes=4 * MIB, blocks=(MIB,), depths=(2,), engines=("libaio",))
    report = run(str(tmp_path), 4 * MIB, 1, grid=grid)
    for kind in KINDS:
        part = report[kind]
        assert part["fio_best"] == {"engine": "libaio", "block_bytes": MIB, "depth": 2}
        assert part["fio"]["ratio"] > 0 and len(part["fio"]["ratios"]) == 1
        assert f"| {kind} |" in table(report)
    assert os.listdir(tmp_path) == []


if __name__ == "__main__":
    raise SystemExit(main())
