"""Weights of real architectures in and out, against `transformers` itself."""

import errno
import os
from contextlib import nullcontext
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zero_core
from tests import kit
from tests.unit.zero_core.test_init import MODELS
from zero_core.checkpoint import pretrained
from zero_core.checkpoint.pretrained import load_pretrained, save_pretrained
from zero_core.errors import PretrainedError
from zero_core.model.deferred_init import deferred_init
from zero_core.model.initial_values import materialise
from zero_core.model.tiled_linear import TiledLinear, tile_linear

JOINING = "torch.distributed.checkpoint._consolidate_hf_safetensors"


def build(name: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return MODELS[name]()


def same_weights(got: nn.Module, expected: nn.Module) -> None:
    kit.assert_bits(dict(got.named_parameters()), dict(expected.named_parameters()))


def llama(tied: bool, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=67, tie_word_embeddings=tied, **sizes))


@pytest.mark.parametrize("name", ["llama", "gpt2", "mixtral", "t5", "bert"])
@pytest.mark.parametrize("max_file_bytes", [5 << 30, 60_000])
def test_what_is_saved_transformers_loads(name: str, max_file_bytes: int, tmp_path: Path) -> None:
    source = build(name, 1)
    save_pretrained(source, tmp_path, max_file_bytes=max_file_bytes)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (max_file_bytes == 60_000)
    assert not list(tmp_path.glob("*.partial"))
    loaded, info = type(source).from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    same_weights(loaded, source)
    again = build(name, 2)
    load_pretrained(again, tmp_path)
    same_weights(again, source)


def test_a_second_save_leaves_no_file_of_the_first(tmp_path: Path) -> None:
    model = build("llama", 1)
    save_pretrained(model, tmp_path, max_file_bytes=60_000)
    save_pretrained(model, tmp_path)
    assert sorted(p.name for p in tmp_path.glob("model*")) == ["model.safetensors"]


def test_the_base_models_weights_fit_the_whole_and_back(tmp_path: Path) -> None:
    source = build("llama", 1)
    source.model.save_pretrained(tmp_path / "base")
    source.save_pretrained(tmp_path / "whole")
    model = build("llama", 2)
    report = load_pretrained(model, tmp_path / "base", strict=False)
    assert report.missing == ("lm_head.weight",)
    assert torch.equal(model.model.layers[1].mlp.up_proj.weight, source.model.layers[1].mlp.up_proj.weight)
    base = build("llama", 2).model
    report = load_pretrained(base, tmp_path / "whole", strict=False)
    assert report.unexpected == ("lm_head.weight",)
    assert torch.equal(base.norm.weight, source.model.norm.weight)


def test_ties_are_reported_and_found_under_either_name(tmp_path: Path) -> None:
    source, model = build("gpt2", 1), build("gpt2", 2)
    source.save_pretrained(tmp_path)
    report = load_pretrained(model, tmp_path)
    assert report.tied == (("lm_head.weight", "transformer.wte.weight"),)
    other = tmp_path / "other"
    save_pretrained(source, other)
    path = other / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"transformer.wte.weight"', b'"lm_head.weight"        '))
    model = build("gpt2", 2)
    load_pretrained(model, other)
    same_weights(model, source)


def made(how: str, tied: bool) -> LlamaForCausalLM:
    with deferred_init(seed=3) if how == "deferred" else nullcontext():
        model = llama(tied, 2)
    if how == "sharded":
        zero_core.shard(model)
    return model


@pytest.mark.promise("pretrained-two-values")
@pytest.mark.parametrize("how", ["plain", "deferred", "sharded"])
def test_two_values_for_one_parameter_are_refused_and_each_way_out_loads(how: str, tmp_path: Path, monkeypatch) -> None:
    """A folder of an untied model whose config says tied. Fails if the second value is left out in silence."""
    monkeypatch.setattr(pretrained, "_TILE_NUMEL", 100)
    source = llama(False, 1)
    with torch.no_grad():
        source.lm_head.weight.copy_(source.model.embed_tokens.weight)
        source.lm_head.weight[-1, -1] += 1  # in the last tile alone
    source.save_pretrained(tmp_path)
    model = made(how, True)
    with pytest.raises(PretrainedError, match="has lm_head.weight with other values than .*: build the model"):
        load_pretrained(model, tmp_path)

    def logits(each: nn.Module) -> torch.Tensor:
        if how == "deferred" and each is not source:
            materialise(each)
        with torch.no_grad():
            return each.eval()(input_ids=torch.arange(8).view(1, 8)).logits

    untied = made(how, False)
    report = load_pretrained(untied, tmp_path)
    assert report.missing == report.unexpected == () and torch.allclose(logits(untied), logits(source), atol=1e-6)
    report = load_pretrained(model, tmp_path, strict=False)
    assert report.unexpected == ("lm_head.weight",) and report.missing == ()
    with torch.no_grad():
        source.lm_head.weight.copy_(source.model.embed_tokens.weight)
    assert torch.allclose(logits(model), logits(source), atol=1e-6)


@pytest.mark.promise("pretrained-two-values")
@pytest.mark.parametrize("other", ["the same", "in bf16", "with a NaN", "of another shape"])
def test_one_value_under_two_names_is_loaded(other: str, tmp_path: Path) -> None:
    """Fails if equal values are taken for different ones, or a tensor of another shape for an equal one."""
    source = llama(True, 1)
    source.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    weight = tensors["model.embed_tokens.weight"]
    if other == "with a NaN":
        weight[3, 5] = torch.nan
    if other == "in bf16":
        weight.copy_(weight.bfloat16())
    again = {"in bf16": weight.bfloat16(), "of another shape": weight[:60].clone()}.get(other, weight.clone())
    save_file(tensors | {"lm_head.weight": again}, tmp_path / "model.safetensors")
    model = llama(True, 2)
    if other == "of another shape":
        with pytest.raises(PretrainedError, match="with other values"):
            load_pretrained(model, tmp_path)
        return
    report = load_pretrained(model, tmp_path)
    assert report.missing == report.unexpected == ()
    torch.testing.assert_close(model.lm_head.weight.detach(), weight, rtol=0, atol=0, equal_nan=True)


def with_buffers() -> nn.Module:
    made = nn.Sequential(nn.BatchNorm1d(4))
    made[0].running_mean.normal_()
    made[0].num_batches_tracked.random_()
    return made


class Two(nn.Module):
    """The name that the base's weight could have in a file is another parameter's."""

    base_model_prefix = "model"

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = nn.ModuleDict({"head": nn.Linear(3, 3)}), nn.Linear(3, 3)


@pytest.mark.promise("pretrained-two-values")
@pytest.mark.parametrize("what", ["names of others", "buffers", "columns"])
def test_what_is_saved_loads_back(what: str, tmp_path: Path) -> None:
    """Fails if a name that a file could have for one parameter is taken for it, though it is another one's."""
    make = {"names of others": Two, "buffers": with_buffers}.get(what, lambda: nn.ModuleList([nn.Linear(10, 7)]))
    source, between, back = make(), make(), make()
    if what == "columns":
        between = nn.ModuleList([TiledLinear(10, 7, out_splits=2, in_splits=3)])
    save_pretrained(source, tmp_path)
    assert load_pretrained(between, tmp_path).unexpected == ()
    save_pretrained(between, tmp_path / "again")
    load_pretrained(back, tmp_path / "again")
    kit.assert_bits(back.state_dict(), source.state_dict())


@pytest.mark.parametrize("deferred", [True, False])
def test_tiled_linears_take_and_give_the_whole_layers_weights(deferred: bool, tmp_path: Path) -> None:
    source = build("llama", 1)
    source.save_pretrained(tmp_path)
    with deferred_init(seed=1) if deferred else nullcontext():
        model = MODELS["llama"]()
    names = tile_linear(model, 2000)
    assert "lm_head" in names and len(names) > 4
    load_pretrained(model, tmp_path)
    if deferred:
        materialise(model)
    tokens = torch.arange(8).view(1, 8)
    torch.testing.assert_close(model(input_ids=tokens).logits, source(input_ids=tokens).logits)
    save_pretrained(model, tmp_path / "out")
    same_weights(AutoModelForCausalLM.from_pretrained(tmp_path / "out"), source)


@pytest.mark.advice("pass rename= where names differ, or strict=False", "build the model as saved")
def test_misfits_are_reported_by_name(tmp_path: Path) -> None:
    save_pretrained(nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2)}), tmp_path)
    other = nn.ModuleDict({"a": nn.Linear(3, 2), "c": nn.Linear(2, 2)})
    with pytest.raises(PretrainedError, match=r"missing from the files: c.weight, c.bias \| not in the model: b\."):
        load_pretrained(other, tmp_path)
    before = other["c"].weight.clone()
    report = load_pretrained(other, tmp_path, strict=False)
    assert report.missing == ("c.weight", "c.bias") and set(report.unexpected) == {"b.weight", "b.bias"}
    assert torch.equal(other["c"].weight, before)
    load_pretrained(other, tmp_path, rename=lambda name: name.replace("c.", "b."))
    assert not torch.equal(other["c"].weight, before)
    with pytest.raises(PretrainedError, match=r"a.weight: file \(2, 3\), model \(3, 3\)"):
        load_pretrained(nn.ModuleDict({"a": nn.Linear(3, 3)}), tmp_path, strict=False)
    load_pretrained(nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2)}), tmp_path)  # as it was saved


@pytest.mark.promise("pretrained-index")
@pytest.mark.skipif(find_spec(JOINING) is None, reason="torch 2.8 does not join them")
@kit.on_ranks(2)
def test_files_that_ranks_wrote_are_joined_by_torch(tmp_path: Path) -> None:
    """By HuggingFaceStorageWriter, not consolidated. Fails if one rank's part is taken for the whole."""
    mesh = init_device_mesh("cpu", (2,))
    source = build("llama", 1)
    parts = {name: distribute_tensor(p.detach(), mesh, [Shard(0)]) for name, p in source.named_parameters()}
    writer = dcp.HuggingFaceStorageWriter(str(tmp_path / "ranks"), save_distributed=True)
    dcp.save(parts, storage_writer=writer)
    with pytest.raises(PretrainedError, match=r"join them with consolidate_safetensors_files of torch.distributed"):
        load_pretrained(build("llama", 2), tmp_path / "ranks")
    if torch.distributed.get_rank() == 0:
        (tmp_path / "joined").mkdir()
        folders = str(tmp_path / "ranks"), str(tmp_path / "joined")
        import_module(JOINING).consolidate_safetensors_files(*folders, fqn_to_index_mapping=dict.fromkeys(parts, 1))
        model = build("llama", 2)
        load_pretrained(model, tmp_path / "joined")
        same_weights(model, source)
    torch.distributed.barrier()


@pytest.mark.advice("make room, or name another folder")
@pytest.mark.promise("save-full-disk")
def test_a_full_disk_is_told_with_figures_and_leaves_what_was_there(tmp_path, monkeypatch):
    """Fails if a half-written file stays, or if an earlier save is lost."""
    model = nn.Linear(64, 64)
    save_pretrained(model, tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(PretrainedError, match=r"No space left.* take 16,640 bytes, and [\d,]+ bytes are free there"):
        save_pretrained(model, tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
