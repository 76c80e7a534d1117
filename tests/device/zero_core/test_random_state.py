"""Checkpoints on a device carry its generator's state, under a key that says whose; older ones said "cuda" only."""

import torch

from zero_core import checkpoint


def test_the_state_of_another_type_of_device_is_left_alone(device: torch.device, needs_device) -> None:
    needs_device("a random state beside the CPU's")
    state = checkpoint.random_state_of(device)
    state["device"] = ("another", torch.zeros(16, dtype=torch.uint8))
    before = torch.get_device_module(device).get_rng_state(device)
    checkpoint.restore_random_state(state, device)
    assert torch.equal(torch.get_device_module(device).get_rng_state(device), before)
