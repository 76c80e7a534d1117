"""Every stage on one device beside the dense twin on the same one: precision, checkpointing, accumulation.

Fails if a gradient is lost or counted twice, if memory that was freed is computed with, or a master is rounded another
way. The twin runs the same kernels on other addresses, so little is left between them.
"""

import pytest
import torch

from tests.device.zero_core import runs

# Norms and updates, relative. bf16: a kernel chosen by its operand's address may round a gradient the other way, 2^-9.
TOLERANCE = {torch.float32: (1e-5, 1e-4), torch.bfloat16: (1e-2, 2e-2)}


@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("make", [runs.plain, runs.checkpointed, runs.reentrant])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_training_equals_the_twin(device, stage, dtype, make, micro):
    norm, update = runs.distance(make, device, micro, dtype, stage=stage)
    assert norm <= TOLERANCE[dtype][0] and update <= TOLERANCE[dtype][1]
