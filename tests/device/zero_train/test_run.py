"""A whole run of zero-train on the device: the same training over every offload, what its metrics and its plan say.

Fails if host and nvme differ in a bit, if a run on the device strays from one without a store, if memory of the device
grows from step to step, or if a device that is full ends in anything but advice.
"""

import gc
import json
import shutil
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
import yaml

pytest.importorskip("transformers")
pytest.importorskip("hydra")
pytest.importorskip("omegaconf")
pytest.importorskip("zero_nvme")
pytest.importorskip("zero_optim_cpu")

from tests.integration.zero_train.helpers import COMMON, after_step, stopped_after, trained
from zero_train.cli import app
from zero_train.errors import ConfigError, RunError
from zero_train.run import loop, planning
from zero_train.run.ranks import Ranks, device_type
from zero_train.settings import compose

SIZES = ("model.hidden_size=128", "model.intermediate_size=256", "model.layers=6", "model.heads=4", "run.steps=4")
MIB = 1 << 20


@pytest.fixture(scope="module")
def on(device):
    """What every run here asks for besides."""
    return (*SIZES, f"hardware.device={device.type}")


@pytest.fixture(scope="module")
def run(tmp_path_factory, on):
    """`run(offload, …)`: a finished run and the lines of its metrics, made once."""
    made = {}

    def of(*overrides):
        if overrides not in made:
            folder = tmp_path_factory.mktemp("run")
            found = trained(folder, *on, *overrides)
            lines = (folder / "metrics.jsonl").read_text().splitlines()
            made[overrides] = found, [json.loads(line) for line in lines]
        return made[overrides]

    return of


@pytest.mark.promise("device-train")
def test_host_and_nvme_have_the_same_bits(run):
    (host, _), (nvme, _) = run("offload=host"), run("offload=nvme")
    assert host.losses == nvme.losses
    assert host.digest == nvme.digest


@pytest.mark.parametrize("offload", ["none", "host", "nvme"])
def test_every_step_says_what_the_device_holds_and_it_does_not_grow(run, device, offload):
    _, lines = run(f"offload={offload}")
    held = [line["device_bytes"] for line in lines]
    assert held[1:] == held[1:2] * (len(held) - 1)
    if device.type == "cpu":  # the device's memory is the host's
        return
    assert all(line["host_bytes"] > 0 for line in lines) == (offload != "none")
    assert held[-1] > 0
    if offload == "none":
        assert held[-1] > run("offload=host")[1][-1]["device_bytes"]


@pytest.mark.promise("device-train-wait")
@pytest.mark.parametrize("offload", ["none", "host", "nvme"])
def test_the_host_waits_for_the_device_once_a_step(on, device, needs_device, tmp_path, monkeypatch, offload):
    """Fails if a batch, a mask or a loss is waited for: the one wait is the norm's, which says how much is clipped."""
    needs_device("its waits")
    module, step, waits = torch.get_device_module(device), loop.Loop._step, []

    def counted(self, number):
        module.set_sync_debug_mode("warn")
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                found = step(self, number)
        finally:
            module.set_sync_debug_mode("default")
        waits.append(Counter(Path(each.filename).name for each in caught if "synchroniz" in str(each.message)))
        return found

    monkeypatch.setattr(loop.Loop, "_step", counted)
    trained(tmp_path, *on, f"offload={offload}", "run.accumulate=2")
    assert [each.total() for each in waits[1:]] == [1, 1, 1], waits


@pytest.mark.promise("device-train")
@pytest.mark.parametrize("offload", ["none", "host", "nvme"])
def test_a_run_that_ctrl_c_ends_is_resumed_with_the_same_bits(run, on, tmp_path, offload):
    whole, _ = run(f"offload={offload}")
    with stopped_after(3):
        first = trained(tmp_path / "run", *on, f"offload={offload}", "run.checkpoint_every=2")
    assert first.exit_code == 130 and len(first.losses) == 3
    rest = trained(tmp_path / "run", *on, f"offload={offload}", "run.checkpoint_every=2", "run.resume=auto")
    assert first.losses + rest.losses == whole.losses
    assert rest.digest == whole.digest


def trained_by_ranks(folder, *overrides):
    found = trained(Path(folder), *overrides)
    return found.losses, found.digest


def small(gib):
    return ("offload=auto", f"hardware.device_gib={gib}", "+hardware.device_reserved_gib=0")


@pytest.mark.advice("To make a new plan after its")
@pytest.mark.promise("planned-again", "update-share")
def test_a_run_of_auto_that_goes_on_beside_another_card_keeps_its_plan(run, on, device, needs_device, tmp_path):
    """Fails if a tile is updated on the GPU before and on the CPU after, or the other way round: its bits differ."""
    needs_device("a tier of its own")
    share, saved, folder = "+hardware.update_share=0.5", "run.checkpoint_every=2", tmp_path / "run"
    whole, _ = run(*small(0.015), share)
    assert whole.digest != run(*small(0.015))[0].digest, "the share decides nothing here"
    with stopped_after(2):
        first = trained(folder, *on, *small(0.015), share, saved)
    with pytest.raises(
        ConfigError,
        match=r"device tier needs .* run\.resume=auto continues has these placements\. To make a new plan .*",
    ):
        trained(folder, *on, *small(0.008), saved, "run.resume=auto")
    other = shutil.copytree(folder, tmp_path / "other")
    assert len(trained(other, *on, *small(0.008), saved, f"run.resume={other}", "offload.update_share=0").losses) == 2
    rest = trained(folder, *on, *small(1), saved, "run.resume=auto")
    assert (first.losses + rest.losses, rest.digest) == (whole.losses, whole.digest)
    (planned,) = yaml.safe_load((folder / "config.yaml").read_text())["offload"]["planned"]
    assert 0 < planned["optimizer"]["device"] < 1


@pytest.mark.promise("durable-planned")
def test_a_durable_run_of_auto_goes_on_after_another_process_has_taken_the_devices_memory(
    run, on, device, needs_device, tmp_path
):
    needs_device("a device that is full apart from the host")
    module, durable = torch.get_device_module(device), (*on, *small(1), "run.durable=process")
    whole, _ = run(*small(1), "run.durable=process")

    def taken():
        module.empty_cache()
        module.set_per_process_memory_fraction(0.0, device)

    try:
        with after_step(2, taken), pytest.raises(RunError, match="out of memory on the device tier: "):
            trained(tmp_path / "run", *durable)
    finally:
        module.set_per_process_memory_fraction(1.0, device)
    rest = trained(tmp_path / "run", *durable, "run.resume=auto")
    assert (whole.losses[-len(rest.losses) :], rest.digest) == (rest.losses, whole.digest)
    assert len(rest.losses) == 2


@pytest.mark.promise("device-train")
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_a_device_each_have_the_same_bits_over_tiers(device_ranks, on, tmp_path, stage):
    runs = [
        device_ranks.run(trained_by_ranks, str(tmp_path / place), *on, f"zero.stage={stage}", f"offload={place}")
        for place in ("host", "nvme")
    ]
    assert runs[0] == runs[1]


def test_a_dry_run_prints_the_devices_tier_and_the_cores(device, tmp_path, capsys, on):
    assert app.main([*COMMON, *on, f"run.dir={tmp_path / 'run'}", "offload=host", "run.dry=true"]) == 0
    lines = capsys.readouterr().out.splitlines()
    (row,) = (line.split() for line in lines if line.startswith("device "))
    assert (row[-1] != "-") == (device.type != "cpu")  # a budget of its own
    assert any(line.startswith("update: ") for line in lines) == (device.type != "cpu")


def test_a_device_that_is_full_ends_the_run_with_a_way_out(device, needs_device, on, tmp_path):
    needs_device("a device that is full apart from the host")  # tests/integration has the CPU's, and a stand-in
    module = torch.get_device_module(device)
    module.empty_cache()
    total = module.get_device_properties(device).total_memory
    module.set_per_process_memory_fraction((module.memory_reserved(device) + 64 * MIB) / total, device)
    try:
        with pytest.raises(RunError) as caught:
            trained(tmp_path / "run", *on, "offload=host", "run.micro_batch=512", "data.sequence_length=256")
    finally:
        module.set_per_process_memory_fraction(1.0, device)
    text = str(caught.value)
    assert "out of memory on the device tier: " in text and "zero_offload.plan expected " in text
    assert "run.micro_batch" in text and "offload.activations=recompute" in text


@pytest.mark.advice("Another process may use the device: end it")
@pytest.mark.promise("device-full")
def test_a_device_with_less_memory_than_it_was_said_to_have_ends_the_run_with_a_way_out(
    device, needs_device, on, tmp_path
):
    needs_device("a device that is full apart from the host")
    module = torch.get_device_module(device)
    gc.collect()
    module.empty_cache()
    module.set_per_process_memory_fraction(0.0, device)
    try:
        with pytest.raises(RunError, match=r"budget are not available\. .* smaller than hardware\.device_gib=1: "):
            trained(tmp_path / "run", *on, *small(1))
    finally:
        module.set_per_process_memory_fraction(1.0, device)
    assert trained(tmp_path / "run", *on, *small(1)).exit_code == 0


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
