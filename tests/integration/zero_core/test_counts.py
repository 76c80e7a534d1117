"""What 512 ranks send and hold, counted with a fake process group: the figures of the residency table, exactly."""

from __future__ import annotations

import subprocess
import sys

import pytest

COUNT = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import zero_core
from zero_core.collectives import Ranks
from tests.integration.zero_core import toys

Ranks.sum_everywhere = lambda self, values, what: values.mul_(self.size)  # the fake group adds nothing up
stage = int(sys.argv[1])
dist.init_process_group("fake", rank=7, world_size=512, store=FakeStore())
model = toys.Stack(6)
optimizer = zero_core.shard(model, toys.adamw(model.parameters()), stage=stage)
ranks, units = zero_core.handle(model).ranks, zero_core.units(model)
psi = sum(unit.layout.numel for unit in units)
for step in range(3):
    ranks.sent_numel.clear()
    toys.loss_of(model, toys.data(0, 0)).backward()
    optimizer.step()
    sent = sum(ranks.sent_numel.values())
    expected = sum({0: 2, 1: 2, 2: 2, 3: 3}[stage] * unit.layout.numel * 511 // 512 for unit in units)
    assert sent == expected, (step, sent, expected, dict(ranks.sent_numel))
held = sum(unit.layout.shard_numel for unit in units)
assert held == psi // (1 if stage == 0 else 512)
exact = sum(p.numel() for p in model.parameters())
slots = sum(len(unit.layout.slots) for unit in units)
assert exact <= psi <= exact + 32 * slots + 512 * 32 * len(units)
dist.destroy_process_group()
print("counted")
"""


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_elements_sent_by_one_of_512_ranks(stage):
    done = subprocess.run([sys.executable, "-c", COUNT, str(stage)], capture_output=True, text=True, timeout=200)
    assert done.stdout.strip() == "counted", done.stderr[-3000:]
