"""Names the modules that run from a hook to the disk, and from a gradient to the disk: `python scripts/path.py`.

Trains a small model, everything on nvme, with the packages that are installed, and notes on every thread the modules of
ours whose code runs in the fourth forward, when nothing is left to update ("from hook to disk"), and from its backward
until the update is stored ("from gradient to disk"), with the lines of the functions that run. C++ is not seen.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType

import torch
from torch import nn

from zero_core import shard
from zero_nvme import Slab
from zero_offload import TieredStore
from zero_optim_cpu import CpuStep


class Path:
    """The modules whose functions are called inside a block, on any thread. Threads are profiled from their start."""

    def __init__(self) -> None:
        self.found: set[CodeType] | None = None
        threading.setprofile(self)
        sys.setprofile(self)

    @contextmanager
    def noted(self) -> Iterator[set[CodeType]]:
        self.found = found = set()
        yield found
        self.found = None

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if self.found is not None and event == "call" and "/zero_" in frame.f_code.co_filename:
            self.found.add(frame.f_code)


def main() -> None:
    path = Path()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.ReLU()) for _ in range(4)))
    optimizer = torch.optim.AdamW(model.parameters())
    with tempfile.TemporaryDirectory(dir=".") as folder, Slab([folder]) as slab:
        placed = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
        store = TieredStore(**placed, nvme=slab, step=CpuStep(threads=1), tile_numel=1 << 20, slots=3)
        sharded = shard(model, optimizer, store=store, max_grad_norm=1.0, prefetch_bytes=0)
        for _ in range(4):
            store.wait()
            with path.noted() as forward:
                loss = model(torch.randn(8, 1024)).square().mean()
            with path.noted() as backward:
                loss.backward()
                sharded.step()
                sharded.zero_grad()
                store.wait()
        sharded.close()
    for what, found in (("from hook to disk", forward), ("from gradient to disk", backward)):
        modules: dict[str, set[int]] = {}
        for code in found:
            name = "zero_" + code.co_filename.rpartition("/zero_")[2]
            modules.setdefault(name, set()).update(line for *_, line in code.co_lines() if line)
        print(f"{what}: {len(modules)} modules, {sum(map(len, modules.values())):,} lines of the functions that run")
        for name, lines in sorted(modules.items()):
            print(f"{len(lines):6} {name}")


if __name__ == "__main__":
    main()
