"""A whole run of zero-train on the device: the same training over every offload, what its metrics and its plan say.

Fails if host and nvme differ in a bit, if a run on the device strays from one without a store, if memory of the device
grows from step to step, or if a device that is full ends in anything but advice.
"""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("hydra")
pytest.importorskip("omegaconf")
pytest.importorskip("zero_nvme")
pytest.importorskip("zero_optim_cpu")

from tests.integration.zero_train.helpers import COMMON, trained
from zero_train import app
from zero_train.errors import RunError
from zero_train.ranks import Ranks

SIZES = ("model.hidden_size=128", "model.intermediate_size=256", "model.layers=4", "model.heads=4", "run.steps=8")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def here(device):
    """zero-train takes the device of its rank that torch sees, whatever a test asks for."""
    if Ranks().device.type != device.type:
        pytest.skip(f"zero-train computes on {Ranks().device} here; hide the others to rehearse on {device}")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """`run(offload, …)`: a finished run and the lines of its metrics, made once."""
    made = {}

    def of(*overrides):
        if overrides not in made:
            folder = tmp_path_factory.mktemp("run")
            found = trained(folder, *SIZES, *overrides)
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            made[overrides] = found, [json.loads(line) for line in lines]
        return made[overrides]

    return of


def test_host_and_nvme_have_the_same_bits(run):
    (host, _), (nvme, _) = run("offload=host"), run("offload=nvme")
    assert host.losses == nvme.losses
    assert host.digest == nvme.digest


@pytest.mark.parametrize("offload", ["host", "nvme"])
def test_it_learns_as_without_a_store(run, offload):
    (plain, _), (offloaded, _) = run("offload=none"), run(f"offload={offload}")
    assert offloaded.losses == pytest.approx(plain.losses, rel=5e-3)
    assert plain.losses[-1] < plain.losses[0]


@pytest.mark.parametrize("offload", ["none", "host", "nvme"])
def test_every_step_says_what_the_device_holds_and_it_does_not_grow(run, device, offload):
    _, lines = run(f"offload={offload}")
    held = [line["device_bytes"] for line in lines]
    assert held[1:] == held[1:2] * (len(held) - 1)
    assert all(line["host_bytes"] > 0 for line in lines) == (offload != "none")
    if device.type != "cpu":
        assert held[-1] > 0
    if offload == "none":
        assert held[-1] > run("offload=host")[1][-1]["device_bytes"]


def test_a_dry_run_prints_the_devices_tier_and_the_cores(device, tmp_path, capsys):
    assert app.main([*COMMON, *SIZES, f"run.dir={tmp_path / 'run'}", "offload=host", "run.dry=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("device "))
    assert (row[-1] != "-") == (device.type != "cpu")  # a budget of its own
    assert any(line.startswith("update: ") for line in lines) == (device.type != "cpu")


def test_a_device_that_is_full_ends_the_run_with_a_way_out(device, needs_device, tmp_path):
    needs_device("a device that is full apart from the host")  # tests/integration has the CPU's, and a stand-in
    module = torch.get_device_module(device)
    module.empty_cache()
    total = module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction((module.memory_reserved(device) + 64 * MIB) / total, device)
    try:
        with pytest.raises(RunError) as caught:
            trained(tmp_path / "run", *SIZES, "offload=host", "run.micro_batch=512", "data.sequence_length=256")
    finally:
        module.set_per_process_memory_fraction(1.0, device)
    text = str(caught.value)
    assert "out of memory on the device tier: " in text and "the plan gave it " in text
    assert "run.micro_batch" in text and "offload.activations=recompute" in text
