"""Gradients that enter a unit inside, on tiers, the memory that such a backward takes, and forwards inside of one.

Fails if a node of the graph runs while its unit has no memory, or if more units have memory than the plan counts.
"""

import pytest
import torch

import zero_core
from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_core import toys
from tests.integration.zero_core.test_forward_in_backward import MODELS
from tests.integration.zero_core.test_graph_asks import FORMS, Model, first, size_of, trains_as_torch
from tests.integration.zero_offload.training import tiered


def store(place):
    return tiered(place, tile_numel=TILE)


@pytest.mark.promise("gradient-enters-inside")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_a_loss_of_what_a_block_kept_on_every_tier(place):
    with small_chunks():
        for number, form in enumerate(FORMS):
            ahead = {} if number % 2 else {"prefetch_bytes": 0}
            trains_as_torch(Model, form, store=store(place), tolerance=1e-5, **ahead)


def through_the_output(model, x):
    size_of(model(x)[0]).backward()


@pytest.mark.promise("gradient-enters-memory")
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


@pytest.mark.promise("forward-in-backward")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_forwards_inside_a_backward_train_as_plain_torch(place):
    with small_chunks():
        for name in ("adjoint", "deep", "deep reentrant", "equilibrium", "hook inside a block", "energy"):
            toys.train(MODELS[name], steps=2, build=toys.adamw, store=store(place), tolerance=1e-4)
