"""What 512 ranks send and hold, counted with a fake process group: the figures of the residency table, exactly."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: a process group is process-wide, and this one computes nothing.
COUNT = """
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
import zero_core
from zero_core.collectives import Ranks
from tests.integration.zero_core import toys

Ranks.sum_everywhere = lambda self, values, what: values.mul_(self.size)  # the fake group adds nothing up


def moved(stage, **options):
    model = toys.Stack(6)
    optimizer = zero_core.shard(model, toys.adamw(model.parameters()), stage=stage, **options)
    ranks, units = zero_core.handle(model).ranks, zero_core.units(model)
    counts = []
    for step in range(3):
        ranks.sent_numel.clear()
        toys.loss_of(model, toys.data(0, 0)).backward()
        optimizer.step()
        counts.append(dict(ranks.sent_numel))
    assert counts[0] == counts[1] == counts[2], counts
    psi = sum(unit.layout.numel for unit in units)
    held = sum(unit.layout.shard_numel for unit in units)
    assert held == psi // (1 if stage == 0 else 512)
    slots = sum(len(unit.layout.slots) for unit in units)
    exact = sum(p.numel() for p in model.parameters())
    assert exact <= psi <= exact + 32 * slots + 512 * 32 * len(units)
    return counts[0], [unit.layout.numel * 511 // 512 for unit in units]


dist.init_process_group("fake", rank=7, world_size=512, store=FakeStore())
for stage, times in {0: 2, 1: 2, 2: 2, 3: 3}.items():
    found, shares = moved(stage)
    if stage:
        assert sum(found.values()) == times * sum(shares), (stage, found, shares)
        assert found["reduce_scatter"] == sum(shares)
    else:
        assert set(found) == {"all_reduce"} and abs(found["all_reduce"] - 2 * sum(shares)) <= len(shares)
found, shares = moved(3, resident_bytes=1 << 30)
assert found["all_gather"] == sum(shares), "what stays resident is gathered once a step"
dist.destroy_process_group()
print("counted")
"""


def test_elements_sent_and_held_by_one_of_512_ranks():
    done = subprocess.run([sys.executable, "-c", COUNT], capture_output=True, text=True, timeout=250)
    assert done.stdout.strip() == "counted", done.stderr[-3000:]
