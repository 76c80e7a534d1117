"""zero_nvme against fio, in turns on incompressible files that are already written: ratios only.

    python -m tests.benchmarks.test_nvme PATH [--gib 1] [--pairs 7] [--json FILE]

For each kind of pass a sweep over engine, block size and depth, and a final of its best six over the whole file, find
fio's best configuration once, with huge-page buffers; the same sweep finds ours. Then fio, ours, fio, ours, … in which
a ratio is ours over the mean of the two runs around it; their median is reported. fio with ordinary buffers runs
beside. Needs fio. Under pytest: a small run.
"""

import argparse
import itertools
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache, partial
from typing import Any

import pytest

from tests.benchmarks import fio
from tests.benchmarks.fio import FioResult
from tests.tables import markdown
from zero_nvme.io.io_queue import Options
from zero_nvme.tools import measure
from zero_nvme.tools.measure import KINDS, MIB, Kind

GIB = 1 << 30
AIMS = {"read": 1.0, "write": 1.0, "mixed": 0.97}  # ours over fio's bytes per second, at least
AIM_CPU = 1.2  # ours over fio's CPU seconds per GiB, at most
MOST_IN_FLIGHT = 256 * MIB  # of the sweeps: beyond it a peer only locks memory
FEW = 128 * MIB  # what each configuration of a sweep moves, twice
GRID = {
    "engine": ("io_uring", "libaio"),
    "block_bytes": (MIB // 4, MIB, 4 * MIB, 16 * MIB),
    "depth": (2, 4, 8, 16, 32, 64),
}
Side = Callable[..., FioResult]  # of kind, nbytes, engine, block_bytes and depth


def ours(beds: Any, kind: Kind, *, nbytes: int, engine: str, block_bytes: int, depth: int) -> FioResult:
    """One pass over a file of this size; `mixed` reads one half of it while it writes the other."""
    bed = beds(engine, nbytes)
    seconds, cpu = bed.seconds(kind, block_bytes=block_bytes, inflight_bytes=block_bytes * depth)
    return FioResult(bed.gigabytes_per_second(seconds), cpu / (nbytes / GIB))


def best_of(run: Side, kind: Kind, nbytes: int) -> dict[str, Any]:
    """The fastest setting. All of them move the few bytes, twice; the best six the whole, three times, and there the
    median decides: a single fast pass is the disk's luck, and the first after a pause more often than not."""
    settings = [dict(zip(GRID, each, strict=True)) for each in itertools.product(*GRID.values())]
    settings = [each for each in settings if each["block_bytes"] * each["depth"] <= MOST_IN_FLIGHT]

    def rates(chosen: list[dict[str, Any]], size: int, times: int) -> list[list[float]]:
        passes = [[run(kind, nbytes=size, **each).gigabytes_per_second for each in chosen] for _ in range(times)]
        return list(map(list, zip(*passes, strict=True)))

    few = rates(settings, min(FEW, nbytes), 2)
    finalists = [settings[k] for k in sorted(range(len(settings)), key=lambda k: max(few[k]))[-6:]]
    whole = rates(finalists, nbytes, 3)
    return finalists[max(range(len(finalists)), key=lambda k: statistics.median(whole[k]))]


def sandwich(mine: Callable[[], FioResult], peer: Callable[[], FioResult], pairs: int) -> dict[str, Any]:
    """Medians, and the ratios: ours over the mean of the peer's runs before and after it."""
    peers, our = [peer()], []
    for _ in range(pairs):
        our.append(mine())
        peers.append(peer())
    around = [(a.gigabytes_per_second + b.gigabytes_per_second) / 2 for a, b in itertools.pairwise(peers)]
    ratios = [result.gigabytes_per_second / rate for result, rate in zip(our, around, strict=True)]
    found: dict[str, Any] = {"ratio": statistics.median(ratios), "ratios": sorted(round(each, 3) for each in ratios)}
    for name, results in (("ours", our), ("peer", peers)):
        found[name] = statistics.median(each.gigabytes_per_second for each in results)
        found[f"{name}_cpu_seconds_per_gib"] = statistics.median(each.cpu_seconds_per_gib for each in results)
    return found


def measured(folder: str, nbytes: int, pairs: int, kind: Kind) -> dict[str, Any]:
    with tempfile.NamedTemporaryFile(dir=folder, buffering=0) as file, ExitStack() as stack:
        beds = cache(lambda engine, size: stack.enter_context(measure.Testbed(folder, size, Options(backend=engine))))
        for _ in range(0, nbytes, MIB):
            file.write(os.urandom(MIB))
        os.fsync(file.fileno())
        sides: dict[str, Side] = {"ours": partial(ours, beds), "fio": partial(fio.run, file.name)}
        best = {name: best_of(side, kind, nbytes) for name, side in sides.items()}
        mine, theirs = (partial(side, kind, nbytes=nbytes, **best[name]) for name, side in sides.items())
        ordinary = sandwich(mine, partial(theirs, huge=False), max(1, pairs // 2))
        return {"best": best, "fio": sandwich(mine, theirs, pairs), "fio_ordinary_buffers": ordinary}


def table(report: dict[str, Any]) -> str:
    rows = []
    for kind, part in report.items():
        pair = part["fio"]
        cpu = pair["ours_cpu_seconds_per_gib"] / (pair["peer_cpu_seconds_per_gib"] or math.nan)
        figures = (pair["ours"], pair["peer"], pair["ratio"], AIMS[kind], cpu, part["fio_ordinary_buffers"]["ratio"])
        rows.append([kind, *(f"{each:.2f}" for each in figures)])
    head = ("", "ours, GB/s", "fio", "ours / fio", "aim", f"its CPU s/GiB (aim {AIM_CPU})")
    return markdown((*head, "ours / fio, ordinary buffers"), rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="?", default=".")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--json", help="also write the report to this file, after each kind")
    options = parser.parse_args()
    if not fio.available():
        print("fio is not installed", file=sys.stderr)
        return 1
    report = {}
    for kind in KINDS:
        report[kind] = measured(options.path, int(options.gib * GIB) // MIB * MIB, options.pairs, kind)
        if options.json:
            with open(options.json, "w") as file:
                json.dump(report, file, indent=2)
    print(json.dumps(report, indent=2), table(report), sep="\n")
    return 0


def test_report_has_its_shape(tmp_path, monkeypatch):
    if not fio.available():
        pytest.skip("fio is not installed")
    monkeypatch.setitem(GRID, "block_bytes", (MIB,))
    monkeypatch.setitem(GRID, "depth", (2,))
    report = {kind: measured(str(tmp_path), 4 * MIB, 1, kind) for kind in KINDS}
    for kind, part in report.items():
        assert set(part["best"]["fio"]) == set(GRID) and part["fio"]["ratio"] > 0
        assert f"| {kind} |" in table(report)
    assert os.listdir(tmp_path) == []


if __name__ == "__main__":
    raise SystemExit(main())
