"""One checkpoint at every world size and stage, in plain torch and in FSDP2, and back."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from tests import kit, models
from tests.integration.zero_core import checkpoint_runs as runs
from tests.integration.zero_core import toys
from zero_core import checkpoint

# Losses of runs that differ in the order of additions only; four ranks sum gradients differently from one.
CLOSE = {"rel": 1e-5}


def plain_state(model: Any, optimizer: Any, flatten: bool = False) -> dict[str, Any]:
    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flatten))
    return {"model": weights, "optim": states}


def load_stock(folder: Path, model: Any, optimizer: Any, flatten: bool = False) -> None:
    state = plain_state(model, optimizer, flatten)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(state, checkpoint_id=folder)
    options = StateDictOptions(flatten_optimizer_state_dict=flatten)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"], options=options)


def plain_go_on(folder: Path, name: str) -> list[float]:
    model = models.build(name, seed=5)
    optimizer = runs.adamw(model.parameters())
    scheduler = runs.halving(optimizer)
    load_stock(folder, model, optimizer)
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt"))
    return runs.train(model, optimizer, 3, 7, clip=True, scheduler=scheduler)


def fsdp_go_on(folder: Path, back: Path, name: str, flatten: bool) -> list[float]:
    """FSDP2 takes our checkpoint, trains a step, and saves one of its own before it goes on."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = models.build(name, seed=5)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = runs.adamw(model.parameters())
    scheduler = runs.halving(optimizer)
    load_stock(folder, model, optimizer, flatten)
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt"))
    losses = runs.train(model, optimizer, 3, 4, clip=True, scheduler=scheduler)
    dcp.save(plain_state(model, optimizer, flatten), checkpoint_id=back)
    if dist.get_rank() == 0:
        torch.save(scheduler.state_dict(), back / "scheduler.pt")
    return losses + runs.train(model, optimizer, 4, 7, clip=True, scheduler=scheduler)


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> tuple[Path, list[float]]:
    """A Llama saved at 4 ranks, stage 3; and the losses of its next four steps, over which the rate is halved twice."""
    folder = tmp_path_factory.mktemp("saved") / "checkpoint"
    return folder, ranks(4).run(runs.save_and_go_on, folder, "llama", 3)[0]


@pytest.mark.promise("checkpoint-worlds")
@pytest.mark.parametrize(("size", "stage"), [(4, 3), (4, 1), (2, 2), (2, 0), (1, 3), (1, 0)])
def test_four_ranks_stage_3_load_anywhere(ranks, saved, size: int, stage: int) -> None:
    folder, expected = saved
    for loaded, losses in ranks(size).run(runs.load_and_go_on, folder, "llama", stage):
        assert (loaded.step, loaded.world_size, loaded.extra) == (3, 4, {"stage": 3})
        assert losses == expected if (size, stage) == (4, 3) else losses == pytest.approx(expected, **CLOSE)


@pytest.mark.promise("checkpoint-plain-torch")
def test_and_in_plain_torch_with_nothing_of_ours(saved) -> None:
    folder, expected = saved
    assert plain_go_on(folder, "llama") == pytest.approx(expected, **CLOSE)


@pytest.mark.promise("checkpoint-both-ways")
@kit.on_ranks(2)
def test_weights_that_were_cut_along_their_columns_are_read(tmp_path: Path) -> None:
    """As tensor parallelism cuts some. Fails if parts of several rows are taken for one run of elements."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    torch.manual_seed(5)
    wanted, mesh = toys.Stack().state_dict(), init_device_mesh("cpu", (2,))
    cut = {name: distribute_tensor(value, mesh, [Shard(value.dim() - 1)]) for name, value in wanted.items()}
    dcp.save({"model": cut}, checkpoint_id=tmp_path)
    model, optimizer = kit.sharded(toys.Stack, toys.adamw)
    checkpoint.load(tmp_path, model)
    kit.assert_bits(kit.named_values(model), dict(wanted))
    optimizer.close()


def load_after_fsdp(folder: Path, name: str) -> list[float]:
    model, optimizer = runs.make(name, 3, seed=11)
    scheduler = runs.halving(optimizer)
    loaded = checkpoint.load(folder, model, optimizer, tile_numel=300)
    assert not loaded.ours and loaded.step == 4
    scheduler.load_state_dict(torch.load(folder / "scheduler.pt"))
    losses = runs.train(model, optimizer, 4, 7, scheduler=scheduler)
    optimizer.close()
    return losses


def save_again(folder: Path, out: Path, name: str, flatten: bool) -> None:
    model, optimizer = runs.make(name, 3, seed=11)
    checkpoint.load(folder, model, optimizer)
    checkpoint.save(out, model, optimizer, flatten=flatten)
    optimizer.close()


@pytest.mark.promise("checkpoint-fsdp2")
@pytest.mark.parametrize("flatten", [False, True])
@pytest.mark.parametrize("size", [1, 2])
def test_and_in_fsdp2_and_back(ranks, saved, tmp_path: Path, size: int, flatten: bool) -> None:
    """In both layouts of torch's state dicts of optimizers, written and read by as many ranks."""
    folder, expected = saved
    ranks(size).run(save_again, folder, tmp_path / "ours", "llama", flatten)
    shutil.copyfile(folder / "scheduler.pt", tmp_path / "ours" / "scheduler.pt")
    for losses in ranks(2).run(fsdp_go_on, tmp_path / "ours", tmp_path / "fsdp", "llama", flatten):
        assert losses == pytest.approx(expected, **CLOSE)
    for losses in ranks(size).run(load_after_fsdp, tmp_path / "fsdp", "llama"):
        assert losses == pytest.approx(expected[1:], **CLOSE)


@pytest.mark.promise("checkpoint-ties")
@pytest.mark.parametrize("name", ["gpt2", "t5", "moe"])
def test_ties_and_experts_go_from_two_ranks_to_four_and_to_one(ranks, tmp_path: Path, name: str) -> None:
    expected = ranks(2).run(runs.save_and_go_on, tmp_path, name, 3)[0]
    for size, stage in ((4, 2), (1, 3)):
        for _, losses in ranks(size).run(runs.load_and_go_on, tmp_path, name, stage):
            assert losses == pytest.approx(expected, **CLOSE)
    if name != "moe":
        assert plain_go_on(tmp_path, name) == pytest.approx(expected, **CLOSE)


@pytest.mark.promise("resume-exact")
@pytest.mark.parametrize(("stage", "dtype"), [(0, torch.bfloat16), (1, None), (3, torch.bfloat16)])
def test_the_same_world_and_stage_resume_bit_for_bit(ranks, tmp_path: Path, stage: int, dtype) -> None:
    """With dropout, so every rank's random state is restored as well, and a rate that changes."""
    dropout = {"attention_dropout": 0.2}
    expected = ranks(2).run(runs.save_and_go_on, tmp_path, "llama", stage, dtype, dropout)
    resumed = ranks(2).run(runs.load_and_go_on, tmp_path, "llama", stage, dtype, dropout)
    assert [losses for _, losses in resumed] == expected


def hybrid_go_on(folder: Path, save: bool) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    run = runs.save_and_go_on if save else runs.load_and_go_on
    return run(folder, "llama", 3, mesh=mesh)


def test_replicas_write_each_box_once_and_resume_exactly(ranks, tmp_path: Path) -> None:
    expected = ranks(4).run(hybrid_go_on, tmp_path, True)
    data_bytes = sum(path.stat().st_size for path in tmp_path.glob("*.distcp"))
    numel = sum(p.numel() for p in models.build("llama").parameters())
    assert 12 * numel < data_bytes < 12 * numel + (1 << 20)  # three fp32 values, and torch.save's frame around each box
    assert [losses for _, losses in ranks(4).run(hybrid_go_on, tmp_path, False)] == expected
    for _, losses in ranks(2).run(runs.load_and_go_on, tmp_path, "llama", 3):
        assert losses == pytest.approx(expected[0], **CLOSE)


@pytest.mark.promise("checkpoint-buffers")
@kit.on_ranks(2)
def test_buffers_are_those_of_rank_0(tmp_path):
    """Each rank's running statistics are its own; rank 0's are kept, all of them."""
    model, optimizer = kit.sharded(lambda: torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4)))
    torch.manual_seed(toys.world()[0])
    model(torch.randn(3, 5))
    expected = [None, None]
    dist.all_gather_object(expected, list(model.buffers()))
    checkpoint.save(tmp_path, model, optimizer)
    checkpoint.load(tmp_path, model, optimizer)
    assert all(torch.equal(one, right) for one, right in zip(model.buffers(), expected[0], strict=True))


@pytest.mark.promise("checkpoint-extra")
@kit.on_ranks(2)
def test_extra_is_what_rank_0_gave(tmp_path: Path) -> None:
    """Fails if torch chooses whose object is written by how much each rank writes."""
    model, optimizer = runs.make("llama", 3, seed=1)
    for option in ("one", "more"):  # with either an odd number of small values is written
        optimizer.param_groups[0][option] = 1
        checkpoint.save(tmp_path, model, optimizer, extra=runs.world()[0])
        assert checkpoint.load(tmp_path, model, optimizer).extra == 0
