"""A model on a device goes from the tiers of one stage to those of the next, and becomes a plain one there.

Fails if memory is freed under a copy or a kernel, or if a value is read before the copy that brings it.
"""

import pytest
import torch

import zero_core
from tests import kit
from tests.device.zero_core.runs import differing, loss_of
from tests.device.zero_offload import runs

GPU = (512, 8, 64)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("device store", "host"),
        ("device", "nvme"),
        ("classic", "device"),
        ("thirds", "thirds"),
        ("nvme", "device store"),
    ],
)
def test_every_bit_goes_over_and_trains_on(device, before, after):
    with runs.discrete(device):
        size = runs.sized(device, GPU, (64, 4, 64))
        run = runs.Run(device, runs.placed(device, before), size)
        run.step(), run.step(1)
        masters = run.masters()
        placement = runs.placed(device, after)
        store = runs.tiered(placement) if isinstance(placement, str | dict) else placement
        options = {"store": store, "param_dtype": torch.bfloat16}
        second = zero_core.shard(run.model, torch.optim.AdamW(run.model.parameters(), lr=1e-3), **options)
        assert not differing(run.masters(), masters)
        kit.step(second, loss_of(run.model, run.batches[2]))
        assert differing(run.masters(), masters)
        values = [parameter.detach().cpu() for parameter in run.model.parameters()]
        zero_core.unshard(run.model)
        assert all(parameter.device == device for parameter in run.model.parameters())
        assert not differing([parameter.detach().cpu() for parameter in run.model.parameters()], values)
        run.close()
