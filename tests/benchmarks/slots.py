"""Everything on NVMe through few or many slots: seconds a step, exposed seconds, bytes read and written.

    python tests/benchmarks/slots.py DIRECTORY --slots 8

prints one JSON line, the median of `--steps` steps. To compare two commits, run each with its own PYTHONPATH, one after
the other and in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch
from torch import nn

from zero_core import shard
from zero_nvme import Slab
from zero_offload import TieredStore
from zero_optim_cpu import CpuStep

WIDTH, UNITS = 2048, 12  # 4 Mi elements a unit: four tiles


def measure(directory: str, slots: int, steps: int, tokens: int, states: str) -> dict[str, float]:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(UNITS)]
    model = nn.Sequential(*layers).to(torch.bfloat16)
    with Slab([directory]) as slab:
        kinds = {"parameters": "nvme", "gradients": "nvme", "optimizer": states}
        store = TieredStore(**kinds, nvme=slab, step=CpuStep(), tile_numel=1 << 20, slots=slots)
        optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), units=[nn.Sequential], store=store)
        batch = torch.randn(tokens, WIDTH, dtype=torch.bfloat16)
        rows, before = [], store.stats()
        for _ in range(steps + 2):
            start = time.perf_counter()
            optimizer.zero_grad()
            model(batch).float().pow(2).mean().backward()
            optimizer.step()
            rows.append((time.perf_counter() - start, store.stats()))
        store.wait()
        store.close()
    for (seconds, after), row in zip(rows, range(len(rows)), strict=True):
        changed = {key: after[key] - before[key] for key in ("exposed_seconds", "nvme_read_bytes", "nvme_write_bytes")}
        rows[row], before = (seconds, changed), after
    kept = rows[2:]
    return {
        "slots": slots,
        "host_mib": round(before["host_bytes"] / 2**20, 1),
        "seconds": round(statistics.median(seconds for seconds, _ in kept), 4),
        **{key: round(statistics.median(row[key] for _, row in kept), 4) for key in kept[0][1]},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("directory")
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--optimizer", default="nvme")
    given = parser.parse_args()
    print(json.dumps(measure(given.directory, given.slots, given.steps, given.tokens, given.optimizer)))
