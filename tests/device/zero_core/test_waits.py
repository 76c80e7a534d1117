"""The host waits for the device once a step, for the norm. torch itself raises at any other synchronisation."""

import pytest
import torch

import zero_core
from tests import kit
from tests.device.zero_core import runs
from tests.integration.zero_core import toys

BF16 = {"param_dtype": torch.bfloat16}


@pytest.mark.promise("device-norm-wait")
@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("make", [runs.plain, runs.checkpointed, runs.reentrant])
@pytest.mark.parametrize("build", [toys.sgd, runs.fused, torch.optim.AdamW])
@pytest.mark.parametrize(
    "options",
    [
        {"stage": 0},
        {"stage": 3, "max_grad_norm": 0.5},
        {"stage": 3, "max_grad_norm": 0.5, **BF16},
        {"stage": 2, "loss_scale": 8.0, **BF16},
        {"stage": 3, "update_in_backward": True, **BF16},
    ],
    ids=str,
)
def test_nothing_but_the_norm_waits(device, needs_device, options, build, make, swaps):
    observer = runs.NormMayWait(device)
    model = make().to(device)
    store = runs.swapping(device) if swaps else None
    optimizer = zero_core.shard(model, build(model.parameters()), store=store, observer=observer, **options)
    dtype = options.get("param_dtype", torch.float32)
    batches = [runs.batch(step, 0, device, dtype) for step in range(4)]
    try:
        for x in batches[:2]:  # states are made, memory is found
            kit.step(optimizer, runs.loss_of(model, x))
        with observer.refusing():
            for x in batches[2:]:
                kit.step(optimizer, runs.loss_of(model, x))
    finally:
        optimizer.close()
    assert observer.norms == 4
    needs_device("a synchronisation that raises")
