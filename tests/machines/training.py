"""A run without an end: a small sharded model on gloo, which prints each step. What faults are brought into.

python -m tests.machines.training STAGE TIMEOUT [STEPS]        TIMEOUT: the process group's, in seconds
"""

import itertools
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

from tests import kit

WIDTH, ROWS = 32, 8


def losses(stage: int, steps: int | None):
    """The number of each step and the loss of this rank's rows; `steps` None: for ever.

    No collective is called here but zero-core's: what torch's own raise is torch's own error.
    """
    model, optimizer = kit.sharded(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))), stage=stage)
    rank, size = kit.world()
    for number in itertools.count() if steps is None else range(steps):
        rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))
        yield number, kit.step(optimizer, model(rows[rank::size]).square().mean()).item()


def main() -> None:
    stage, seconds, *steps = map(int, sys.argv[1:])
    dist.init_process_group("gloo", timeout=timedelta(seconds=seconds))
    for number, loss in losses(stage, steps[0] if steps else None):
        print(f"step {number}: {loss:.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
