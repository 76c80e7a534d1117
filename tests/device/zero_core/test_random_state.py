"""Checkpoints on a device carry its generator's state, under a key that says whose; older ones said "cuda" only."""

from pathlib import Path

import pytest
import torch

import zero_core
from zero_core import checkpoint


@pytest.mark.promise("device-generator")
def test_a_resumed_run_draws_the_numbers_that_the_first_one_did(device: torch.device, tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)).to(device)
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()))
    checkpoint.save(tmp_path / "saved", model, optimizer)
    drawn = torch.rand(4, device=device).cpu()
    torch.rand(7, device=device)
    checkpoint.load(tmp_path / "saved", model, optimizer)
    assert torch.equal(torch.rand(4, device=device).cpu(), drawn)
    optimizer.close()


def test_the_state_of_another_type_of_device_is_left_alone(device: torch.device, needs_device) -> None:
    needs_device("a random state beside the CPU's")
    state = checkpoint.random_state_of(device)
    state["device"] = ("another", torch.zeros(16, dtype=torch.uint8))
    before = torch.get_device_module(device).get_rng_state(device)
    checkpoint.restore_random_state(state, device)
    assert torch.equal(torch.get_device_module(device).get_rng_state(device), before)
