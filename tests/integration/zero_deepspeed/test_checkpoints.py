"""Checkpoints that the real DeepSpeed wrote, continued here: `nox -s deepspeed`. Skipped where it is not installed."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zero_core
from tests import kit
from zero_deepspeed.checkpoint import load_checkpoint
from zero_deepspeed.files import FilesError, open_checkpoint
from zero_deepspeed.schedules import WarmupLR

from .model import SAVED_AFTER, SCHEDULE, STEPS, Model, groups, rows, torchrun

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.timeout(900)

CPU = {"device": "cpu"}
RUNS = {
    "1": {"stage": 1},
    "1-cpu": {"stage": 1, "offload": CPU},
    "2": {"stage": 2},
    "2-cpu": {"stage": 2, "offload": CPU, "zero": {"round_robin_gradients": True}},
    "3": {"stage": 3},
    "3-cpu": {"stage": 3, "offload": CPU, "zero": {"sub_group_size": 700}},
    "2-bf16": {"stage": 2, "dtype": "bf16"},
    "3-fp16": {"stage": 3, "dtype": "fp16"},
    "1-bf16-elsewhere": {"stage": 1, "dtype": "bf16", "config": {"data_types": {"grad_accum_dtype": "fp32"}}},
    "1-elastic": {"stage": 1, "zero": {"elastic_checkpoint": True}},
    "2-aligned": {"stage": 2, "zero": {"parameter_alignment": True}},
    "3-all-cpu": {"stage": 3, "offload": CPU, "zero": {"offload_param": CPU, "stage3_param_persistence_threshold": 0}},
    "2-frozen-excluded": {"stage": 2, "exclude": True},
    "3-frozen-excluded": {"stage": 3, "exclude": True},
    "1-sgd": {"stage": 1, "torch": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
    # DeepSpeed makes one group of what its Adagrad is given
    "2-adagrad": {"stage": 2, "groups": 1, "torch": {"type": "Adagrad", "lr": 0.01}},
}
TOLERANCE = {"bf16": 2e-2, "fp16": 4e-3}


def _train(folder: Path, size: int, runs: dict) -> None:
    torchrun(size, Path(__file__).with_name("runs.py"), folder, json.dumps(runs))


@pytest.fixture(scope="module", params=[1, 2])
def trained(request, tmp_path_factory):
    """Folders of DeepSpeed's runs on one rank and on two."""
    folder = tmp_path_factory.mktemp(f"deepspeed{request.param}")
    _train(folder, request.param, RUNS)
    return folder


def _continue(folder, name, given, stage):
    """Losses of the steps after the checkpoint, on this rank."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(99)
    model = Model(given.get("width", 18))
    if given.get("exclude"):  # the base has to be built as it was
        torch.manual_seed(0)
        model = Model()
    options = dict(given.get("torch") or {"type": "AdamW", "lr": 1e-3})
    plain = getattr(torch.optim, options.pop("type"))(groups(model)[: given.get("groups")], **options)
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(given.get("dtype"))
    scale = zero_core.LossScale(2.0**10, window=4, first_window=5, hysteresis=2) if half == torch.float16 else None
    optimizer = zero_core.shard(model, plain, stage=stage, param_dtype=half, loss_scale=scale, max_grad_norm=1.0)
    scheduler = None if "torch" in given else WarmupLR(optimizer, **SCHEDULE)
    loaded = load_checkpoint(folder / name, model, optimizer, scheduler=scheduler)
    assert (loaded.global_steps, loaded.client_state["epoch"]) == (SAVED_AFTER, 3)
    assert loaded.client_state["order"].tolist() == [0, 1, 2]
    assert model.seen.item() == SAVED_AFTER
    losses = []
    for step in range(SAVED_AFTER, STEPS):
        loss = model(*rows(step, rank, size))
        kit.step(optimizer, loss)
        if scheduler is not None:
            scheduler.step()
        total = loss.detach().float().clone()
        if size > 1:
            dist.all_reduce(total)
        losses.append(float(total / size))
    found = losses, [group["lr"] for group in optimizer.param_groups], scale.value if scale is not None else 1.0
    optimizer.close()
    return found


@pytest.mark.promise("ds-next-losses")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", RUNS)
def test_the_next_ten_losses_are_deepspeeds(trained, ranks, name, size):
    given = RUNS[name]
    stage = 3 if size == 2 else given["stage"]
    losses, rates, scale = ranks(size).run(_continue, trained, name, given, stage)[0]
    wanted = json.loads((trained / f"{name}.json").read_text())
    tolerance = TOLERANCE.get(given.get("dtype"), 1e-5)
    assert losses == pytest.approx(wanted["losses"], rel=tolerance)
    if "torch" not in given:
        assert rates == pytest.approx([wanted["lr"][0]] * 2, rel=1e-12)
    assert scale == (wanted["scale"] if given.get("dtype") == "fp16" else 1.0)


@pytest.mark.promise("ds-weights")
@pytest.mark.parametrize("name", RUNS)
def test_weights_and_states_are_deepspeeds_bit_for_bit(trained, name):
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    found = open_checkpoint(trained / name)
    wanted = {}
    if name != "1-bf16-elsewhere":  # zero_to_fp32 does not read BF16_Optimizer's
        with contextlib.redirect_stdout(io.StringIO()):
            wanted = get_fp32_state_dict_from_zero_checkpoint(str(trained / name))
    tensors = {**found.tensors, **{alias: found.tensors[name] for alias, name in found.aliases.items()}}
    values = {
        n.removeprefix("model."): p.read(0, torch.Size(p.shape).numel()).view(p.shape) for n, p in tensors.items()
    }
    assert not wanted.keys() - values.keys()
    trained_names = {name for group in found.run["groups"] for name in group["params"]}
    assert not wanted or not trained_names - wanted.keys()  # zero_to_fp32 loses the frozen ones of stage 1
    assert all(torch.equal(values[n].float(), value.float()) for n, value in wanted.items())
    if "round_robin_gradients" not in RUNS[name].get("zero", {}):  # with it safe_get_full_* mixes parameters up
        _compare_states(found, trained / f"{name}.pt")


def _compare_states(found, truth):
    for name, (master, *moments) in torch.load(truth).items():
        names = f"model.{name}", *(f"optim.state.{name}.{key}" for key in ("exp_avg", "exp_avg_sq")[: len(moments)])
        for each, value in zip(names, (master, *moments), strict=True):
            assert torch.equal(found.tensors[each].read(0, value.numel()), value.reshape(-1).float())


@pytest.mark.promise("ds-swap-files")
def test_masters_and_states_in_swap_files_are_refused(tmp_path):
    """zero_to_fp32 refuses such a checkpoint, too."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if not AsyncIOBuilder().is_compatible():
        pytest.skip("DeepSpeed's async_io needs libaio")
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    _train(tmp_path, 1, {"nvme": {"stage": 3, "width": 30000, "zero": {"sub_group_size": 500_000}, "offload": nvme}})
    with pytest.raises(FilesError, match="has masters and states in swap files on NVMe, which are not read here"):
        open_checkpoint(tmp_path / "nvme")
