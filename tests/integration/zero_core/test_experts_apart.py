"""Stacked experts that do not run in every forward of their block: on one rank, and on ranks that differ."""

import copy

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_core import mixtures, toys
from tests.integration.zero_core.mixtures import GROUP, adamw, close

pytestmark = pytest.mark.promise("experts-apart")


class Both(nn.Module):
    """Experts for text, and others for images, which run where `sees` is set: as in Ernie 4.5 VL."""

    sees = False

    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.text, self.vision = mlp, copy.deepcopy(mlp)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.text(hidden) + self.vision(hidden) if self.sees else self.text(hidden)


def two_stacks():
    model = mixtures.qwen()
    for layer in model.model.layers:
        layer.mlp = Both(layer.mlp)
    return model


def loss_of(model: nn.Module, number: int) -> Tensor:
    """Of batches with odd numbers, all are images."""
    for layer in model.model.layers:
        layer.mlp.sees = number % 2 == 1
    tokens = mixtures.batch(number)
    return model(input_ids=tokens, labels=tokens, use_cache=False, output_router_logits=False).loss


@kit.on_ranks(1, 2)
def test_two_stacks_in_a_block_of_which_a_rank_runs_one(size):
    dense = two_stacks()
    model = copy.deepcopy(dense)
    reference = adamw(dense.parameters())
    optimizer = zero_core.shard(model, adamw(model.parameters()), expert_bytes=GROUP)
    for step in range(3):
        mine, numbers = mixtures.share(step)
        kit.step(reference, sum(loss_of(dense, number) for number in numbers) / size)
        kit.step(optimizer, loss_of(model, mine))
        with torch.no_grad():
            close(loss_of(model, mine), loss_of(dense, mine), 10)
    mixtures.assert_same_values(model, dense)


def test_blocks_that_are_compiled():
    dense, model, optimizer = mixtures.made()
    for layer in model.model.layers:
        layer.compile(backend="aot_eager")
    mixtures.loss_of(dense, 0).backward()
    mixtures.loss_of(model, 0).backward()
    toys.same_gradients(model, dense, rtol=1e-4, atol=2e-6)
