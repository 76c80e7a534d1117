"""Deferred and pretrained models in shards: the same weights at every world size and stage, and out again."""

import weakref
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_core
from tests import kit, models
from tests.integration.zero_core import checkpoint_runs as runs
from zero_core.errors import DeferredInitError
from zero_core.model.init_recording import Recording
from zero_core.precision import round_to


def shard(model: nn.Module, stage: int, **options):
    return zero_core.shard(model, runs.adamw(model.parameters()), stage=stage, **options)


def deferred_values(name: str, stage: int, seed: int | None) -> dict[str, torch.Tensor]:
    torch.manual_seed(4 if seed is None else runs.world()[0])
    with zero_core.deferred_init(seed=seed):
        model = models.drawn(name)  # not build(), which seeds
    optimizer = shard(model, stage)
    values = kit.named_values(model, master=True)
    runs.train(model, optimizer, 0, 1)
    optimizer.close()
    return values


@pytest.mark.promise("deferred-same-weights")
@pytest.mark.parametrize("name", ["llama", "gpt2", "moe", "t5"])
def test_the_same_seed_gives_the_same_weights_everywhere(ranks, name: str) -> None:
    expected = deferred_values(name, 0, 4)
    cases = [(1, 3, 4), (1, 3, None), (2, 3, 4), (2, 1, 4)]
    for size, stage, seed in cases if name == "llama" else cases[2:3]:
        for values in ranks(size).run(deferred_values, name, stage, seed):
            torch.testing.assert_close(values, expected, rtol=0, atol=0)


@pytest.mark.promise("deferred-one-at-a-time")
def test_one_whole_parameter_is_alive_at_a_time(monkeypatch) -> None:
    """Materialisation goes parameter by parameter, so what it costs beyond the shards is one of them."""
    alive: list[weakref.ref[torch.Tensor]] = []
    replay = Recording.replay

    def watched(self: Recording, tensor: torch.Tensor) -> torch.Tensor:
        assert not any(reference() is not None for reference in alive), "an earlier whole value is still there"
        value = replay(self, tensor)
        alive.append(weakref.ref(value))
        return value

    with zero_core.deferred_init(seed=0):
        model = models.build("llama")
    monkeypatch.setattr(Recording, "replay", watched)
    shard(model, 3)
    assert len(alive) == len(list(model.parameters()))


@kit.on_ranks(2)
def test_ranks_with_different_seeds_are_told() -> None:
    def built(**options) -> nn.Module:
        with zero_core.deferred_init(**options):
            return nn.Linear(4, 1)

    rank = kit.world()[0]
    told = r"different seeds, \[\[0\], \[1\]\]: call torch.manual_seed with one seed .* or deferred_init\(seed=...\)"
    with pytest.raises(DeferredInitError, match=told):
        shard(built(seed=rank), 3)
    torch.manual_seed(7)
    seeded = built()
    torch.manual_seed(rank)
    for model in (seeded, built(seed=7)):
        shard(model, 3)


def into_shards(folder: Path, how: str, stage: int, dtype) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)
    with zero_core.deferred_init() if how == "deferred" else nullcontext():
        model = models.build("llama")
    if how == "deferred":
        zero_core.load_pretrained(model, folder)
    optimizer = shard(model, stage, param_dtype=dtype)
    if how == "sharded":
        runs.train(model, optimizer, 0, 1)
        report = zero_core.load_pretrained(model, folder)
        numel = sum(p.numel() for p in model.parameters())
        assert report.read_bytes <= 4 * (numel // (runs.world()[1] if stage else 1) + 4096)
    values = kit.named_values(model, master=True)
    optimizer.close()
    return values


def out_of_shards(folder: Path, stage: int, dtype) -> dict[str, torch.Tensor]:
    model, optimizer = runs.make("llama", stage, seed=1, dtype=dtype)
    runs.train(model, optimizer, 0, 2)
    zero_core.save_pretrained(model, folder, max_file_bytes=40_000)
    values = kit.named_values(model, master=True)
    optimizer.close()
    return values


def read(folder: Path) -> dict[str, torch.Tensor]:
    from transformers import AutoModelForCausalLM

    return {name: p.detach() for name, p in AutoModelForCausalLM.from_pretrained(folder).named_parameters()}


@pytest.mark.promise("pretrained-slices")
@pytest.mark.parametrize("size", [1, 2])
def test_pretrained_weights_go_in_and_out_slice_by_slice(ranks, tmp_path: Path, size: int) -> None:
    trained = ranks(size).run(out_of_shards, tmp_path, 3, None)[0]
    assert len(list(tmp_path.glob("*.safetensors"))) > 1 and not list(tmp_path.glob("*.partial"))
    torch.testing.assert_close(read(tmp_path), trained, rtol=0, atol=0)
    for how, stage, dtype in (("deferred", 3, None), ("sharded", 3, torch.bfloat16), ("sharded", 1, None)):
        for values in ranks(size).run(into_shards, tmp_path, how, stage, dtype):
            torch.testing.assert_close(values, trained, rtol=0, atol=0)


def test_bf16_parameters_are_saved_as_the_model_computes_with_them(tmp_path: Path) -> None:
    masters = out_of_shards(tmp_path, 3, torch.bfloat16)
    for key, parameter in read(tmp_path).items():
        expected = torch.empty_like(parameter, dtype=torch.bfloat16)
        round_to(masters[key].flatten(), expected.view(-1))
        torch.testing.assert_close(parameter, expected, rtol=0, atol=0)
