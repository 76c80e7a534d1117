"""Checkpoints of a run on a device: saved while an update is under way, loaded into any placement, the same bits after.

Fails if a state is read before its update has ended, if what is loaded is overwritten by a copy that was under way, or
if the device's random state is lost.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import zero_core
from tests.device.zero_core.runs import differing
from tests.device.zero_offload import runs

GPU = (512, 8, 64)


def run_of(device: torch.device, store: str) -> runs.Run:
    return runs.Run(device, runs.placed(device, store), runs.sized(device, GPU))


def steps(run: runs.Run, numbers: range) -> list[Tensor]:
    return [loss for number in numbers for loss in run.step(number)]


@pytest.mark.promise("device-checkpoint", "device-generator")
@pytest.mark.parametrize(
    ("store", "another"),
    [
        *((store, store) for store in ("device store", "swapping", "host", "nvme", "classic", "thirds")),
        *(("host", "classic nvme"), ("parameters in part", "nvme")),
    ],
)
def test_the_rest_of_a_run_has_the_same_bits(device, tmp_path: Path, store, another):
    with runs.discrete(device):
        whole = run_of(device, store)
        steps(whole, range(2))
        zero_core.checkpoint.save(tmp_path / "here", whole.model, whole.optimizer)
        expected = [torch.rand(8, device=device).cpu()]
        expected += [loss.cpu() for loss in steps(whole, range(2, 4))] + whole.masters()
        whole.close()
        rest = run_of(device, another)
        steps(rest, range(1))  # its update is under way when the checkpoint is read
        zero_core.checkpoint.load(tmp_path / "here", rest.model, rest.optimizer)
        found = [torch.rand(8, device=device).cpu()]
        found += [loss.cpu() for loss in steps(rest, range(2, 4))] + rest.masters()
        rest.close()
    assert not differing(found, expected)
