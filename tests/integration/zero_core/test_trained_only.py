"""Checkpoints of what is trained: what is in them, that a run resumes from them, and what does not fit them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core import checkpoint
from zero_core.errors import CheckpointError, ZeroError

pytestmark = pytest.mark.promise("trained-only")

TRAINED = ("blocks.1.norm.bias", "blocks.1.norm.weight", "blocks.1.up.bias", "blocks.1.down.weight")


class Based(toys.Frozen):
    """A base of bytes and of fp32, a trained part, and a buffer that counts."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(7 * width, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (self.codes.sum() % 5 + 1)


def make(stage: int, **options: Any) -> tuple[nn.Module, Any]:
    torch.manual_seed(1)
    model = Based(**options)
    return model, zero_core.shard(model, toys.adamw(model.parameters()), stage=stage, max_grad_norm=0.5)


def losses(model: nn.Module, optimizer: Any, first: int, last: int) -> list[float]:
    """The same four batches a step, shared by the ranks."""
    rank, size = toys.world()
    found = []
    for step in range(first, last):
        total = torch.zeros((), dtype=torch.float64)
        for micro in range(rank, 4, size):
            loss = toys.loss_of(model, toys.data(step, micro)) * (size / 4)
            loss.backward()
            total += loss.detach().double() / size
        if size > 1:
            torch.distributed.all_reduce(total)
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(total))
    return found


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    return kit.named_values(model, master=True)


def save_and_go_on(folder: Path, stage: int) -> tuple[list[str], dict[str, torch.Tensor], list[float]]:
    model, optimizer = make(stage)
    losses(model, optimizer, 0, 3)
    checkpoint.save(folder, model, optimizer, trained_only=True, tile_numel=50)
    kept = masters(model)
    names = sorted(FileSystemReader(folder).read_metadata().state_dict_metadata)
    return names, kept, losses(model, optimizer, 3, 6)


def load_and_go_on(folder: Path, stage: int) -> tuple[Any, dict[str, torch.Tensor], list[float], int]:
    model, optimizer = make(stage)
    losses(model, optimizer, 7, 9)
    loaded = checkpoint.load(folder, model, optimizer, tile_numel=30)
    return loaded, masters(model), losses(model, optimizer, 3, 6), int(model.calls)


@pytest.mark.parametrize("size, then, stage", [(1, 1, 3), (2, 2, 3), (2, 1, 2), (1, 2, 3)])
def test_a_run_resumes_from_what_is_trained(ranks: Any, tmp_path: Path, size: int, then: int, stage: int) -> None:
    """Fails if something trained is not saved, not loaded, or not where it belongs at another world size."""
    names, kept, expected = ranks(size).run(save_and_go_on, tmp_path, stage)[0]
    trained = {name.removeprefix("model.") for name in names if name.startswith("model.")}
    assert trained >= {*TRAINED, "calls"} and not any(n.startswith(("embed", "blocks.0", "codes")) for n in trained)
    loaded, restored, found, _ = ranks(then).run(load_and_go_on, tmp_path, stage)[0]
    assert loaded.step == 3 and all(torch.equal(restored[name], kept[name]) for name in kept)
    assert found == (expected if size == then else pytest.approx(expected, rel=1e-5))


@pytest.mark.parametrize("how", ["data", "gathered", "load_pretrained", "read"])
@kit.on_ranks(1, 2)
def test_what_was_written_is_kept_though_it_is_not_trained(tmp_path: Path, how: str) -> None:
    """Fails if a merge into the base is lost, or if reading the base makes the checkpoint as large as the model."""
    (model, optimizer), (second, other) = make(3), make(3)
    weight = model.blocks[0].up.weight
    if how == "data":
        weight.data += 1
    elif how == "gathered":
        with zero_core.gathered(model), torch.no_grad():
            if toys.world()[0] == 0:
                weight.view(-1)[-1] += 1  # in one rank's slice only
    elif how == "load_pretrained":
        zero_core.save_pretrained(model, tmp_path / "base")
        zero_core.load_pretrained(model, tmp_path / "base")
    elif how == "read":
        with zero_core.gathered(model), torch.no_grad():
            model(toys.data(0, 0))
    checkpoint.save(tmp_path / "run", model, optimizer, trained_only=True)
    checkpoint.load(tmp_path / "run", second, other)
    values = masters(second)
    assert all(torch.equal(value, values[name]) for name, value in masters(model).items())
    checkpoint.save(tmp_path / "again", second, other, trained_only=True)
    names = [set(FileSystemReader(tmp_path / each).read_metadata().state_dict_metadata) for each in ("run", "again")]
    assert names[0] == names[1]
    untrained = {n for n in names[0] if n.startswith("model.") and n[6:].startswith(("embed", "blocks.0", "codes"))}
    assert untrained == ({"model.blocks.0.up.weight"} if how in ("data", "gathered") else set())


def test_what_is_named_is_kept_though_it_is_not_trained(tmp_path: Path) -> None:
    """Fails if a name that a tied parameter also has does not keep it, or what was kept is not loaded."""
    model, optimizer = make(3)
    model.tied = model.embed  # type: ignore[assignment]
    wanted = masters(model)["embed.weight"].clone()
    checkpoint.save(tmp_path, model, optimizer, trained_only=True, also=lambda name: name == "tied.weight")
    saved = set(FileSystemReader(tmp_path).read_metadata().state_dict_metadata)
    assert {"model.embed.weight", "model.tied.weight"} <= saved and "model.embed.bias" not in saved
    torch.manual_seed(2)
    other = Based()
    other.tied = other.embed
    zero_core.shard(other, toys.adamw(other.parameters()))
    assert not torch.equal(masters(other)["embed.weight"], wanted)
    checkpoint.load(tmp_path, other)
    assert torch.equal(masters(other)["embed.weight"], wanted)


def test_a_checkpoint_of_what_is_trained_fits_only_its_base(tmp_path: Path) -> None:
    model, optimizer = make(3)
    checkpoint.save(tmp_path, model, optimizer, trained_only=True)
    wider, other = make(3, width=4)
    with pytest.raises(CheckpointError, match=r"codes: \(21,\), model \(28,\).*as they were when the run was saved"):
        checkpoint.load(tmp_path, wider, other)
    torch.manual_seed(1)
    thawed = Based()
    thawed.embed.requires_grad_(True)
    more = zero_core.shard(thawed, toys.adamw(thawed.parameters()))
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.embed\.weight, model\.embed\.bias"):
        checkpoint.load(tmp_path, thawed, more)
    before = masters(thawed)
    checkpoint.load(tmp_path, thawed, strict=False)
    assert torch.equal(masters(thawed)["embed.weight"], before["embed.weight"])
    torch.manual_seed(1)
    deeper = Based()
    deeper.extra = nn.Linear(2, 2).requires_grad_(False)
    handle = zero_core.shard(deeper)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.extra\.weight"):
        checkpoint.load(tmp_path, deeper)
    handle.close()


@pytest.mark.advice("sharded models: save each apart")
@kit.on_ranks(1, 2)
def test_a_part_of_a_sharded_model_is_saved(tmp_path: Path) -> None:
    """A part of a model is written by all ranks; parts of two models are refused."""
    models = [make(3)[0] for _ in range(2)]
    zero_core.save_pretrained(models[0].blocks, tmp_path)
    expected = {name: value.clone() for name, value in models[0].blocks.state_dict().items()}
    part = toys.Frozen().blocks
    zero_core.load_pretrained(part, tmp_path)
    assert all(torch.equal(value, expected[name]) for name, value in part.state_dict().items())
    with pytest.raises(ZeroError, match="parameters of 2 sharded models"):
        zero_core.save_pretrained(nn.ModuleList(models), tmp_path)
    with pytest.raises(ZeroError, match="is not sharded"):
        checkpoint.save(tmp_path, models[0].blocks)


def test_a_state_dict_of_what_is_trained() -> None:
    model, _ = make(3)
    whole = model.state_dict()
    found = zero_core.trained_state_dict(model, also=lambda name: name == "codes")
    left_out = {name for name in whole if name.startswith(("embed", "blocks.0", "blocks.1.up.weight"))}
    assert set(found) == set(whole) - left_out and all(torch.equal(found[name], whole[name]) for name in found)
    with pytest.raises(ZeroError, match="no sharded parameter"):
        zero_core.trained_state_dict(Based())
