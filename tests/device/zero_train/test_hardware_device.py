"""`hardware.device` names the device that a run computes on, of any type that torch knows; a plain run asks torch."""

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("hydra")
pytest.importorskip("omegaconf")
pytest.importorskip("zero_nvme")
pytest.importorskip("zero_optim_cpu")

from zero_train.run import planning
from zero_train.run.ranks import Ranks, device_type
from zero_train.settings import compose


@pytest.mark.promise("device-chosen")
def test_a_device_that_only_simulates_is_not_taken_unasked(device, monkeypatch):
    if device.type == "cpu":
        pytest.skip("the CPU is what is left when nothing else is taken")
    assert Ranks(device_type=device.type).device.type == device.type
    monkeypatch.setattr(torch.get_device_module(device), "simulated", True, raising=False)
    assert device_type(None) == "cpu" and Ranks().device.type == "cpu"
    assert device_type(device.type) == device.type


@pytest.mark.promise("device-room")
def test_memory_that_nobody_described_is_asked_of_the_device(device, needs_device, tmp_path):
    """All of it, less what is reserved there by cause; a reserve that is given is taken off what is free, as it is."""
    needs_device("memory of its own")
    total = torch.get_device_module(device).mem_get_info(device)[1] / (1 << 30)
    words = [f"hardware.device={device.type}", f"run.dir={tmp_path}"]
    asked = planning.hardware(compose.compose(words), Ranks(device_type=device.type))
    assert asked.device_gib == total and set(asked.reserves) >= {"context", "workspaces", "libraries later"}
    given = planning.hardware(
        compose.compose([*words, "hardware.device_reserved_gib=0.25"]), Ranks(device_type=device.type)
    )
    assert given.reserved_gib == 0.25 and given.device_gib <= total
    described = planning.hardware(compose.compose([*words, "hardware.device_gib=80"]), Ranks(device_type=device.type))
    assert described.reserved_gib == 6
