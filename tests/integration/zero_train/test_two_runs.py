"""Two runs on one NVMe path do not meet: side by side, each has the numbers it has alone."""

import pytest
import torch
from torch import nn

import zero_core
import zero_nvme
from tests import kit
from tests.integration.zero_offload.training import Model
from zero_offload import TieredStore


class Run:
    """A model whose parameters, gradients and states are all in a slab of its own in `folder`."""

    def __init__(self, seed, folder):
        torch.manual_seed(seed)
        self.model = Model(64, 2)
        self.generator = torch.Generator().manual_seed(seed)
        self.slab = zero_nvme.Slab([str(folder)])
        self.optimizer = zero_core.shard(
            self.model,
            torch.optim.AdamW(self.model.parameters(), lr=1e-2),
            param_dtype=torch.bfloat16,
            store=TieredStore("nvme", "nvme", "nvme", nvme=self.slab, tile_numel=1 << 20),
        )

    def step(self):
        tokens = torch.randint(0, 50, (2, 12), generator=self.generator)
        loss = nn.functional.cross_entropy(self.model(tokens).float().flatten(0, 1), tokens.flatten())
        return kit.step(self.optimizer, loss).item()

    def close(self):
        values = kit.values(self.model, master=True)
        self.optimizer.close()
        self.slab.close()
        return values


def together(seeds, folder):
    """The losses of three steps in turn, and the parameters they end at, by run."""
    runs = [Run(seed, folder) for seed in seeds]
    losses = [[run.step() for run in runs] for _ in range(3)]
    return [([step[k] for step in losses], run.close()) for k, run in enumerate(runs)]


@pytest.mark.promise("two-runs-one-path")
def test_two_runs_on_one_path_do_not_meet(tmp_path):
    side_by_side = together((0, 1), tmp_path)
    assert not list(tmp_path.iterdir()), "a slab has no name: there is nothing that another run could delete or find"
    for seed, (losses, values) in zip((0, 1), side_by_side, strict=True):
        ((expected, alone),) = together((seed,), tmp_path)
        assert losses == expected
        assert all(torch.equal(a, b) for a, b in zip(values, alone, strict=True))
