"""zero_nvme against fio, in turn on the same written, incompressible file: ratios, never figures of different minutes.

    python -m tests.benchmarks.test_nvme PATH [--gib 1] [--pairs 7] [--json FILE]

fio's best of block size, depth and engine is found once, with huge-page buffers; then fio, ours, fio, ours, … A ratio
is ours over the mean of the two fio runs around it. Needs fio. Under pytest only a small run, for its shape.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from dataclasses import dataclass

import pytest

import zero_nvme
from zero_nvme import fio

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
BLOCKS = [256 * KIB, MIB, 4 * MIB, 16 * MIB]
DEPTHS = [2, 4, 8, 16, 32, 64]
ENGINES = ["io_uring", "libaio"]
MOST_IN_FLIGHT = 256 * MIB  # of the sweep: beyond it fio only locks memory


@dataclass(frozen=True)
class Best:
    engine: str
    block_bytes: int
    depth: int


def prepare(name: str, nbytes: int) -> None:
    with open(name, "wb") as file:
        for _ in range(0, nbytes, MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())


def sweep(name: str, nbytes: int, *, write: bool, blocks=BLOCKS, depths=DEPTHS, engines=ENGINES) -> Best:
    results = {}
    for engine in engines:
        for block in blocks:
            for depth in depths:
                if block * depth <= MOST_IN_FLIGHT and block <= nbytes:
                    peer = fio.run(name, write=write, nbytes=nbytes, block_bytes=block, depth=depth, engine=engine)
                    results[Best(engine, block, depth)] = peer.gigabytes_per_second
    return max(results, key=results.__getitem__)


def ours(name: str, nbytes: int, buffer: memoryview, *, write: bool) -> fio.FioResult:
    """One pass over the file with the defaults, which are what a user gets."""
    with zero_nvme.File(name, "r+") as file:
        cpu, start = time.process_time(), time.perf_counter()
        move = file.write if write else file.read
        step = len(buffer)
        zero_nvme.wait_all([move(buffer[: min(step, nbytes - offset)], offset) for offset in range(0, nbytes, step)])
        seconds = time.perf_counter() - start
        cpu = time.process_time() - cpu
    return fio.FioResult(nbytes / seconds / 1e9, cpu / (nbytes / GIB))


def sandwich(name: str, nbytes: int, pairs: int, best: Best, *, write: bool) -> dict[str, float]:
    buffer = zero_nvme.empty(min(nbytes, 64 * MIB))
    buffer[:] = os.urandom(len(buffer))

    def peer(huge: bool = True) -> fio.FioResult:
        return fio.run(
            name,
            write=write,
            nbytes=nbytes,
            block_bytes=best.block_bytes,
            depth=best.depth,
            engine=best.engine,
            huge=huge,
        )

    peers, mine = [peer()], []
    for _ in range(pairs):
        mine.append(ours(name, nbytes, buffer, write=write))
        peers.append(peer())
    around = [(a.gigabytes_per_second + b.gigabytes_per_second) / 2 for a, b in zip(peers[:-1], peers[1:], strict=True)]
    cpu = statistics.median(result.cpu_seconds_per_gib for result in peers)
    return {
        "ours": statistics.median(result.gigabytes_per_second for result in mine),
        "fio": statistics.median(result.gigabytes_per_second for result in peers),
        "fio_ordinary_buffers": peer(huge=False).gigabytes_per_second,
        "ratio": statistics.median(
            result.gigabytes_per_second / fio_rate for result, fio_rate in zip(mine, around, strict=True)
        ),
        "cpu_ratio": statistics.median(result.cpu_seconds_per_gib for result in mine) / cpu if cpu else float("nan"),
    }


def run(folder: str, nbytes: int, pairs: int, *, blocks=BLOCKS, depths=DEPTHS, engines=ENGINES) -> dict[str, object]:
    name = os.path.join(folder, "zero_nvme-benchmark")
    try:
        prepare(name, nbytes)
        report: dict[str, object] = {"machine": platform.platform(), "date": time.strftime("%Y-%m-%d"), "bytes": nbytes}
        for write in (False, True):
            best = sweep(name, nbytes, write=write, blocks=blocks, depths=depths, engines=engines)
            row = sandwich(name, nbytes, pairs, best, write=write)
            report["write" if write else "read"] = {**row, "fio_best": vars(best)}
        return report
    finally:
        if os.path.exists(name):
            os.unlink(name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", default=".")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", help="also write the report to this file")
    options = parser.parse_args()
    if not fio.available():
        print("fio is not installed", file=sys.stderr)
        return 1
    report = run(options.path, int(options.gib * GIB) // MIB * MIB, options.pairs)
    text = json.dumps(report, indent=2)
    print(text)
    if options.json:
        with open(options.json, "w") as file:
            file.write(text)
    return 0


def test_report_has_its_shape(tmp_path):
    if not fio.available():
        pytest.skip("fio is not installed")
    report = run(str(tmp_path), 4 * MIB, 1, blocks=[MIB], depths=[2], engines=["libaio"])
    for direction in ("read", "write"):
        row = report[direction]
        assert row["ratio"] > 0 and row["fio_best"] == {"engine": "libaio", "block_bytes": MIB, "depth": 2}
    assert os.listdir(tmp_path) == []


if __name__ == "__main__":
    raise SystemExit(main())
