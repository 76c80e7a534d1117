"""Forward passes of a model without an optimizer, its parameters on NVMe: bytes read a second, next to fio's.

    python -m tests.benchmarks.forward_rate DIRECTORY --pairs 5

A stack of linear layers in bf16, one token, so that a pass is little else than reading. fio reads one file of the same
size in 16 MiB blocks, two in flight, O_DIRECT, before and after each block of passes. What is printed is one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from pathlib import Path

import torch
from torch import nn

import zero_core
from zero_nvme import Slab
from zero_offload import TieredStore


class Stack(nn.Module):
    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        made = (nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers))
        self.layers = nn.ModuleList(made)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def fio(path: Path, nbytes: int) -> float:
    """Bytes a second."""
    command = [
        *("fio", "--name=read", f"--filename={path}", f"--size={nbytes}", "--rw=read", "--bs=16m", "--iodepth=2"),
        *("--ioengine=libaio", "--direct=1", "--output-format=json"),
    ]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return float(answer["jobs"][0]["read"]["bw_bytes"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="on the drive that is measured")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--width", type=int, default=4096, help="of a layer, which has width x width elements")
    parser.add_argument("--prefetch", type=int, default=96 << 20, help="prefetch_bytes")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--passes", type=int, default=3)
    given = parser.parse_args()
    given.directory.mkdir(parents=True, exist_ok=True)
    with zero_core.deferred_init():
        model = Stack(given.layers, given.width)
    store = TieredStore("nvme", "nvme", "nvme", nvme=Slab([given.directory]))
    handle = zero_core.shard(model, store=store, prefetch_bytes=given.prefetch)
    nbytes = given.layers * given.width**2 * 2
    x = torch.randn(1, given.width, dtype=torch.bfloat16)

    def forward() -> float:
        before, begin = store.stats()["nvme_read_bytes"], time.perf_counter()
        with torch.no_grad():
            for _ in range(given.passes):
                model(x)
        return (store.stats()["nvme_read_bytes"] - before) / (time.perf_counter() - begin)

    path = given.directory / "fio"
    filled = ["dd", "if=/dev/urandom", f"of={path}", "bs=16M", f"count={nbytes >> 24}"]
    subprocess.run(filled, check=True, capture_output=True)
    forward()
    rates, ratios = [], []
    for _ in range(given.pairs):
        first, rate, last = fio(path, nbytes), forward(), fio(path, nbytes)
        rates.append(rate)
        ratios.append(rate / ((first + last) / 2))
    path.unlink()
    plan = store.describe()
    found = {"gbps": statistics.median(rates) / 1e9, "to_fio": statistics.median(ratios), "ratios": ratios}
    print(json.dumps(found | {"held": {" ".join(key): nbytes for key, nbytes in plan.held.items()}}))
    handle.close()


if __name__ == "__main__":
    main()
