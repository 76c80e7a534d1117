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


class Based(toys.Frozen):
    """A base of bytes and of fp32, a trained part, and a buffer that counts."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.arange(7 * width, dtype=torch.uint8), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (self.codes.sum() % 5 + 1)


def make(stage: int, **options: Any) -> tuple[Any, Any]:
    return kit.sharded(based(**options), toys.adamw, stage=stage, max_grad_norm=0.5)


def based(seed: int = 1, **options: Any) -> Any:
    torch.manual_seed(seed)
    return Based(**options)


def names_in(folder: Path) -> list[str]:
    return sorted(FileSystemReader(folder).read_metadata().state_dict_metadata)


@pytest.mark.parametrize("how", ["data", "gathered", "load_pretrained", "read"])
@kit.on_ranks(1, 2)
def test_what_was_written_is_kept_though_it_is_not_trained(tmp_path: Path, how: str) -> None:
    """Fails if a merge into the base is lost, or if reading the base makes the checkpoint as large as the model."""
    (model, optimizer), (second, other) = make(3), make(3)
    weight = model.blocks[0].up.weight
    if how == "data":
        weight.data += 1
    elif how == "load_pretrained":
        zero_core.save_pretrained(model, tmp_path / "base")
        zero_core.load_pretrained(model, tmp_path / "base")
    else:
        with zero_core.gathered(model), torch.no_grad():
            if how == "read":
                model(toys.data(0, 0))
            elif toys.world()[0] == 0:
                weight.view(-1)[-1] += 1  # in one rank's slice only
    checkpoint.save(tmp_path / "run", model, optimizer, trained_only=True)
    checkpoint.load(tmp_path / "run", second, other)
    kit.assert_bits(kit.values(second, master=True), kit.values(model, master=True))
    checkpoint.save(tmp_path / "again", second, other, trained_only=True)
    names = names_in(tmp_path / "run")
    assert names == names_in(tmp_path / "again")
    untrained = {n for n in names if n.startswith("model.") and n[6:].startswith(("embed", "blocks.0", "codes"))}
    assert untrained == ({"model.blocks.0.up.weight"} if how in ("data", "gathered") else set())


def embedding(model: nn.Module) -> torch.Tensor:
    return kit.named_values(model, master=True)["embed.weight"]


def test_what_is_named_is_kept_though_it_is_not_trained(tmp_path: Path) -> None:
    """Fails if a name that a tied parameter also has does not keep it, or what was kept is not loaded."""
    model, optimizer = make(3)
    model.tied = model.embed
    wanted = embedding(model)
    checkpoint.save(tmp_path, model, optimizer, trained_only=True, also=lambda name: name == "tied.weight")
    saved = names_in(tmp_path)
    assert {"model.embed.weight", "model.tied.weight"} <= set(saved) and "model.embed.bias" not in saved
    other = based(seed=2)
    other.tied = other.embed
    zero_core.shard(other, toys.adamw(other.parameters()))
    assert not torch.equal(embedding(other), wanted)
    checkpoint.load(tmp_path, other)
    assert torch.equal(embedding(other), wanted)
    whole = model.state_dict()
    found = zero_core.trained_state_dict(model, also=lambda name: name == "codes")
    left_out = {name for name in whole if name.startswith(("embed", "tied", "blocks.0", "blocks.1.up.weight"))}
    assert set(found) == set(whole) - left_out and all(torch.equal(found[name], whole[name]) for name in found)
    with pytest.raises(ZeroError, match="no sharded parameter"):
        zero_core.trained_state_dict(Based())


def test_a_checkpoint_of_what_is_trained_fits_only_its_base(tmp_path: Path) -> None:
    model, optimizer = make(3)
    checkpoint.save(tmp_path, model, optimizer, trained_only=True)
    wider, other = make(3, width=4)
    with pytest.raises(CheckpointError, match=r"codes \(saved \(21,\), here \(28,\)\).*and the same parameters frozen"):
        checkpoint.load(tmp_path, wider, other)
    thawed = based()
    thawed.embed.requires_grad_(True)
    more = zero_core.shard(thawed, toys.adamw(thawed.parameters()))
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.embed\.weight, model\.embed\.bias"):
        checkpoint.load(tmp_path, thawed, more)
    before = embedding(thawed)
    checkpoint.load(tmp_path, thawed, strict=False)
    assert torch.equal(embedding(thawed), before)
    deeper = based()
    deeper.extra = nn.Linear(2, 2).requires_grad_(False)
    zero_core.shard(deeper)
    with pytest.raises(CheckpointError, match=r"missing from the checkpoint: model\.extra\.weight"):
        checkpoint.load(tmp_path, deeper)


@pytest.mark.advice("sharded models: save and load each of these alone")
@kit.on_ranks(1, 2)
def test_a_part_of_a_sharded_model_is_saved(tmp_path: Path) -> None:
    """A part of a model is written by all ranks; parts of two models are refused."""
    models = [make(3)[0] for _ in range(2)]
    zero_core.save_pretrained(models[0].blocks, tmp_path)
    part = toys.Frozen().blocks
    zero_core.load_pretrained(part, tmp_path)
    kit.assert_bits(part.state_dict(), models[0].blocks.state_dict())
    with pytest.raises(ZeroError, match="parameters of 2 sharded models"):
        zero_core.save_pretrained(nn.ModuleList(models), tmp_path)
    with pytest.raises(ZeroError, match="is not sharded"):
        checkpoint.save(tmp_path, models[0].blocks)
