"""Bytes planned and used on two ranks over stages and accumulation: `python -m tests.benchmarks.plan_bytes`.

A measurement, no test: `tests/integration/zero_offload/test_plan_holds.py` holds the plan to a small model's bytes.
"""

from __future__ import annotations

import itertools

import torch
from torch import nn

from tests.integration.zero_offload.test_plan_holds import STEPS, planned_and_used
from zero_core.testing import RankPool

WIDTH, LAYERS = 1024, 16


class Blocks(nn.Module):
    """16.8 M parameters in units of one size: 4.2 MB in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.float().square().mean()


def main() -> None:
    ranks = RankPool(2)
    rows = itertools.product(("host", "none"), (torch.float32, torch.bfloat16), range(4), STEPS)
    print("offload, parameters, stage, micro-batches: planned MB, used MB")
    for placement, dtype, stage, steps in rows:
        case = stage, steps, placement, dtype, 2, Blocks, WIDTH, (4 << 20, 0), 1 << 20
        planned, used = ranks.run(planned_and_used, *case)[0]
        print(f"{placement}, {dtype}, {stage}, {steps}: {planned / 1e6:.1f}, {used / 1e6:.1f}")
    ranks.close()


if __name__ == "__main__":
    main()
