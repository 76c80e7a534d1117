"""Gradients that enter a unit inside, on tiers, and of real models; and the memory that such a backward takes.

Fails if a node of the graph runs while its unit has no memory, or if more units have memory than the plan counts.
"""

from __future__ import annotations

import pytest
import torch

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_core.test_graph_asks import FORMS, Model, first, size_of, trains_as_torch
from zero_offload import MemoryByteStore, TieredStore

SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "attn_implementation": "eager",
}
IDS = torch.randint(0, 64, (2, 6), generator=torch.Generator().manual_seed(0))


def store(place):
    return TieredStore(place, place, place, nvme=MemoryByteStore(), tile_numel=TILE)


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_loss_of_what_a_block_kept_on_every_tier(place):
    with small_chunks():
        for form in FORMS:
            for prefetch in ({}, {"prefetch_bytes": 0}):
                trains_as_torch(Model, form, store=store(place), tolerance=1e-5, **prefetch)


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(hidden_dropout_prob=0, attention_probs_dropout_prob=0, **SIZES))


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(num_key_value_heads=2, num_local_experts=4, **SIZES))


def attention(which):
    return lambda model: size_of(model(input_ids=IDS, output_attentions=True).attentions[which])


def router(model):
    return size_of(model(input_ids=IDS, output_router_logits=True).router_logits[-1])


def auxiliary(model):
    return model(input_ids=IDS, labels=IDS, output_router_logits=True).aux_loss


def hooked(path):
    """A loss of what a forward hook on an inner module took."""

    def loss(model):
        taken = []
        handle = model.get_submodule(path).register_forward_hook(lambda module, args, output: taken.append(output))
        model(input_ids=IDS)
        handle.remove()
        return size_of(taken[0])

    return loss


def cache(model):
    """A second forward's gradient alone, which reaches the first one through keys and values."""
    past = model(input_ids=IDS[:, :4], use_cache=True).past_key_values
    return size_of(model(input_ids=IDS[:, 4:], past_key_values=past).logits)


CASES = {
    "last attention": (bert, attention(-1)),
    "first attention": (bert, attention(0)),
    "router logits": (mixtral, router),
    "auxiliary loss": (mixtral, auxiliary),
    "hook on mlp": (llama, hooked("model.layers.2.mlp")),
    "hook on q_proj": (llama, hooked("model.layers.0.self_attn.q_proj")),
    "cache": (llama, cache),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("place", [None, "nvme"], ids=["device", "nvme"])
def test_losses_of_what_models_of_transformers_return_from_inside(case, place):
    pytest.importorskip("transformers")
    make, loss = CASES[case]
    dense, model = kit.twins(make)
    with small_chunks():
        theirs = kit.sgd(dense.parameters())
        optimizer = kit.sharded(model, stage=3, store=None if place is None else store(place))[1]
        for _ in range(2):
            torch.testing.assert_close(kit.step(optimizer, loss(model)), kit.step(theirs, loss(dense)))
        torch.testing.assert_close(kit.values(model), [p.detach() for p in dense.parameters()])


def through_the_output(model, x):
    size_of(model(x)[0]).backward()


def test_a_unit_that_is_opened_late_is_in_the_plan():
    """What is skipped on the way to it is opened and closed in the order that was planned."""

    def most(form):
        model, optimizer = kit.sharded(lambda: Model(blocks=6), stage=3, store=store("nvme"), prefetch_bytes=0)
        units, found = zero_core.units(model), []

        def count(module, *args):
            found.append(sum(unit.nbytes for unit in units if unit.residency.unsharded))

        for block in model.blocks:
            block.k.register_full_backward_hook(count)
        form(model, torch.ones(4, 5))
        optimizer.zero_grad()
        return max(found), model, optimizer

    with small_chunks():
        for form in FORMS:
            assert most(form)[0] <= most(through_the_output)[0]
        assert most(first)[0] > 0
