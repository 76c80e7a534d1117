"""Every placement beside the dense reference on the same device: norms and updates to a stated distance."""

import pytest
import torch

from tests.device.zero_core import runs as core
from tests.device.zero_core.test_parity import TOLERANCE
from tests.device.zero_offload import runs


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("placement", [*runs.BELOW, *runs.MIXED])
def test_near_the_reference(device, placement, stage, dtype, micro):
    """SGD with momentum, whose updates are as far apart as the gradients; fp32 gradients."""
    with runs.discrete(device):
        store = runs.tiered((runs.BELOW | runs.MIXED)[placement])
        norm, update = core.distance(core.checkpointed, device, micro, dtype, stage=stage, store=store)
    assert norm <= TOLERANCE[dtype][0] and update <= TOLERANCE[dtype][1], (norm, update)
