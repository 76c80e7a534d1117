"""One process: what a folder holds after success and failure, and checkpoints that do not fit."""

import io
import pickle
import random
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import TensorProperties
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zero_core
from tests import kit
from zero_core import checkpoint
from zero_core.checkpoint import match
from zero_core.errors import CheckpointError
from zero_core.gradients.loss_scaling import LossScale
from zero_core.optim.device_store import DeviceStore


class Small(nn.Module):
    """A tied head, a frozen layer, a buffer, a parameter without dimensions, one without elements, one unused."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.2)) for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.unused = nn.Parameter(torch.ones(3))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(self.frozen(x) * self.scale)


OPTIMIZERS = {
    # The case that `nox -s tests` runs: one group keeps a state that the other has not.
    "two groups": lambda p: torch.optim.SGD([{"params": p[:2], "momentum": 0.9}, {"params": p[2:]}], lr=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.05),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.05, amsgrad=True),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, dampening=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, initial_accumulator_value=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.05, weight_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.05, t0=2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=0.05),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.05, centered=True, momentum=0.5),
    "radam": lambda p: torch.optim.RAdam(p, lr=0.05),
    "adamax": lambda p: torch.optim.Adamax(p, lr=0.05),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
}
adamw = OPTIMIZERS["adamw"]


def make(seed: int = 0, stage: int = 3, optimizer=adamw, **options):
    model = plain(seed)[0]
    return model, zero_core.shard(model, optimizer(kit.trained(model)), stage=stage, **options)


def plain(seed: int = 0, optimizer=adamw):
    torch.manual_seed(seed)
    model = Small()
    return model, optimizer(kit.trained(model))


def losses(model: nn.Module, optimizer: torch.optim.Optimizer, count: int, scheduler=None) -> list[float]:
    found = []
    for _ in range(count):
        tokens = torch.randint(0, 11, (3, 5))  # from the generator that a checkpoint restores
        loss = model(tokens).square().mean() + random.random() * 0
        kit.step(optimizer, loss)
        if scheduler is not None:
            scheduler.step()
        found.append(loss.item())
    return found


@pytest.mark.promise("resume-optimizers", "groups-states")
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(name: str, dtype, tmp_path: Path) -> None:
    """Dropout and data come from torch's generator, so that has to be restored too."""
    model, optimizer = make(0, optimizer=OPTIMIZERS[name], param_dtype=dtype)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)
    losses(model, optimizer, 3, scheduler)
    checkpoint.save(tmp_path, model, optimizer, scheduler=scheduler, extra={"epoch": 4}, tile_numel=7)
    expected = losses(model, optimizer, 4, scheduler)
    python = random.random()
    other, again = make(9, optimizer=OPTIMIZERS[name], param_dtype=dtype)
    late = torch.optim.lr_scheduler.StepLR(again, 2, gamma=0.5)
    losses(other, again, 1)
    loaded = checkpoint.load(tmp_path, other, again, scheduler=late, tile_numel=5)
    assert (loaded.step, loaded.extra, loaded.ours, loaded.world_size) == (3, {"epoch": 4}, True, 1)
    assert again.step_count == 3 and other.calls == 3
    assert losses(other, again, 4, late) == expected
    assert random.random() == python
    kit.assert_bits(kit.named_values(other, master=True), kit.named_values(model, master=True))


def scaled_losses(model: nn.Module, optimizer, scale: LossScale, count: int) -> list[tuple[float, float, int]]:
    found = []
    for step in range(count):
        loss = model(torch.full((2, 3), step % 7)).float().square().mean()
        kit.step(optimizer, loss)
        found.append((loss.item(), scale.value, scale.finite_steps))
    return found


@pytest.mark.promise("resume-loss-scale")
def test_a_dynamic_loss_scale_goes_on_within_its_window(tmp_path: Path) -> None:
    def run() -> tuple:
        scale = LossScale(2.0**22, window=4)
        return *make(0, param_dtype=torch.float16, loss_scale=scale, optimizer=OPTIMIZERS["momentum"]), scale

    model, optimizer, scale = run()
    before = 0
    while scale.finite_steps != 3:  # overflows first; then stop one step before it doubles
        scaled_losses(model, optimizer, scale, 1)
        before += 1
    assert scale.value < 2.0**22 and optimizer.step_count < before
    checkpoint.save(tmp_path, model, optimizer)
    expected = scaled_losses(model, optimizer, scale, 6)
    assert expected[0][1] == 2 * scale.value or expected[0][2] == 0
    other, again, fresh = run()
    assert checkpoint.load(tmp_path, other, again).step == again.step_count < before
    assert (fresh.value, fresh.finite_steps) != (2.0**22, 0) and fresh.finite_steps == 3
    assert scaled_losses(other, again, fresh, 6) == expected


def test_a_constant_loss_scale_stays_what_the_user_gave(tmp_path: Path) -> None:
    model, optimizer = make(0, loss_scale=64.0)
    checkpoint.save(tmp_path, model, optimizer)
    other, again = make(0, loss_scale=8.0)
    checkpoint.load(tmp_path, other, again)
    assert zero_core.handle(other).engine.loss_scale.value == 8.0
    shorter = LossScale(2.0, window=2)
    shorter.load_state_dict({"value": 4.0, "finite_steps": 5})
    shorter.succeeded()
    assert shorter.value == 8.0, "a counter beyond a shorter window doubles, instead of never"


def flat(model: nn.Module, optimizer: torch.optim.Optimizer, flattened: bool, keys: dict | None = None) -> dict:
    """What torch saves. keys: with the model's names at the top."""
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    weights, states = get_state_dict(model, optimizer, options=options)
    return {**weights, "optimizer": states} if keys else {"model": weights, "optim": states}


def take(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict, flattened: bool) -> None:
    weights = state.get("model") or {name: value for name, value in state.items() if name != "optimizer"}
    states = state.get("optim") or state["optimizer"]
    options = StateDictOptions(flatten_optimizer_state_dict=flattened)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states, options=options)


def same_losses(*runs: tuple) -> None:
    found = []
    for run in runs:
        torch.manual_seed(2)
        found.append(losses(*run, 3))
    assert all(each == pytest.approx(found[0], rel=1e-6) for each in found)


@pytest.mark.promise("checkpoint-both-ways", "checkpoint-flattened")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("layout", "name"),
    [
        *(("nested", "adamw"), ("nested", "momentum"), ("flattened", "groups")),
        *(("nested", "nadam"), ("nested", "asgd"), ("torchtitan", "groups")),
    ],
)
def test_plain_models_read_ours_and_we_read_theirs(layout: str, name: str, tmp_path: Path) -> None:
    """With the stock functions and nothing of ours, there and back; the next losses are the same.

    torchtitan has the model's names without a key, and more of the run beside them.
    Fails if lr, betas or weight decay of a group stays the new optimizer's, or torch does not find them.
    """
    flattened = layout != "nested"
    keys = {"model_key": "", "optimizer_key": "optimizer"} if layout == "torchtitan" else {}
    beside = {"train_state": {"step": torch.tensor(3)}, "lr_scheduler": {"last_epoch": 3}, "dataloader": {"rank": b"0"}}

    def groups(lr: float, **options: Any):
        def made(given):
            return torch.optim.AdamW([{"params": given[:1]}, {"params": given[1:], "lr": lr * 2}], lr=lr, **options)

        return OPTIMIZERS.get(name, made)

    dense, ordinary = plain(3, groups(0.01, weight_decay=0.3, betas=(0.8, 0.9)))
    losses(dense, ordinary, 3)
    dcp.save(flat(dense, ordinary, flattened, keys) | (beside if keys else {}), checkpoint_id=tmp_path / "theirs")
    model, optimizer = make(8, optimizer=groups(0.5))
    losses(model, optimizer, 2)
    loaded = checkpoint.load(tmp_path / "theirs", model, optimizer, **keys)
    assert not loaded.ours and loaded.extra is None and loaded.step == (1 if name == "momentum" else 3)
    for ours, theirs in zip(optimizer.param_groups, ordinary.param_groups, strict=True):
        assert all(ours.get(key) == theirs.get(key) for key in ("lr", "betas", "weight_decay"))
    same_losses((dense, ordinary), (model, optimizer))

    checkpoint.save(tmp_path / "ours", model, optimizer, tile_numel=10, flatten=flattened, **keys)
    manifests = [pickle.loads((tmp_path / of / ".metadata").read_bytes()) for of in ("ours", "theirs")]
    assert getattr(manifests[0], "version", None) == getattr(manifests[1], "version", None)
    again, fresh = plain(0, groups(0.7))
    state = flat(again, fresh, flattened, keys)
    dcp.load(state, checkpoint_id=tmp_path / "ours")
    take(again, fresh, state, flattened)
    resumed, other = make(9, optimizer=groups(0.6))
    checkpoint.load(tmp_path / "ours", resumed, other, **keys)
    same_losses((dense, ordinary), (again, fresh), (resumed, other))


@pytest.mark.promise("checkpoint-flattened", "checkpoint-other-library")
@pytest.mark.parametrize("flattened", [False, True])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_options_that_differ_in_one_group_are_refused(tmp_path: Path, flattened: bool) -> None:
    """Fails if the options of one parameter are taken for those of another."""

    def made(parameters):
        return torch.optim.AdamW([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.3}], lr=0.2)

    dense, ordinary = plain(0, made)
    losses(dense, ordinary, 1)
    dcp.save(flat(dense, ordinary, flattened), checkpoint_id=tmp_path)
    model, optimizer = make(1)
    told = r"with lr=0\.. and 0\.. for the parameters '" if flattened else "no group of the checkpoint has exactly "
    with pytest.raises(CheckpointError, match=told + ".*: build the optimizer with the groups it was saved with"):
        checkpoint.load(tmp_path, model, optimizer)
    if not flattened:  # groups may be left out, and options of single parameters may not
        assert checkpoint.load(tmp_path, model, optimizer, strict=False).step == 1
    model, optimizer = make(1, optimizer=made)
    checkpoint.load(tmp_path, model, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3]


@pytest.mark.promise("checkpoint-newer-torch")
def test_a_manifest_of_a_newer_torch_is_read_or_is_not_called_damaged_alone(tmp_path: Path, monkeypatch) -> None:
    """torch 2.15 writes a sixth property of each tensor. Fails if that is an error, or another one has no way out."""
    theirs = TensorProperties.__getstate__
    monkeypatch.setattr(TensorProperties, "__getstate__", lambda self: (*theirs(self), (1,)))
    model, optimizer, _ = saved(tmp_path)
    with pytest.raises(ValueError, match="too many values"):
        pickle.loads((tmp_path / ".metadata").read_bytes())
    monkeypatch.undo()
    assert checkpoint.load(tmp_path, model, optimizer).step == 1
    manifest = tmp_path / ".metadata"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole.replace(b"TensorStorageMetadata", b"TensorStorageMetadatX"))
    told = r"is damaged, or was written by a newer torch than .*: copy it again, or load"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.load(tmp_path, model, optimizer)
    manifest.write_bytes(whole)  # copied anew
    assert checkpoint.load(tmp_path, model, optimizer).step == 1


@pytest.mark.advice("load it with the release that wrote it")
@pytest.mark.promise("checkpoint-later-format")
def test_a_checkpoint_of_a_later_format_is_refused_and_loaded_by_the_release_that_wrote_it(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(checkpoint, "FORMAT", 2)
    model, optimizer, _ = saved(tmp_path)
    told = "has format 2, and this zero-core reads up to 1: load it with the release"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.load(tmp_path, model, optimizer)
    monkeypatch.setattr(match, "FORMAT", 2)
    assert checkpoint.load(tmp_path, model, optimizer).step == 1


@pytest.mark.promise("trainer-overrides")
def test_masters_are_read_that_round_to_the_values_of_the_model(tmp_path: Path) -> None:
    """With values=False. Fails if a value of the model changes, or a master that rounds to it is left."""
    model, optimizer = make(0, param_dtype=torch.bfloat16)
    losses(model, optimizer, 2)
    checkpoint.save(tmp_path, model, optimizer)
    masters = {n: zero_core.full_state(p, "master") for n, p in model.named_parameters() if p.requires_grad}
    values = {name: value.clone() for name, value in model.state_dict().items()}
    other, again = make(5, param_dtype=torch.bfloat16)
    values["blocks.0.0.weight"][0] += 1
    values["calls"] += 5
    other.load_state_dict(values)
    checkpoint.load(tmp_path, other, again, values=False)
    kit.assert_bits(other.state_dict(), values)
    for name, parameter in other.named_parameters():
        if name in masters and name != "blocks.0.0.weight":
            assert torch.equal(zero_core.full_state(parameter, "master"), masters[name]), name
    found = zero_core.full_state(other.blocks[0][0].weight, "master")
    assert torch.equal(found[1:], masters["blocks.0.0.weight"][1:])
    assert torch.equal(found[0], values["blocks.0.0.weight"][0].float())


@pytest.mark.advice("prefix as model_key=, or '' for none")
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_bare_state_dict_needs_only_its_key(tmp_path: Path) -> None:
    dense, _ = plain(3)
    dcp.save(dict(dense.state_dict()), checkpoint_id=tmp_path)
    model, _ = make(1)
    with pytest.raises(
        CheckpointError, match="begin with blocks, calls, embedding.*: pass the model's prefix as model_key="
    ):
        checkpoint.load(tmp_path, model)
    assert checkpoint.load(tmp_path, model, model_key="").step == 0
    kit.assert_bits(kit.values(model), list(dense.parameters()))


class Counting(DeviceStore):
    """`largest`: elements of the largest state that was read or written."""

    largest = 0

    def read_state(self, i: int, name: str, start: int, stop: int) -> torch.Tensor:
        self.largest = max(self.largest, stop - start)
        return super().read_state(i, name, start, stop)

    def write_state(self, i: int, name: str, start: int, values: torch.Tensor) -> None:
        self.largest = max(self.largest, values.numel())
        super().write_state(i, name, start, values)


@pytest.mark.promise("checkpoint-streams")
def test_values_pass_in_tiles_in_both_directions(tmp_path: Path) -> None:
    store = Counting()
    model, optimizer = make(0, store=store)
    losses(model, optimizer, 1)
    for pass_by in (checkpoint.save, checkpoint.load):
        store.largest = 0
        pass_by(tmp_path, model, optimizer, tile_numel=8)
        assert 0 < store.largest <= 8


def saved(tmp_path: Path):
    model, optimizer = make(0)
    losses(model, optimizer, 1)
    checkpoint.save(tmp_path, model, optimizer)
    return model, optimizer, next(tmp_path.glob("*.distcp"))


class Counted(nn.Linear):
    state: Any = None

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


@pytest.mark.promise("checkpoint-extra-states")
@pytest.mark.parametrize("state", [{"calls": 3}, torch.arange(2), io.BytesIO(b"3")], ids=["dict", "tensor", "bytes"])
def test_extra_states_are_saved_and_loaded(tmp_path: Path, state: Any) -> None:
    """Tensors also go to plain torch and come from it. Those of a saved average stay out of the model."""
    model, loaded, there, fourth = (nn.Sequential(Counted(3, 2), nn.ReLU()) for _ in range(4))
    for each in (model, loaded, fourth):
        zero_core.shard(each)
    model[0].state = state
    checkpoint.save(tmp_path / "ours", model)
    checkpoint.load(tmp_path / "ours", loaded)
    assert told(loaded[0].state) == told(state)
    if isinstance(state, torch.Tensor):
        there[0].state = torch.zeros_like(state)
        found = {"model": there.state_dict()}
        dcp.load(found, checkpoint_id=tmp_path / "ours", no_dist=True)
        found["model"]["0._extra_state"] += 1
        dcp.save(found, checkpoint_id=tmp_path / "plain", no_dist=True)
        checkpoint.load(tmp_path / "plain", fourth)
        assert told(fourth[0].state) == told(state + 1)
    weights = {name: value.clone() for name, value in there.named_parameters()}
    dcp.save({"model": weights}, checkpoint_id=tmp_path / "none", no_dist=True)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.0\._extra_state"):
        checkpoint.load(tmp_path / "none", loaded)
    checkpoint.load(tmp_path / "none", loaded, strict=False)
    assert told(loaded[0].state) == told(state)

    average = zero_core.AveragedModel(model)
    average.update_parameters()
    average.save(tmp_path / "average")
    model[0].state = torch.ones(1)
    average.load(tmp_path / "average")
    assert told(model[0].state) == told(torch.ones(1))


def told(state: Any) -> Any:
    return state.getvalue() if isinstance(state, io.BytesIO) else str(state)


@pytest.mark.promise("checkpoint-damaged")
def test_checkpoints_cut_short_are_named_before_anything_changes(tmp_path: Path, monkeypatch) -> None:
    model, optimizer, data = saved(tmp_path)
    before = kit.values(model)
    manifest = tmp_path / ".metadata"
    whole, listed = data.read_bytes(), manifest.read_bytes()
    data.write_bytes(whole[:-50])
    with pytest.raises(CheckpointError, match=rf"{data.name} is cut short: it has {len(whole) - 50} .*copy it again"):
        checkpoint.load(tmp_path, model, optimizer)
    data.write_bytes(whole)
    part = pickle.loads(listed)
    part.state_dict_metadata["model.unused"].chunks.clear()
    manifest.write_bytes(pickle.dumps(part))
    with pytest.raises(CheckpointError, match=r"has 0 of the 3 .* not all ranks wrote the .*: call save\(\) on"):
        checkpoint.load(tmp_path, model, optimizer)
    manifest.write_bytes(listed)
    data.unlink()
    with pytest.raises(CheckpointError, match=f"{data.name} is missing.*copy it again"):
        checkpoint.load(tmp_path, model, optimizer)
    manifest.write_bytes(listed[:-9])
    with pytest.raises(CheckpointError, match=".metadata is damaged"):
        checkpoint.load(tmp_path, model, optimizer)
    manifest.write_bytes(pickle.dumps({"no": "manifest"}))
    with pytest.raises(CheckpointError, match="not a manifest of .*: load another folder"):
        checkpoint.load(tmp_path, model, optimizer)
    manifest.unlink()
    with pytest.raises(CheckpointError, match="holds no complete checkpoint: .* Load another folder"):
        checkpoint.load(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="no such folder"):
        checkpoint.load(tmp_path / "absent", model, optimizer)
    kit.assert_bits(kit.values(model), before)
    data.write_bytes(whole)
    manifest.write_bytes(listed)
    assert checkpoint.load(tmp_path, model, optimizer).step == 1

    def full(*args, **kwargs):
        raise RuntimeError("unexpected pos 704 vs 598")  # torch.save's words for a full disk

    monkeypatch.setattr(torch, "save", full)
    told = r"could not write .*after \([\d,]+ bytes are free there\): RuntimeError.*, make room there, or name another"
    with pytest.raises(CheckpointError, match=told):
        checkpoint.save(tmp_path / "after", model, optimizer)


@pytest.mark.promise("checkpoint-damaged")
@pytest.mark.parametrize("damage", ["zeroed", "one bit"])
def test_a_damaged_tensor_is_named(tmp_path: Path, damage: str) -> None:
    model, optimizer, data = saved(tmp_path)
    sound = data.read_bytes()
    whole = bytearray(sound)
    manifest = pickle.loads((tmp_path / ".metadata").read_bytes())
    info = next(v for k, v in manifest.storage_data.items() if k.fqn == "model.blocks.0.0.weight")
    if damage == "zeroed":
        whole[info.offset : info.offset + info.length] = bytes(info.length)
    else:
        values = dict(model.named_parameters())["blocks.0.0.weight"].detach().clone().numpy().tobytes()
        whole[whole.index(values[:64], info.offset) + 30] ^= 1
    data.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"model\.blocks\.0\.0\.weight is damaged: .*: copy the file again"):
        checkpoint.load(tmp_path, model, optimizer)
    if damage == "one bit":
        checkpoint.load(tmp_path, model, optimizer, verify=False)
    data.write_bytes(sound)
    checkpoint.load(tmp_path, model, optimizer)


@pytest.mark.promise("checkpoint-damaged")
def test_a_damaged_option_of_the_optimizer_is_named(tmp_path: Path) -> None:
    model, optimizer, data = saved(tmp_path)
    whole, rate = bytearray(data.read_bytes()), struct.pack(">d", optimizer.param_groups[0]["lr"])
    stored = pickle.loads((tmp_path / ".metadata").read_bytes()).storage_data
    info = next(value for key, value in stored.items() if key.fqn == "zero.state")
    whole[whole.index(rate, info.offset) + 7] ^= 1
    data.write_bytes(whole)
    with pytest.raises(CheckpointError, match=r"zero\.state is damaged: .*: copy the file again"):
        checkpoint.load(tmp_path, model, optimizer)


@pytest.mark.promise("checkpoint-damaged")
def test_each_bit_of_a_damaged_manifest_is_noticed(tmp_path: Path) -> None:
    """As in the name of a step: a checkpoint without it would be one of an optimizer that counts no steps."""
    model, optimizer, _ = saved(tmp_path)
    manifest = tmp_path / ".metadata"
    listed = manifest.read_bytes()
    for at in range(0, len(listed) - 8, 101):
        manifest.write_bytes(listed[:at] + bytes([listed[at] ^ 1 << at % 8]) + listed[at + 1 :])
        with pytest.raises(CheckpointError, match=r"\.metadata is damaged, .*its checksum differs.*: copy it again"):
            checkpoint.load(tmp_path, model, optimizer)
    manifest.write_bytes(listed)
    checkpoint.load(tmp_path, model, optimizer)


@pytest.mark.promise("checkpoint-damaged")
def test_another_models_checkpoint_is_named(tmp_path: Path) -> None:
    model, optimizer, _ = saved(tmp_path)

    wider, small = plain()[0], plain()[0]
    wider.frozen, wider.added = nn.Linear(6, 8).requires_grad_(False), nn.Linear(2, 2)
    del small.unused
    with pytest.raises(CheckpointError) as error:
        checkpoint.load(tmp_path, wider, zero_core.shard(wider, adamw(kit.trained(wider))))
    assert "model.frozen.weight: saved (6, 6), model (8, 6)" in str(error.value)
    assert "missing from the checkpoint: model.added.weight" in str(error.value)
    with pytest.raises(CheckpointError, match=r"not in the model: model\.unused"):
        checkpoint.load(tmp_path, small, zero_core.shard(small, adamw(kit.trained(small))))
    checkpoint.load(tmp_path, small, strict=False)


@pytest.mark.promise("checkpoint-damaged")
def test_another_optimizers_checkpoint_is_named(tmp_path: Path) -> None:
    saved(tmp_path)
    for optimizer, told in (
        (OPTIMIZERS["momentum"], r"optim\.state\.\S+\.momentum_buffer.*as it was saved, or leave it out of load\(\)"),
        (OPTIMIZERS["nadam"], r"missing from the checkpoint: optim\.state\.\S+\.mu_product"),
        (OPTIMIZERS["sgd"], r"states that this optimizer does not keep: optim\.state\.\S+\.exp_avg"),
        (
            lambda ps: torch.optim.AdamW([{"params": ps[:2]}, {"params": ps[2:], "lr": 1.0}]),
            "group here has the 2 parameters .* no group of the checkpoint has exactly these",
        ),
    ):
        model, other = make(0, optimizer=optimizer)
        with pytest.raises(CheckpointError, match=told):
            checkpoint.load(tmp_path, model, other)
        checkpoint.load(tmp_path, model)  # without it


def test_names_lose_the_prefixes_of_wrappers(tmp_path: Path) -> None:
    def build(wrap: bool):
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        if wrap:
            model[0] = torch.compile(model[0], backend="eager")
        return model, zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))

    model, optimizer = build(True)
    assert any("_orig_mod" in n for n, _ in model.named_parameters())
    checkpoint.save(tmp_path, model, optimizer)
    checkpoint.load(tmp_path, *build(False))


@pytest.mark.promise("resume-exact")
def test_all_generators_go_on(tmp_path: Path) -> None:
    def drawn() -> list[float]:
        return [float(torch.rand(())), random.random(), float(np.random.rand()), float(np.random.randn())]

    model, optimizer = make(0)
    np.random.randn()  # leaves the second number of a pair for the next call
    checkpoint.save(tmp_path, model, optimizer)
    expected = drawn()
    checkpoint.load(tmp_path, model, optimizer)
    assert drawn() == expected


@pytest.mark.promise("device-generator")
def test_a_random_state_from_before_the_key_was_neutral_still_loads(tmp_path: Path, monkeypatch) -> None:
    """Checkpoints carried the state of a GPU's generator under "cuda"; they load on that device and on any other."""
    model, optimizer = make(0)
    old = {"torch": torch.get_rng_state(), "python": random.getstate(), "cuda": torch.arange(16, dtype=torch.uint8)}
    monkeypatch.setattr(checkpoint, "random_state_of", lambda device: old)
    checkpoint.save(tmp_path, model, optimizer)
    expected = torch.rand(3)
    checkpoint.load(tmp_path, model, optimizer)
    assert torch.equal(torch.rand(3), expected)

    restored = []
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda *given: restored.append(given))
    checkpoint.restore_random_state(old, torch.device("cuda", 1))
    assert restored == [(old["cuda"], torch.device("cuda", 1))]


def test_a_checkpoint_without_a_scheduler_is_not_loaded_into_one(tmp_path: Path) -> None:
    model, optimizer = make()
    checkpoint.save(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="saved without a scheduler; load it with scheduler=None"):
        checkpoint.load(tmp_path, model, optimizer, scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2))
