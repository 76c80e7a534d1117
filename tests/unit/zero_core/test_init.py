"""Deferred construction: same distributions, same buffers, no memory, values that depend on the seed alone."""

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import zero_core
from tests import kit
from tests.following import advised, model, sgd, trains
from zero_core.errors import DeferredInitError
from zero_core.model.deferred_init import deferred_init, recording_of
from zero_core.model.initial_values import Initialiser, materialise

SIZES = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, vocab_size=128)
GPT2 = dict(n_embd=64, n_layer=2, n_head=4, vocab_size=128, n_positions=32, bos_token_id=1, eos_token_id=2)
T5 = dict(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=128)


def of_transformers(kind: str, name: str, **sizes) -> Callable[[], nn.Module]:
    """Makes a model of a kind, with the head that it is named after."""
    return lambda: getattr(transformers, kind + name)(getattr(transformers, f"{kind}Config")(**sizes))


MODELS = {
    "llama": of_transformers("Llama", "ForCausalLM", **SIZES),
    "gpt2": of_transformers("GPT2", "LMHeadModel", **GPT2),
    "mixtral": of_transformers("Mixtral", "ForCausalLM", **SIZES, num_local_experts=4, num_key_value_heads=2),
    "t5": of_transformers("T5", "ForConditionalGeneration", **T5),
    "bert": of_transformers("Bert", "ForMaskedLM", **SIZES),
    "torch": lambda: nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LSTM(16, 16), nn.MultiheadAttention(16, 2)),
        nn.Transformer(32, 4, 2, 2, 64),
    ),
}


def deferred(make, seed: int = 5) -> Any:
    with deferred_init(seed=seed):
        return make()


def made(make) -> Any:
    model = deferred(make)
    materialise(model)
    return model


@pytest.mark.promise("deferred-buffers")
@pytest.mark.parametrize("name", MODELS)
def test_real_architectures_match_eager_construction(name: str) -> None:
    """Same names, shapes, strides, ties and buffers; each parameter's mean and deviation are the eager ones'."""
    torch.manual_seed(0)
    eager, model = MODELS[name](), deferred(MODELS[name])
    assert all(p.is_meta for p in model.parameters())
    materialise(model)
    expected = dict(eager.named_parameters())
    names = [[n for n, _ in each.named_parameters(remove_duplicate=False)] for each in (model, eager)]
    assert names[0] == names[1]
    for key, parameter in model.named_parameters():
        twin = expected[key]
        assert parameter.stride() == twin.stride() and parameter.requires_grad == twin.requires_grad
        if bool((twin == twin.flatten()[0]).all()):
            assert torch.equal(parameter, twin), key
        elif parameter.numel() >= 256:
            tolerance = 6 * twin.std().item() / math.sqrt(twin.numel())
            assert abs(parameter.mean().item() - twin.mean().item()) < 2 * tolerance, key
            assert abs(parameter.std().item() - twin.std().item()) < 2 * tolerance, key
    kit.assert_bits(dict(model.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.promise("deferred-seed")
def test_a_seed_set_inside_holds_from_there_on() -> None:
    """It is where a script that builds its model in a function seeds: ignored, each run would start elsewhere."""

    def built(before: int, inside: int | None, **options) -> list[torch.Tensor]:
        torch.manual_seed(before)
        with deferred_init(**options):
            if inside is not None:
                torch.manual_seed(inside)
            model = MODELS["llama"]()  # its buffers are replayed in between
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(99)
                model.of_another_seed = nn.Linear(4, 4)
            model.after = nn.Linear(4, 4)
        initialiser = Initialiser(model)
        return [initialiser.values(p) for p in model.parameters()]

    def same(left, right) -> bool:
        return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))

    assert same(built(1, inside=7), built(2, inside=7))
    assert same(built(7, inside=None), built(2, inside=7))  # where it is said makes no difference
    assert not same(built(1, inside=7), built(1, inside=8))
    assert same(built(1, inside=7, seed=3), built(2, inside=8, seed=3))  # a seed of its own is that of everything
    assert same(built(1, inside=None)[-4:-2], built(2, inside=None)[-4:-2])  # the part that seeded itself
    assert not same(built(1, inside=None)[-2:], built(2, inside=None)[-2:])


class Custom(nn.Module):
    """Everything a constructor does to parameters besides `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = nn.Parameter(torch.randn(8, 8) * 0.02)
        self.ones = nn.Parameter(torch.ones(8))
        self.full = nn.Parameter(torch.full((2, 8), 3.0))
        self.given = nn.Parameter(torch.arange(8.0))
        self.zeroed, self.scaled, self.orthogonal = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.zeros_(self.zeroed.weight)
        self.scaled.weight.data[2:4].mul_(100.0)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.embedding = nn.Embedding(10, 8, padding_idx=3)
        self.first = nn.Linear(8, 8, bias=False)
        self.copied = copy.deepcopy(self.first)
        self.low = nn.Linear(8, 8).to(torch.bfloat16)
        self.truncated = nn.Linear(64, 64)
        nn.init.trunc_normal_(self.truncated.weight, std=1.0, a=-1.0, b=1.0)
        self.tied = nn.Linear(8, 10, bias=False)
        self.tied.weight = self.embedding.weight
        self.bound = float(self.first.weight.detach().abs().max())  # reads a value back
        self.register_buffer("ema", self.first.weight.detach().clone())
        self.register_buffer("mask", torch.tril(torch.ones(16, 16)), persistent=False)
        self.frozen = nn.Parameter(torch.zeros(3), requires_grad=False)


def test_whatever_a_constructor_does_is_replayed() -> None:
    model = deferred(Custom)
    assert all(p.is_meta for p in model.parameters())
    recording = weakref.ref(recording_of(model.first))
    materialise(model)
    gc.collect()
    assert recording() is None, "it is let go once every value is taken"
    assert 0.01 < model.bare.std() < 0.03
    assert torch.equal(model.ones, torch.ones(8)) and torch.equal(model.full, torch.full((2, 8), 3.0))
    assert torch.equal(model.given, torch.arange(8.0))
    assert torch.equal(model.zeroed.weight, torch.zeros(8, 8)) and model.zeroed.bias.abs().max() > 0
    assert model.scaled.weight[2:4].abs().max() > 1 > model.scaled.weight[4:].abs().max()
    torch.testing.assert_close(model.orthogonal.weight @ model.orthogonal.weight.T, torch.eye(8), rtol=0, atol=1e-5)
    assert torch.equal(model.embedding.weight[3], torch.zeros(8)) and model.embedding.weight[4].abs().max() > 0
    assert torch.equal(model.copied.weight, model.first.weight) and model.copied.weight is not model.first.weight
    assert model.low.weight.dtype == torch.bfloat16 and model.low.weight.abs().max() > 0
    assert 0.9 < model.truncated.weight.abs().max() <= 1.0 and model.truncated.weight.std() > 0.4
    assert model.tied.weight is model.embedding.weight
    assert model.bound == float(model.first.weight.detach().abs().max())
    assert torch.equal(model.ema, model.first.weight)
    assert torch.equal(model.mask, torch.tril(torch.ones(16, 16)))
    assert not model.frozen.requires_grad


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16])
def test_narrow_floats_are_materialised_also_where_their_sum_is_not_finite(dtype: torch.dtype) -> None:
    def build() -> nn.ParameterList:
        return nn.ParameterList([nn.Parameter(torch.full((1000,), 448.0).to(dtype), requires_grad=False)])

    assert torch.equal(made(build)[0].float(), torch.full((1000,), 448.0))


@pytest.mark.promise("deferred-values")
def test_a_value_is_not_taken_for_what_its_memory_held_before() -> None:
    """torch.tensor(7.0) is made where no mode sees it, often where a tensor lay that was freed: it came back as 0."""

    def build() -> nn.ParameterList:
        values = nn.ParameterList()
        for _ in range(20):
            torch.zeros(())
            values.append(nn.Parameter(torch.tensor(7.0)))
        return values

    assert [p.item() for p in made(build)] == [7.0] * 20


@pytest.mark.promise("deferred-large")
def test_a_parameter_larger_than_the_machines_memory_is_built() -> None:
    """4 TiB: fails if construction, where torch.empty asks for memory that nobody touches, needs it."""
    with deferred_init():
        stack = nn.Module()
        stack.weight = nn.Parameter(torch.empty(1 << 20, 1 << 20))
        nn.init.zeros_(stack.weight)
    assert stack.weight.is_meta and stack.weight.shape == (1 << 20, 1 << 20)


class Table(nn.Module):
    """Of its four rows, the first ones are initialised."""

    def __init__(self, rows):
        super().__init__()
        self.table = nn.Parameter(torch.empty(4, 4))
        for row in range(rows):
            nn.init.ones_(self.table[row])

    def forward(self, x):
        return x @ self.table


@pytest.mark.promise("deferred-uninitialised")
@pytest.mark.parametrize(("rows", "fact"), [(0, "nothing initialises 0.table"), (1, "0.table is only partly")])
def test_a_table_is_initialised_where_it_is_built_or_by_load_pretrained(rows, fact, tmp_path):
    zero_core.save_pretrained(nn.Sequential(Table(4)), tmp_path)
    net = deferred(lambda: nn.Sequential(Table(rows)))
    with advised(fact, "initialise it where the module is built, or give it values with load_pretrained"):
        zero_core.shard(net, sgd(net))
    zero_core.load_pretrained(net, tmp_path)
    for filled in (net, deferred(lambda: Table(4))):
        trains(filled)


def test_a_model_on_meta_is_built_inside_the_context(tmp_path):
    def build():
        return nn.Linear(4, 1, device="meta")

    with advised("weight, bias are on the meta device", "build the model inside `with zero_core.deferred_init():`"):
        zero_core.shard(build())
    replaced = deferred(lambda: nn.Linear(4, 1))
    replaced.weight = nn.Parameter(torch.empty(1, 4, device="meta"))
    with pytest.raises(DeferredInitError, match=r"weight are on the meta device.*build the model inside"):
        Initialiser(replaced)
    zero_core.save_pretrained(nn.Linear(4, 1), tmp_path)
    with advised("build the model in zero_core.deferred_init()"):
        zero_core.load_pretrained(build(), tmp_path)
    net = deferred(build)
    zero_core.load_pretrained(net, tmp_path)
    for each in (net, deferred(build)):
        trains(each)


@pytest.mark.promise("deferred-cast")
def test_a_deferred_model_is_cast_outside_the_context() -> None:
    def build() -> nn.Module:
        with zero_core.deferred_init(seed=3):
            return nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.LSTM(4, 2))

    cast_early, cast_late = build().to(torch.bfloat16), build()
    assert all(p.is_meta and p.dtype == torch.bfloat16 for p in cast_early.parameters())
    for each in (cast_early, cast_late):
        zero_core.materialise(each)
    kit.assert_bits(cast_early.state_dict(), cast_late.to(torch.bfloat16).state_dict())
    model, optimizer = kit.sharded(build().half())
    assert {unit.dtype for unit in zero_core.units(model)} == {torch.float16}
    optimizer.close()


def doubled(net):
    with torch.no_grad():
        net[0].weight.mul_(2)
    return net


@pytest.mark.promise("deferred-uninitialised")
def test_a_deferred_model_is_written_inside_the_context_or_after_shard():
    net = doubled(deferred(model))
    with advised(
        "values written into 0.weight after the with block of deferred_init()",
        "write them inside the block, or after shard() inside zero_core.gathered",
    ):
        zero_core.shard(net, sgd(net))
    with advised("write them inside the block"):
        zero_core.TiledLinear.from_linear(net[0], out_splits=2)
    inside, after = deferred(lambda: doubled(model())), deferred(model)
    assert zero_core.TiledLinear.from_linear(inside[0], out_splits=2) is not None
    for each in (inside, after):
        zero_core.shard(each, sgd(each))
    with zero_core.gathered(after):
        doubled(after)
    assert torch.equal(inside[0].weight.detach(), after[0].weight.detach())


@pytest.mark.advice("use a clone() made before the block")
@pytest.mark.promise("deferred-read-changed")
@pytest.mark.parametrize("real", [torch.ones(3, 3), nn.Linear(3, 3).weight])  # the second was written once already
def test_values_read_from_a_real_tensor_are_those_it_had(real) -> None:
    with zero_core.deferred_init(seed=3):
        model = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            model.weight.copy_(real)
    zero_core.materialise(model)
    assert torch.equal(model.weight, real)
    with zero_core.deferred_init(seed=3):
        late = nn.Linear(3, 3, bias=False)
        late.load_state_dict({"weight": real})
    with torch.no_grad():
        real.zero_()
    with pytest.raises(DeferredInitError, match=r"read a tensor of shape \(3, 3\) that was changed before shard\(\)"):
        zero_core.materialise(late)
