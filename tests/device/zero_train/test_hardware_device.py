"""`hardware.device` names the device that a run computes on, of any type that torch knows; a plain run asks torch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("hydra")
pytest.importorskip("omegaconf")
pytest.importorskip("zero_nvme")
pytest.importorskip("zero_optim_cpu")

from tests.integration.zero_train.helpers import trained
from zero_train.ranks import Ranks, device_type

SIZES = ("model.hidden_size=64", "model.intermediate_size=128", "model.layers=3", "model.heads=4", "run.steps=3")


def test_a_run_computes_on_the_device_that_is_asked_for(device, tmp_path):
    """Host and nvme have the same bits there, and what was planned for is that device."""
    host, nvme = (
        trained(tmp_path / tier, *SIZES, f"hardware.device={device.type}", f"offload={tier}")
        for tier in ("host", "nvme")
    )
    assert host.losses == nvme.losses and host.digest == nvme.digest
    assert Ranks(device_type=device.type).device.type == device.type


def test_a_device_that_only_simulates_is_not_taken_unasked(device, monkeypatch):
    if device.type == "cpu":
        pytest.skip("the CPU is what is left when nothing else is taken")
    monkeypatch.setattr(torch.get_device_module(device), "simulated", True, raising=False)
    assert device_type(None) == "cpu" and Ranks().device.type == "cpu"
    assert device_type(device.type) == device.type
