"""Device memory, and host memory that copies may use: what is given out when."""

import math

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim")


def test_new_memory_is_poisoned_and_given_out_again_at_once():
    assert all(math.isnan(v) for v in torch.empty(100, device="sim").tolist())
    x = torch.ones(100, device="sim")
    address = x.data_ptr()
    del x
    y = torch.empty(100, device="sim")
    assert y.data_ptr() == address and all(math.isnan(v) for v in y.tolist())


def test_pinned_memory_is_given_out_again_after_its_copies():
    x = torch.ones(5000, device="sim")
    pinned = torch.empty(5000, pin_memory=True)
    address = pinned.data_ptr()
    torch.sim._sleep(2000 * 50_000)
    pinned.copy_(x, non_blocking=True)
    del pinned
    held = torch.empty(5000, pin_memory=True)
    assert held.data_ptr() != address
    torch.sim.synchronize()
    again = torch.empty(5000, pin_memory=True)
    assert again.data_ptr() == address and again.isnan().all()
    assert zero_sim.take_races() == []


def test_unregistering_under_a_copy_is_a_race():
    runtime, x, device = torch.sim.cudart(), torch.zeros(1000), torch.empty(1000, device="sim")
    runtime.cudaHostRegister(x.data_ptr(), 4000, 0)
    device.copy_(x, non_blocking=True)
    runtime.cudaHostUnregister(x.data_ptr())
    (race,) = zero_sim.take_races()
    assert race.now.what == "memory unregistered" and "registered host memory" in race.memory
    torch.sim.synchronize()
