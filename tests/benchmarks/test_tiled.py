"""Setting up one tiled linear layer that is deferred, everything on nvme: time and peak memory by the number of tiles.

    python -m tests.benchmarks.test_tiled [--features 12288] [--tiles 1 16 64] [--rounds 3] [--json FILE]

Each setup runs in its own process: the layer is built under deferred_init, tiled and sharded into a TieredStore. Claim:
cutting the layer costs no time, and frees memory. The peak is VmHWM less what the process had after its imports.
Needs the packages installed or on PYTHONPATH, and 12 bytes of disk an element.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest


def worker(features: int, tiles: int, folder: str) -> dict[str, float]:
    """One setup, in this process."""
    import torch

    import zero_core
    import zero_nvme
    import zero_offload
    import zero_optim_cpu
    from zero_train.report.metrics import peak_rss_bytes

    before, begin = peak_rss_bytes(), (time.perf_counter(), time.process_time())
    with zero_nvme.Slab([folder]) as slab:
        with zero_core.deferred_init(seed=0):
            model = torch.nn.Sequential(torch.nn.Linear(features, features))
            if tiles > 1:
                zero_core.tile_linear(model, features * features // tiles)
        optimizer = torch.optim.AdamW(model.parameters())
        store = zero_offload.TieredStore("nvme", "nvme", "nvme", slab, zero_optim_cpu.CpuStep(), slots=3)
        sharded = zero_core.shard(model, optimizer, store=store, prefetch_bytes=0)
        seconds, cpu = time.perf_counter() - begin[0], time.process_time() - begin[1]
        arena = store.describe().arena_bytes
        sharded.close()
    return {"seconds": seconds, "cpu_seconds": cpu, "peak_bytes": peak_rss_bytes() - before, "arena_bytes": arena}


def measure(features: int, tiles: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """Medians of alternating rounds, by the number of tiles."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    found: dict[int, list[dict[str, float]]] = {n: [] for n in tiles}
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for _ in range(rounds):
            for n in tiles:
                command = [sys.executable, __file__, "--worker", str(features), str(n), folder]
                done = subprocess.run(command, check=True, env=environment, stdout=subprocess.PIPE)
                found[n].append(json.loads(done.stdout))
    return {str(n): {key: statistics.median(run[key] for run in runs) for key in runs[0]} for n, runs in found.items()}


def test_tiles_cost_no_setup(benchmark):
    if benchmark.disabled:
        pytest.skip("a benchmark of minutes, 2 GB of disk: nox -s bench -- tiled")
    measured = benchmark.pedantic(lambda: measure(12288, [1, 64], 1), rounds=1)
    assert measured["64"]["cpu_seconds"] <= 1.5 * measured["1"]["cpu_seconds"]
    assert measured["64"]["peak_bytes"] < measured["1"]["peak_bytes"]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--features", type=int, default=12288)
    parser.add_argument("--tiles", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        features, tiles, folder = arguments.worker
        print(json.dumps(worker(int(features), int(tiles), folder)))
        return
    text = json.dumps(measure(arguments.features, arguments.tiles, arguments.rounds), indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
