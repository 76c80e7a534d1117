"""A checkpoint of DeepSpeed's in a sharded model, or converted: every value where it belongs, or nothing changed."""

import json
import os

import pytest
import torch
import torch.distributed as dist

import zero_core
from zero_core.checkpoint.safetensors import Reader, open_index
from zero_core.errors import CheckpointError, ConfigError, PretrainedError
from zero_deepspeed.checkpoint import load_checkpoint
from zero_deepspeed.convert import convert, convert_weights
from zero_deepspeed.files import Pieces
from zero_deepspeed.schedules import WarmupLR

from .written import Net, write

SCALE = {"cur_scale": 512.0, "dynamic": True, "cur_iter": 12, "last_overflow_iter": 3, "scale_window": 5}


def _sharded(make=torch.optim.AdamW, stage=3, net=Net, one_group=False, **options):
    model = net()
    groups = list(model.parameters()) if one_group else model.groups()
    return model, zero_core.shard(model, make(groups, lr=1e-3), stage=stage, **options)


def _compare(model, optimizer, truth):
    for name, parameter in model.named_parameters():
        if name in truth.values:
            for state, value in truth.values[name].items():
                found = zero_core.full_state(parameter, "master" if state == "fp32" else state)
                assert torch.equal(found, value), (name, state)
    assert torch.equal(model.frozen.weight.detach(), truth.frozen) and model.seen == 4
    assert [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups] == [(0.5, 0.1), (0.5, 0.0)]


def _load_every_kind(root, kinds):
    """On each rank of a pool: stages and layouts, saved on other numbers of ranks."""
    for i, (stage, size, options) in enumerate(kinds):
        model, optimizer = _sharded(stage=(3, 2, 1)[i % 3])
        folder = root / str(i)
        if not dist.is_initialized() or dist.get_rank() == 0:
            write(folder, stage, size, **options)
        if dist.is_initialized():
            dist.barrier()
        loaded = load_checkpoint(folder, model, optimizer)
        _compare(model, optimizer, write(root / f"again{i}{os.getpid()}", stage, size, **options))
        assert (loaded.step, loaded.global_steps, loaded.skipped_steps, loaded.world_size) == (9, 10, 1, size)
        assert loaded.client_state == {} and optimizer.step_count == 9
        optimizer.close()


KINDS = [(1, 2, {}), (2, 3, {}), (3, 2, {}), (3, 3, {"one_flat_group": False}), (1, 1, {})]


@pytest.mark.promise("ds-values-arrive")
@pytest.mark.parametrize("size", [1, 2])
def test_values_steps_and_options_arrive_at_any_number_of_ranks(tmp_path, ranks, size):
    ranks(size).run(_load_every_kind, tmp_path, KINDS)


@pytest.mark.promise("ds-scheduler")
def test_the_scheduler_and_the_loss_scale_go_on(tmp_path):
    scale = SCALE | {"cur_hysteresis": 1, "delayed_shift": 2}
    write(tmp_path, 2, 2, scale=scale, client={"epoch": 3, "order": torch.arange(3)})
    mine = zero_core.LossScale(2.0**16, window=5, first_window=6, hysteresis=2)
    model, optimizer = _sharded(param_dtype=torch.float16, loss_scale=mine)
    another = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)  # would take the state and begin anew
    with pytest.raises(CheckpointError, match="use a schedule of zero_deepspeed.schedules. Or leave scheduler= out"):
        load_checkpoint(tmp_path, model, optimizer, scheduler=another)
    scheduler = WarmupLR(optimizer, 0.0, 1.0, 100, "linear")
    loaded = load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert scheduler.last_batch_iteration == 9 and optimizer.param_groups[0]["lr"] == pytest.approx(0.09)
    assert loaded.client_state["epoch"] == 3 and loaded.client_state["order"].tolist() == [0, 1, 2]
    assert mine.state_dict() == {"value": 512.0, "finite_steps": 2, "hysteresis_left": 1}


@pytest.mark.promise("ds-frozen-names")
def test_frozen_parameters_that_were_excluded_keep_their_values(tmp_path):
    write(tmp_path, 3, 2, exclude=True)
    model, optimizer = _sharded()
    before = model.frozen.weight.detach().clone()
    load_checkpoint(tmp_path, model, optimizer)
    assert torch.equal(model.frozen.weight.detach(), before)


class WithFrozen(Net):
    def groups(self):
        groups = super().groups()
        groups[0]["params"].append(self.frozen.weight)
        return groups


@pytest.mark.promise("ds-frozen-names")
@pytest.mark.parametrize(("prefix", "net"), [("module.", Net), ("", WithFrozen)])
def test_names_with_the_prefix_of_a_wrapper_are_found_and_a_group_may_have_frozen_parameters(tmp_path, prefix, net):
    """DeepSpeed lists no frozen parameters in its groups."""
    truth = write(tmp_path, 2, 2, prefix=prefix)
    model, optimizer = _sharded(net=net)
    load_checkpoint(tmp_path, model, optimizer)
    _compare(model, optimizer, truth)


@pytest.mark.promise("ds-frozen-names")
def test_without_an_optimizer_only_weights_are_read(tmp_path):
    truth = write(tmp_path, 3, 2)
    model = Net()
    zero_core.shard(model)
    load_checkpoint(tmp_path, model)
    assert torch.equal(model.a.weight.detach(), truth.values["a.weight"]["fp32"])


def _other(name, *sizes, trained=True):
    """A net that has another module, or one more."""

    class Other(Net):
        def __init__(self):
            super().__init__()
            setattr(self, name, torch.nn.Linear(*sizes).requires_grad_(trained))

    return Other


def _amsgrad(groups, lr):
    return torch.optim.AdamW(groups, lr, amsgrad=True)


@pytest.mark.promise("ds-other-model")
@pytest.mark.parametrize(
    "options, message",
    [
        ({"net": _other("a", 6, 7)}, r"shapes differ: model.a.weight: saved \(7, 5\), model \(7, 6\)"),
        ({"net": _other("c", 2, 2)}, "missing from the checkpoint: model.c.weight, model.c.bias"),
        ({"net": _other("d", 2, 2, trained=False)}, "missing from the checkpoint: model.d.weight, model.d.bias"),
        ({"make": torch.optim.SGD}, "states that this optimizer does not keep: optim.state.a.weight.exp_avg"),
        ({"make": torch.optim.Adagrad}, "missing from the checkpoint: optim.state.a.weight.sum"),
        ({"make": _amsgrad}, "missing from the checkpoint: optim.state.a.weight.max_exp_avg_sq"),
        ({"make": torch.optim.Adam}, "was trained with decoupled_weight_decay=True, and this optimizer has decoup"),
        ({"one_group": True}, "group here has the 5 parameters .* no group of the checkpoint has exactly these"),
    ],
)
def test_another_model_or_optimizer_is_refused_and_nothing_changes(tmp_path, options, message):
    write(tmp_path, 2, 2)
    model, optimizer = _sharded(**options)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(tmp_path, model, optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.promise("ds-convert")
def test_weights_are_the_masters(tmp_path):
    truth = write(tmp_path / "theirs", 3, 2)
    convert_weights(tmp_path / "theirs", tmp_path / "exact", max_file_bytes=200)
    entries, reader = open_index(tmp_path / "exact"), Reader()
    assert "head.weight" not in entries and len({entry.path for entry in entries.values()}) > 1
    for name, states in truth.values.items():
        found = reader.read(entries[name], 0, entries[name].numel)
        assert torch.equal(found.view(entries[name].shape), states["fp32"])
    with pytest.raises(ConfigError, match="to copy: name the original model's folder, or leave model= out"):
        convert_weights(tmp_path / "theirs", tmp_path / "half", model=tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "net"}))
    convert_weights(tmp_path / "theirs", tmp_path / "half", dtype=torch.bfloat16, model=tmp_path)
    entry = open_index(tmp_path / "half")["a.weight"]
    assert torch.equal(reader.read(entry, 0, 35), truth.values["a.weight"]["fp32"].bfloat16().reshape(-1))
    assert (tmp_path / "half" / "config.json").is_file()


def _stop(monkeypatch, error, after):
    reads, read = iter(range(after)), Pieces.read

    def stopping(self, *arguments):
        if next(reads, None) is None:
            raise error
        return read(self, *arguments)

    monkeypatch.setattr(Pieces, "read", stopping)


@pytest.mark.promise("ds-convert")
@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_nothing_half_written_passes_for_a_checkpoint(tmp_path, monkeypatch, error):
    write(tmp_path / "theirs", 2, 2)
    truth = write(tmp_path / "earlier", 1, 1)
    convert(tmp_path / "earlier", tmp_path / "ours")
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, CheckpointError)):
        _stop(patch, error, 8)
        convert(tmp_path / "theirs", tmp_path / "ours")
    model, optimizer = _sharded()
    zero_core.checkpoint.load(tmp_path / "ours", model, optimizer)
    _compare(model, optimizer, truth)
    with monkeypatch.context() as patch, pytest.raises((KeyboardInterrupt, PretrainedError)):
        _stop(patch, error, 5)
        convert_weights(tmp_path / "theirs", tmp_path / "weights")
    with pytest.raises(PretrainedError, match="holds no"):
        open_index(tmp_path / "weights")
