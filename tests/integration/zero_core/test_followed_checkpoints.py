"""What errors of checkpoints and pretrained weights advise: each test does what one says, and that works."""

from __future__ import annotations

import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

import zero_core
from tests.following import adamw, advised, model, sharded, step, trains
from zero_core import checkpoint


@pytest.fixture
def saved(tmp_path):
    """A folder with a model and its optimizer after a step, and a copy of it."""
    net = model()
    optimizer = trains(net, adamw(net))
    checkpoint.save(tmp_path / "saved", net, optimizer)
    shutil.copytree(tmp_path / "saved", tmp_path / "copy")
    return tmp_path / "saved"


def loads(folder, net=None, optimizer=None, **options):
    net = net or model()
    if optimizer is not False:
        optimizer = zero_core.shard(net, optimizer or adamw(net))
    else:
        zero_core.shard(net, adamw(net))
    return checkpoint.load(folder, net, optimizer or None, **options)


def test_a_checkpoint_without_a_scheduler_is_loaded_without_one(saved):
    net, optimizer = sharded()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with advised("load it with scheduler=None"):
        checkpoint.load(saved, net, optimizer, scheduler=scheduler)
    assert checkpoint.load(saved, net, optimizer, scheduler=None).step == 1


def test_a_model_is_sharded_before_it_loads_or_read_by_torch(saved):
    net = model()
    with advised("call zero_core.shard first (any stage), or use torch.distributed.checkpoint with its state dict"):
        checkpoint.load(saved, net)
    state = {"model": net.state_dict()}
    dcp.load(state, checkpoint_id=saved, no_dist=True)
    net.load_state_dict(state["model"])
    for stage in range(4):
        other, _ = sharded(stage=stage)
        checkpoint.load(saved, other, other.__dict__["_zero_handle"].optimizer)
        assert torch.equal(other[0].weight.detach(), net[0].weight)


@pytest.mark.parametrize("cut", [False, True])
def test_a_file_that_is_lost_or_cut_is_copied_anew(saved, cut):
    (path,) = saved.glob("*.distcp")
    if cut:
        os.truncate(path, path.stat().st_size - 1)
    else:
        path.unlink()
    with advised("copy it anew", "is cut short" if cut else "is not there"):
        loads(saved)
    shutil.copyfile(saved.parent / "copy" / path.name, path)
    assert loads(saved).step == 1


def test_a_folder_with_other_keys_is_loaded_by_them(tmp_path):
    net = model()
    optimizer = trains(net, adamw(net))
    states = optimizer.full_state_dict()
    named = {
        f"opt.state.{n}.{k}": v
        for n, each in zip(dict(net.named_parameters()), states["state"].values(), strict=True)
        for k, v in each.items()
    }
    weights = {f"net.{n}": v.detach().clone() for n, v in net.state_dict().items()}
    dcp.save(weights | named, checkpoint_id=tmp_path, no_dist=True)
    with advised("its names begin with net, opt: pass model_key= and optimizer_key="):
        loads(tmp_path)
    loads(tmp_path, model_key="net", optimizer_key="opt")


def test_weights_that_were_saved_alone_are_loaded_alone(tmp_path):
    net, _ = sharded()
    checkpoint.save(tmp_path, net)
    with advised("it was saved without its optimizer; load it without one"):
        loads(tmp_path)
    loads(tmp_path, optimizer=False)


def test_groups_are_those_that_were_saved(tmp_path):
    def grouped(net):
        return torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.5}])

    net = model()
    optimizer = trains(net, grouped(net))
    checkpoint.save(tmp_path, net, optimizer)
    with advised("build the optimizer with the groups it was saved with"):
        loads(tmp_path)
    net = model()
    assert loads(tmp_path, net, grouped(net)).step == 1


FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def other_states(net, optimizer, options=None):
    weights, states = get_state_dict(net, optimizer, options=options)
    return {"model": weights, "optim": states}


def same_run(net, optimizer, plain, ordinary):
    """Options, moments and the next step are the plain run's."""
    for ours, theirs in zip(optimizer.param_groups, ordinary.param_groups, strict=True):
        assert {k: ours[k] for k in ("lr", "weight_decay", "betas")} == {
            k: theirs[k] for k in ("lr", "weight_decay", "betas")
        }
    for each, own in ((net, optimizer), (plain, ordinary)):
        step(each, own)
    assert all(torch.allclose(a.detach(), b) for a, b in zip(net.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("form", ["flat", "tensor"])
def test_options_that_are_not_read_are_saved_again_by_torch_or_left(form, tmp_path):
    """Fails if the moments are loaded and lr or weight decay stays the new optimizer's, in silence."""

    def made(lr=1e-3):
        net = model()
        return net, torch.optim.AdamW(
            [{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": lr * 2}],
            lr=torch.tensor(lr) if form == "tensor" else lr,
            weight_decay=0.3,
            betas=(0.8, 0.9),
        )

    def fresh():
        net = model()
        groups = [{"params": net[0].parameters()}, {"params": net[2].parameters()}]
        return net, zero_core.shard(net, torch.optim.AdamW(groups, lr=0.5))

    options = FLAT if form == "flat" else None
    net, ordinary = made()
    step(net, ordinary)
    dcp.save(other_states(net, ordinary, options), checkpoint_id=tmp_path / "theirs", no_dist=True)
    sharded_net, optimizer = fresh()
    what = "for each parameter" if form == "flat" else "as tensors"
    with advised(what, "into a plain model and its optimizer", "or load the model alone, without the optimizer"):
        checkpoint.load(tmp_path / "theirs", sharded_net, optimizer)
    assert torch.equal(sharded_net[0].weight.detach(), model()[0].weight) and optimizer.param_groups[0]["lr"] == 0.5

    plain, again = made(lr=0.7)
    state = other_states(plain, again, options)
    dcp.load(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    set_options = {} if options is None else {"options": options}
    set_state_dict(plain, again, model_state_dict=state["model"], optim_state_dict=state["optim"], **set_options)
    for group in again.param_groups:
        group["lr"] = float(group["lr"])
    dcp.save(other_states(plain, again), checkpoint_id=tmp_path / "again", no_dist=True)
    assert checkpoint.load(tmp_path / "again", sharded_net, optimizer).step == 1
    same_run(sharded_net, optimizer, net, ordinary)

    weights, unused = fresh()
    checkpoint.load(tmp_path / "theirs", weights)
    assert torch.equal(weights[0].weight.detach(), plain[0].weight)
    assert unused.param_groups[0]["lr"] == 0.5


def test_groups_of_another_library_are_those_that_were_saved(tmp_path):
    """Fails if options whose groups do not fit are dropped in silence. Without strict, they may be."""

    def grouped(net, lr):
        return torch.optim.AdamW([{"params": net[0].parameters()}, {"params": net[2].parameters(), "lr": 0.3}], lr=lr)

    net = model()
    ordinary = grouped(net, 0.2)
    step(net, ordinary)
    dcp.save(other_states(net, ordinary), checkpoint_id=tmp_path, no_dist=True)
    with advised("build the optimizer with the groups it was saved with"):
        loads(tmp_path)
    other = model()
    optimizer = zero_core.shard(other, grouped(other, 0.9))
    checkpoint.load(tmp_path, other, optimizer)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.3]
    same_run(other, optimizer, net, ordinary)
    assert loads(tmp_path, strict=False).step == 1


def test_names_that_differ_are_renamed_or_left_out(tmp_path):
    from safetensors.torch import save_file

    file = tmp_path / "model.safetensors"
    save_file({f"old.{n}": v + 1 for n, v in model().state_dict().items()}, file)
    net = model()
    with advised("pass rename= where names differ, or strict=False to go on without"):
        zero_core.load_pretrained(net, tmp_path)
    zero_core.load_pretrained(net, tmp_path, strict=False)
    assert torch.equal(net[0].weight, model()[0].weight)
    zero_core.load_pretrained(net, tmp_path, rename=lambda name: f"old.{name}")
    assert torch.equal(net[0].weight, model()[0].weight + 1)


def test_a_safetensors_file_that_is_cut_is_fetched_again(tmp_path):
    net = model()
    zero_core.shard(net)
    zero_core.save_pretrained(net, tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-4])
    with advised("is cut short", "fetch it again"):
        zero_core.load_pretrained(model(), tmp_path)
    file.write_bytes(whole)
    zero_core.load_pretrained(model(), tmp_path)


def test_a_folder_of_pickles_is_saved_again_by_transformers(tmp_path):
    transformers = pytest.importorskip("transformers")
    net = transformers.GPT2Model(transformers.GPT2Config(vocab_size=7, n_positions=4, n_embd=4, n_layer=1, n_head=1))
    torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
    with advised("save_pretrained() of transformers writes them"):
        zero_core.load_pretrained(net, tmp_path)
    net.save_pretrained(tmp_path)
    zero_core.load_pretrained(net, tmp_path)


def test_a_disk_without_room_gets_it_or_another_folder_is_named(tmp_path, monkeypatch):
    net, folder = model(), tmp_path / "full"
    zero_core.shard(net)
    real, full = os.pwrite, [True]

    def pwrite(fd, *args):
        if full and str(folder) in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(28, "No space left on device")
        return real(fd, *args)

    monkeypatch.setattr(os, "pwrite", pwrite)
    with advised("What was there before is as it was: make room, or name another folder"):
        zero_core.save_pretrained(net, folder)
    zero_core.save_pretrained(net, tmp_path / "other")
    full.clear()
    zero_core.save_pretrained(net, folder)
    for each in (folder, tmp_path / "other"):
        zero_core.load_pretrained(model(), each)


def test_two_sharded_models_are_saved_apart(tmp_path):
    net = nn.Sequential(model(), model())
    for each in net:
        zero_core.shard(each)
    with advised("has parameters of 2 sharded models: save each apart"):
        zero_core.save_pretrained(net, tmp_path)
    for k, each in enumerate(net):
        zero_core.save_pretrained(each, tmp_path / str(k))
        zero_core.load_pretrained(model(), tmp_path / str(k))
