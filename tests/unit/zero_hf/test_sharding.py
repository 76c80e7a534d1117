"""`shard`: which update runs where, and what a run says of itself."""

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import zero_core
import zero_hf
import zero_offload
from tests.swap import needs_swap
from zero_hf import ConfigError, ZeroConfig, shard
from zero_hf.sharding import plan
from zero_offload import OffloadError


def model():
    return torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))


class Mine(torch.optim.RMSprop):
    """As an optimizer that is not listed."""


@pytest.mark.promise("trainer-no-host-update")
def test_an_optimizer_without_an_update_on_the_host_is_refused_there():
    net = model()
    with pytest.raises(ConfigError, match="Mine has no update on the host: .* offload: none. Or pass to ZeroConfig"):
        shard(net, Mine(net.parameters()), ZeroConfig(offload="host"))
    for told in (ZeroConfig(), ZeroConfig(offload="host", optimizer_contract="by itself")):
        shard(one := model(), Mine(one.parameters()), told).close()
    for given in ({"states": "split"}, {"states": "split_8bit", "offload": "host"}):
        with pytest.raises(
            ConfigError, match=f"states='{given['states']}' needs a kernel .*RMSprop.* Write states: fp32"
        ):
            shard(net, torch.optim.RMSprop(net.parameters()), ZeroConfig(**given))


@pytest.mark.promise("plan-advice", "hf-plan-advice")
@needs_swap
def test_a_plan_that_does_not_fit_names_settings_that_make_it_fit(tmp_path):
    """Fails if the planner's advice has keys of zero-train, or if what it says does not help."""
    net = torch.nn.Sequential(*(torch.nn.Linear(512, 512) for _ in range(4)))
    optimizer = torch.optim.AdamW(net.parameters())
    small = zero_offload.Hardware(host_gib=16 / 1024, host_reserved_gib=0, nvme_gib=1, nvme_paths=1)
    given = {"offload": "host", "slots": 3, "tile_numel": 1 << 20, "prefetch_bytes": 0, "nvme_paths": str(tmp_path)}
    with pytest.raises(zero_offload.PlanError, match="host tier needs 17.0 MiB") as raised:
        plan(net, optimizer, ZeroConfig(**given), ranks=1, hardware=small)
    way = 'save memory with optimizer="nvme", or more ranks (now 1) with stage=3'
    assert str(raised.value).endswith(way), raised.value
    plan(net, optimizer, ZeroConfig(**given, optimizer="nvme"), ranks=1, hardware=small)
    plan(net, optimizer, ZeroConfig(**given, stage=3), ranks=2, hardware=replace(small, nodes=2))


@pytest.mark.promise("hf-plan-printed")
def test_a_run_describes_its_plan(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCAL_RANK", "3")
    net = model()
    config = ZeroConfig(offload="nvme", nvme_paths=(str(tmp_path / "d{local_rank}"),))
    run = shard(net, torch.optim.AdamW(net.parameters()), config)
    first, header, *rows, moved, slots = run.describe().splitlines()
    assert slots.startswith("slots 2 of 2 tiles, ")
    assert run.plan.shape.accumulate == 1
    assert first == "zero_hf: Sequential of 25 parameters at stage 3 on 1 rank"
    assert header.split() == "MiB parameters gradients optimizer buffers activations total budget".split()
    assert [row.split()[0] for row in rows] == ["device", "host", "nvme"]
    assert moved == f"each step reads 0 bytes from NVMe and writes 0 bytes, in {tmp_path / 'd3'}"  # all stays in slots
    run.close()


@pytest.mark.promise("trainer-use")
def test_what_is_not_trained_has_no_states_in_the_plan():
    """Without an optimizer, or with one of a part of the model, though all parameters require a gradient."""
    nets = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)) for _ in range(3)]
    trained = (None, torch.optim.AdamW(nets[1][1].parameters()), torch.optim.AdamW(nets[2].parameters()))
    runs = [shard(net, some, ZeroConfig(offload="host")) for net, some in zip(nets, trained, strict=True)]
    nothing, half, everything = (run.plan.bytes_of("host", "optimizer") for run in runs)
    assert nothing == 0 and half == everything / 2
    assert [run.activations for run in runs] == [None] * 3  # blocks keep theirs
    assert all(parameter.requires_grad for net in nets for parameter in net.parameters())
    for run in runs:
        run.close()


@pytest.mark.promise("hf-no-states")
@pytest.mark.parametrize("trained", [True, False])
def test_states_that_an_optimizer_has_not_may_be_on_nvme(tmp_path, trained):
    """SGD without momentum has none, and a model that is not trained, as a reference model, has no optimizer."""
    net = model()
    wanted = net(torch.ones(2, 4)).detach()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1) if trained else None
    config = ZeroConfig(parameters="host", optimizer="nvme", nvme_paths=(tmp_path,))
    run = shard(net, optimizer, config)
    assert torch.equal(net(torch.ones(2, 4)).detach(), wanted) and not run.plan.total("nvme")
    run.close()


def refused(path, how="cannot write to nvme_paths=.*; name a folder in an existing folder of a mounted drive"):
    net = model()
    with pytest.raises(ConfigError, match=how):
        shard(net, torch.optim.AdamW(net.parameters()), ZeroConfig(offload="nvme", nvme_paths=(path,)))
    net(torch.ones(2, 4)).sum().backward()  # it is as it was


@pytest.mark.promise("nvme-folder")
def test_a_folder_on_a_drive_that_is_not_there_is_refused_and_nothing_is_made(tmp_path):
    (tmp_path / "file").write_text("")
    refused(tmp_path / "unmounted" / "zero")
    refused(tmp_path / "file", "Not a directory; name the folder that it is in$")
    assert [found.name for found in tmp_path.iterdir()] == ["file"]
    if os.path.isdir("/dev/shm"):
        name = f"/dev/shm/zero-{os.getpid()}"
        refused(name, "is on tmpfs.* name a folder on a disk, or pass offload: host")
        assert not os.path.exists(name)
    (tmp_path / "unmounted").mkdir()
    for given in ({"offload": "nvme", "nvme_paths": (tmp_path / "unmounted" / "zero",)}, {"offload": "host"}):
        net = model()
        shard(net, torch.optim.AdamW(net.parameters()), ZeroConfig(**given)).close()


def test_ranks_may_make_the_folder_of_a_drive_at_once(tmp_path, monkeypatch):
    """Fails if a rank takes the folder that another has just made for a mistake."""
    mkdir = os.mkdir

    def second(path, *more):
        mkdir(path, *more)  # as the other rank does between this one's look and its call
        mkdir(path, *more)

    net = model()
    with monkeypatch.context() as patched:
        patched.setattr(os, "mkdir", second)
        run = shard(net, torch.optim.AdamW(net.parameters()), ZeroConfig(offload="nvme", nvme_paths=(tmp_path / "d",)))
    assert (tmp_path / "d").is_dir() and run.plan.total("nvme")
    run.close()


@pytest.mark.promise("hf-fp16")
def test_fp16_is_refused_without_a_loss_scale_and_skips_overflows_with_one():
    net = model()
    told = (
        'fp16 without a loss scale.*pass loss_scale="dynamic" to zero_hf.shard.* Accelerator, write param_dtype: bf16'
    )
    with pytest.raises(ConfigError, match=told):
        shard(net, torch.optim.SGD(net.parameters(), lr=0.1), ZeroConfig(param_dtype="fp16"))
    scale = zero_core.LossScale(2.0**4)
    run = shard(net, torch.optim.SGD(net.parameters(), lr=0.1), ZeroConfig(param_dtype="fp16"), loss_scale=scale)
    loss = net(torch.full((1, 4), 6e4, dtype=torch.float16)).sum()
    run.optimizer.scale_loss(loss).backward()  # times 16 is more than fp16 holds
    run.optimizer.step()
    assert (scale.value, run.optimizer.step_count) == (2.0**3, 0)
    run.close()


@pytest.mark.promise("run-end-closed")
def test_a_run_that_was_closed_does_not_end_in_a_plain_model():
    """Only where the model is in other shards, or plain, there is nothing left to do."""
    ours = model()
    first = shard(ours, torch.optim.SGD(ours.parameters(), lr=0.1), ZeroConfig())
    second = shard(ours, torch.optim.SGD(ours.parameters(), lr=0.1), ZeroConfig())
    assert first.end() and zero_core.units(ours)
    second.close()
    with pytest.warns(UserWarning, match=r"used any more: .* freed the parameters: call run.end"):
        assert not second.end()
    ours = model()
    third = shard(ours, torch.optim.SGD(ours.parameters(), lr=0.1), ZeroConfig())
    assert third.end() and third.end() and type(ours[0].weight) is torch.nn.Parameter


def test_offload_places_what_no_kind_places_itself_and_settings_name_a_class():
    config = ZeroConfig(offload="nvme", gradients="host", nvme_paths=["/a", "/b"])
    assert config.placements == {"parameters": "nvme", "gradients": "host", "optimizer": "nvme"}
    assert config.nvme_paths == ("/a", "/b")
    assert ZeroConfig(row_modules="layers.*", token_modules=["*.mlp"]).token_modules == ("*.mlp",)
    config = ZeroConfig.of({"optimizer": {"device": 0.25, "host": 0.75}})
    assert config.placements["optimizer"] == {"device": 0.25, "host": 0.75}
    assert hash(config) == hash(ZeroConfig(optimizer={"device": 0.25, "host": 0.75}))
    assert hash(ZeroConfig(row_modules="layers.*")) == hash(ZeroConfig(row_modules=["layers.*"]))
    assert ZeroConfig().placements == dict.fromkeys(("parameters", "gradients", "optimizer"), "device")


@pytest.mark.advice("has unknown settings ({}): choose from")
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"stage": 4}, "stage=4: choose one of 0, 1, 2, 3"),
        ({"offload": "nvme"}, "nvme_paths is empty"),
        ({"optimizer": "disk"}, "optimizer: 'disk' is not a tier"),
        ({"zero_stage": 3}, "unknown settings (zero_stage): choose from stage, offload"),
        (["host"], "a list: give a mapping"),
        ({"param_dtype": "fp8"}, "param_dtype='fp8': choose one of None, 'bf16', 'fp16'"),
        ({"optimizer": {"host": 0.5}}, "; make the sum 1"),
        ({"optimizer": {"host": 0.5, "nvme": 0.5}}, "nvme_paths is empty"),
        ({"host_bytes": "4GiB"}, "host_bytes='4GiB': give a whole number of at least 0, without a unit"),
        ({"tile_numel": 0}, "tile_numel=0 must be a positive multiple of"),
        ({"activations": "disk"}, "'disk' is not an activation policy; policies are keep, recompute, host, nvme"),
        (
            {"activations": "nvme", "offload": "host"},
            "activations='nvme' uses the files of parameters, gradi",
        ),
        ({"rows": 4}, "rows=4 needs blocks that are recomputed, and activations='keep'"),
        ({"rows": 0, "activations": "host"}, "rows=0 must be a whole number, 1 or more"),
        ({"tokens": 0, "activations": "host"}, "tokens=0 must be a whole number, 1 or more"),
        ({"nvme_paths": "/mnt/{localrank}"}, "the only placeholder is {local_rank}"),
        ("/nowhere/zero.yaml", "/nowhere/zero.yaml"),
    ],
)
def test_what_is_not_known_is_refused_with_the_values_there_are(given, said):
    net = torch.nn.Linear(4, 1)
    with pytest.raises((ConfigError, OffloadError), match=re.escape(said)):
        shard(net, torch.optim.SGD(net.parameters(), lr=0.1), ZeroConfig.of(given))


PROJECT = Path(__file__).parents[3] / "packages" / "zero-hf" / "pyproject.toml"


@pytest.mark.promise("hf-versions")
@pytest.mark.parametrize(
    ("version", "fits"), [("5.22.2", False), ("4.57.6", False), ("6.0.0", False), ("5.24.0", True)]
)
def test_another_transformers_is_named_with_what_to_install(monkeypatch, version: str, fits: bool) -> None:
    assert '"transformers>=5.23,<6"' in PROJECT.read_text()
    monkeypatch.setattr(zero_hf.metadata, "version", lambda name: version)
    monkeypatch.delitem(vars(zero_hf), "ZeroConfig", raising=False)
    if fits:
        assert zero_hf.ZeroConfig
        return
    with pytest.raises(ImportError, match=f"needs transformers>=5.23,<6, and {version} is installed: pip install 'tr"):
        _ = zero_hf.ZeroConfig
