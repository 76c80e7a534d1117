"""Host memory while a model goes from the tiers of one stage to those of the next, and for how long.

    python -m tests.benchmarks.second_stage [--width 1024 --blocks 24] [--folder DISK]

Each row is a process of its own: a stack of linears in deferred_init, AdamW in fp32, one step, then `shard` again with
a new AdamW. `peak` is VmHWM during that call, `before` and `after` the resident memory around it, all less what the
libraries take; `plans` is the larger of the two arenas, and `unit` what the largest unit takes there on the host, 16
bytes a parameter. `beyond` is what `peak` has beyond the larger of `before` and `plans`. The update step is
zero-optim-cpu's.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from typing import Any

import torch
from torch import nn

import zero_core
from zero_nvme import Slab
from zero_offload import TieredStore
from zero_optim_cpu import CpuStep

ROWS = [("host", "host"), ("host", "nvme"), ("nvme", "host"), ("nvme", "nvme")]
MB = 1e6


def resident(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Stack(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def run(before: str, after: str, width: int, blocks: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(2)
    with zero_core.deferred_init(seed=0):
        model = Stack(width, blocks)
    slabs = [Slab([folder]) for _ in range(2)]
    stores = [
        TieredStore(place, place, place, nvme=slab, step=CpuStep(), slots=3 if place == "nvme" else None)
        for place, slab in zip((before, after), slabs, strict=True)
    ]
    base = resident("VmRSS")
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=stores[0], prefetch_bytes=0)
    model(torch.ones(2, width)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    stores[0].wait()
    units = [unit.layout.numel for unit in zero_core.units(model)]
    at = resident("VmRSS")
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    begun = time.monotonic()
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=stores[1], prefetch_bytes=0)
    seconds = time.monotonic() - begun
    peak, end = resident("VmHWM"), resident("VmRSS")
    plans = max(store.describe().arena_bytes for store in stores)
    optimizer.close()
    for slab in slabs:
        slab.close()
    return {
        "from": before, "to": after, "parameters_m": round(sum(units) / 1e6), "seconds": round(seconds, 1),
        **{f"{name}_mb": round(nbytes / MB) for name, nbytes in (
            ("before", at - base), ("peak", peak - base), ("after", end - base), ("plans", plans),
            ("unit", 16 * max(units)), ("beyond", peak - base - max(at - base, plans)),
        )},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--blocks", type=int, default=24)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--row", nargs=2)
    given = parser.parse_args()
    if given.row is not None:
        print(json.dumps(run(*given.row, given.width, given.blocks, given.folder)))
        return
    for row in ROWS:
        sizes = ["--width", str(given.width), "--blocks", str(given.blocks), "--folder", given.folder]
        command = [sys.executable, "-m", "tests.benchmarks.second_stage", "--row", *row, *sizes]
        print(subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip(), flush=True)


if __name__ == "__main__":
    main()
