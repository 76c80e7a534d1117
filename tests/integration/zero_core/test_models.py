"""Any nn.Module, unchanged: what it returns, shares, freezes, leaves out or uses elsewhere.

Each trains beside a dense twin and fails if a gradient is lost, late, doubled, or reduced across the wrong units.
"""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from tests.integration.zero_core import toys

SIZES = pytest.mark.parametrize("size", [1, 2])
STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])


def run(make, **options):
    toys.train(make, **options)


@SIZES
@pytest.mark.parametrize("kind", list(toys.Returning.WRAP))
def test_outputs_of_any_kind(ranks, size, kind):
    ranks(size).run(run, functools.partial(toys.Returning, kind))


def run_options(options, make):
    toys.train(make, **options)


PECULIAR = [
    *(toys.Stack, toys.Unused, toys.Frozen, toys.Tied, toys.External, toys.Routed, toys.Twice),
    *(toys.InPlace, toys.InPlaceView),
]


@STAGES
@pytest.mark.parametrize("make", PECULIAR)
def test_peculiar_models_on_two_ranks(ranks, stage, make):
    ranks(2).run(run_options, {"stage": stage}, make)


@pytest.mark.parametrize("make", PECULIAR)
def test_peculiar_models_on_one_rank(make):
    toys.train(make, stage=3)


def train_with_empty_shards():
    model, _ = toys.train(toys.Unused)
    rank = toys.world()[0]
    return [len(unit.layout.pieces(rank)) for unit in zero_core.units(model)]


def test_ranks_that_hold_only_the_zero_tail_of_a_unit(ranks):
    """The head has 42 elements, its storage 128: on four ranks the last one holds nothing of it."""
    held = ranks(4).run(train_with_empty_shards)
    assert any(count == 0 for count in held[-1]) and all(held[0])


@kit.on_ranks(1, 2)
@STAGES
def test_everything_is_resharded_after_the_step(stage):
    model, optimizer = kit.sharded(toys.External, toys.sgd, stage=stage, prefetch_bytes=1 << 20)
    for step in range(3):
        with torch.no_grad():
            model(toys.data(9, 0))
        toys.loss_of(model, toys.data(step, 0)).backward()
        if stage == 3:
            assert all(unit.residency.value == "sharded" for unit in zero_core.units(model)), "right after backward"
        optimizer.step()
        optimizer.zero_grad()
        for unit in zero_core.units(model):
            assert unit.residency.value == "sharded" and unit.flat.untyped_storage().nbytes() == 0
            assert unit.gradient.current is None and unit.gradient.kept is None and unit.users == 0
        assert not zero_core.handle(model).engine.pool.lent


class Watched(toys.Routed):
    """Notes which expert of which block its rank chose, once it is sharded."""

    chosen: list

    def run(self, block, x):
        number = list(self.blocks).index(block)
        for k, expert in enumerate(block.experts):
            if "_zero_home" in expert.weight.__dict__ and not expert._forward_hooks:
                expert.register_forward_hook(lambda *_, where=(number, k): self.chosen.append(where))
        return super().run(block, x)


def route():
    chosen = []
    model_of = type("Model", (Watched,), {"chosen": chosen})
    toys.train(model_of)
    return chosen


def test_experts_that_ranks_choose_differently(ranks):
    first, second = ranks(2).run(route)
    assert first != second, "the routes have to differ for this to say anything"
    assert set(first) ^ set(second), "some expert ran on one rank only"


@SIZES
@pytest.mark.parametrize("segment", [1, 2, 4])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(ranks, size, reentrant, segment):
    ranks(size).run(run, functools.partial(toys.Checkpointed, reentrant, segment))


@SIZES
@pytest.mark.parametrize("prefetch_bytes", [0, 1, 1 << 20])
def test_prefetch_depth_changes_nothing(ranks, size, prefetch_bytes):
    ranks(size).run(run_options, {"prefetch_bytes": prefetch_bytes}, toys.Twice)


@SIZES
@pytest.mark.parametrize("resident_bytes", [0, 3000, 1 << 20])
def test_residency_budget_changes_nothing(ranks, size, resident_bytes):
    ranks(size).run(run_options, {"resident_bytes": resident_bytes}, toys.Stack)


@SIZES
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_parameters_with_gradients_reduced_in_fp32(ranks, size, dtype):
    options = {"param_dtype": dtype, "reduce_dtype": torch.float32, "loss": loss_in(dtype), "tolerance": 2e-3}
    ranks(size).run(run_options, options, toys.Stack)


def loss_in(dtype):
    return functools.partial(_loss_in, dtype)


def _loss_in(dtype, model, x):
    return model(x.to(dtype)).float().square().mean()


@STAGES
def test_updates_in_backward_equal_updates_after(ranks, stage):
    if stage == 1:
        pytest.skip("refused, see test_bad_input.py")
    ranks(2).run(run_options, {"stage": stage, "update_in_backward": True}, toys.Unused)
    toys.train(toys.Unused, stage=stage, update_in_backward=True)


@dataclasses.dataclass
class Slotted:
    __slots__ = ("hidden",)
    hidden: torch.Tensor


class InSlots(toys.Stack):
    def make_block(self):
        class Wrapping(toys.Block):
            def forward(self, x):
                return Slotted(super().forward(x))

        return Wrapping()

    def run(self, block, x):
        return block(x).hidden


@SIZES
def test_outputs_in_slots(ranks, size):
    ranks(size).run(run, InSlots)


class Attending(nn.Module):
    """out_proj is a unit of its own whose weight the attention uses itself, in a recomputation too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.embed(x)[None]
        return checkpoint(lambda y: self.attention(y, y, y, need_weights=False)[0], x, use_reentrant=False)


@kit.on_ranks(1, 2)
def test_gradients_of_a_weight_that_a_recomputation_uses_outside_of_its_module():
    torch.manual_seed(0)
    model = Attending()
    expected = torch.autograd.grad(toys.loss_of(model, toys.data(0, 0)), list(model.parameters()))
    zero_core.shard(model, toys.sgd(model.parameters()))
    found = torch.autograd.grad(toys.loss_of(model, toys.data(0, 0)), list(model.parameters()))
    torch.testing.assert_close(found, expected)
    toys.loss_of(model, toys.data(0, 0)).backward(inputs=[model.attention.in_proj_weight])
    assert model.attention.in_proj_weight.grad is not None
    unused = torch.autograd.grad(model.embed(toys.data(0, 0)).sum(), model.parameters(), materialize_grads=True)
    assert float(unused[-1].abs().sum()) == 0.0


@kit.on_ranks(1, 2)
def test_use_outside_the_module_under_inference_mode():
    model = toys.External()
    x = toys.data(0, 0)
    expected = model(x).detach()
    zero_core.shard(model, toys.sgd(model.parameters()))
    with torch.inference_mode():
        torch.testing.assert_close(model(x), expected)
        model.head.weight.mul_(2.0)
    assert model.head.weight.data.sum() != 0
