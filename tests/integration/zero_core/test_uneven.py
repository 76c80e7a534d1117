"""Ranks run different forwards inside `zero_core.uneven`, and those that are done serve the gathers of the others.

Fails if ranks gather in different orders (they would wait for each other), if what one rank generates depends on the
others, if ranks that are done hold more than they gather ahead, or if training afterwards has other bits.
"""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_core
from tests import kit
from tests.integration.zero_core import swapping, toys
from tests.integration.zero_core.generating import counting_units, generate_between
from tests.integration.zero_core.toys import world
from zero_core.comm import patience
from zero_core.errors import CollectiveError, StoreError, ZeroError
from zero_core.optim.device_store import DeviceStore
from zero_core.runtime.residency import Residency
from zero_core.testing import RankPool

SEVERAL = pytest.mark.parametrize("size", [2, 3])


@pytest.mark.parametrize(
    ("size", "stage", "options"),
    [
        (1, 3, {}),
        (2, 0, {}),
        (2, 2, {}),
        (2, 3, {"prefetch_bytes": 0}),
        (3, 3, {"param_dtype": torch.bfloat16}),
        (3, 3, {"prefetch_bytes": 60_000, "resident_bytes": 60_000}),
    ],
)
def test_generation_of_unequal_length_between_steps_is_that_of_the_plain_model(ranks, size, stage, options):
    pytest.importorskip("transformers")
    ranks(size).run(generate_between, stage, options)


def sharded(kind=toys.Stack, **options):
    return kit.sharded(kind, toys.adamw, **options)


def trains(model, optimizer):
    """A step, which raises where ranks called different collectives since the last one."""
    kit.step(optimizer, toys.loss_of(model, toys.data(0, world()[0])))


class Leaving(toys.Stack):
    """Runs the blocks that it is told to, in that order."""

    order = (0, 1, 2)

    def forward(self, x):
        x = self.embed(x)
        for k in self.order:
            x = self.blocks[k](x)
        return self.head(x)


def forwards(kind, inference=False, mesh=None):
    """Rank r runs 4 - r forwards of its own data, with other units in another order on each rank and at each time."""
    rank = world()[0]
    torch.manual_seed(0)
    plain = kind()
    model, optimizer = sharded(kind, mesh=mesh and init_device_mesh("cpu", mesh, mesh_dim_names=("replicate", "shard")))
    with torch.inference_mode() if inference else torch.no_grad(), zero_core.uneven(model):
        for n in range(4 - rank):
            for each in (model, plain):
                each.order = [(0, 1, 2), (2, 1), (), (1, 0, 1)][(n + rank) % 4]
            x = toys.data(n, rank)
            assert torch.equal(model(x), plain(x))
    model.order = (0, 1, 2)
    trains(model, optimizer)


@pytest.mark.parametrize("kind", [Leaving, toys.Routed, toys.External, toys.Twice, toys.Tied])
def test_ranks_may_run_other_units_in_another_order(ranks, kind):
    ranks(3).run(forwards, kind, kind is Leaving)


def test_ranks_of_a_mesh_of_two_dimensions_may_differ(ranks):
    ranks(4).run(forwards, Leaving, False, (2, 2))


CASES = [(3, {}, False), (3, {"prefetch_bytes": 5_000}, True), (2, {}, False)]
CASES += [(3, {"prefetch_bytes": 0, "resident_bytes": 5_000}, False)]


@pytest.mark.parametrize(("stage", "options", "swaps"), CASES)
@kit.on_ranks(3)
def test_what_ranks_do_alone_they_may_do_at_once(stage, options, swaps):
    """Each rank runs up to six things, drawn for it alone, on one of two models: forwards, parts of them, reads."""
    rank, dice = world()[0], random.Random(world()[0])
    plain, model, optimizer = [], [], []
    for _ in range(2):
        torch.manual_seed(len(plain))
        plain.append(Leaving())
        model.append(copy.deepcopy(plain[-1]))
        store = swapping.SwappingStore() if swaps else None
        optimizer.append(
            zero_core.shard(model[-1], toys.adamw(model[-1].parameters()), stage=stage, store=store, **options)
        )
    for n in range(3):  # a block begins with what the last one learned
        with torch.no_grad(), zero_core.uneven(*model):
            for _ in range(dice.randrange(7)):
                k, x = dice.choice([0, 0, 0, 1]), toys.data(n, rank)
                order = [dice.randrange(3) for _ in range(dice.randrange(5))]
                model[k].order = plain[k].order = dice.choice([(0, 1, 2), order])
                what = dice.choice(["forward"] * 4 + ["block", "read", "state"])
                if what == "forward":
                    assert torch.equal(model[k](x), plain[k](x))
                elif what == "block":
                    y = torch.ones(2, toys.WIDTH)
                    assert torch.equal(model[k].blocks[1](y), plain[k].blocks[1](y))
                elif what == "read":
                    assert model[k].head.bias.tolist() == plain[k].head.bias.tolist()
                else:
                    state = model[k].state_dict()
                    assert all(torch.equal(state[name], value) for name, value in plain[k].state_dict().items())
    for k in range(2):
        model[k].order = (0, 1, 2)
        trains(model[k], optimizer[k])
        optimizer[k].close()


def rounds_of(orders):
    """For each forward, how often rank 0 was asked what it does next, and how many gathers it took part in."""
    model, _ = sharded(Leaving)
    calls, found = zero_core.units(model)[0].ranks.patience, []
    with torch.no_grad(), zero_core.uneven(model):
        for order in orders if world()[0] == 0 else ():
            model.order, before = order, calls._count
            model(toys.data(0, 0))
            made = Counter(name for name, _ in list(calls._calls)[before - calls._count :])
            found.append((made["all_reduce"], made["all_gather"]))
    return found


def test_a_forward_that_gathers_what_the_last_one_did_costs_one_all_reduce(ranks):
    """Five units. The first forward has a round for each and one for itself; leaving early is foreseen the next time.

    The head was foreseen before two blocks that the last forward asks for, and is asked for again after them.
    """
    usual, early = (0, 1, 2), (0,)
    found = ranks(2).run(rounds_of, [usual, usual, early, early, usual, usual])[0]
    assert found == [(6, 5), (1, 5), (1, 5), (1, 3), (4, 6), (1, 5)]


def whole_at_once(ahead):
    """Most units with memory, on a rank that runs five forwards and on one that serves them."""
    model, _ = sharded(functools.partial(toys.Stack, 8))
    zero_core.handle(model).engine.uses.turn.prefetch_bytes = ahead * max(
        unit.nbytes for unit in zero_core.units(model)
    )
    with torch.no_grad(), counting_units() as count, zero_core.uneven(model):
        for _ in range(5 if world()[0] == 0 else 0):
            model(toys.data(0, 0))
    return count["most"]


def test_a_rank_that_is_done_holds_one_unit_and_what_it_gathers_ahead(ranks):
    """The rank that runs also holds the root's unit, in which the others are called."""
    assert ranks(2).run(whole_at_once, 0) == [2, 1]
    assert ranks(2).run(whole_at_once, 2) == [4, 3]


@pytest.mark.parametrize(("stage", "options"), [(1, {}), (2, {}), (3, {"resident_bytes": 4_000})])
@kit.on_ranks(2)
def test_ranks_go_on_with_the_same_units_unsharded(stage, options):
    """The block leaves the same units unsharded on every rank, and a pending graph its memory."""
    model, optimizer = sharded(stage=stage, **options)
    trains(model, optimizer)
    loss = toys.loss_of(model, toys.data(0, 0))
    before = {unit.name for unit in zero_core.units(model) if unit.residency.unsharded}
    with torch.no_grad(), zero_core.uneven(model):
        for _ in range(world()[0]):
            model(toys.data(0, 0))
    after = {unit.name for unit in zero_core.units(model) if unit.residency.unsharded}
    assert after == (before if stage < 3 else set())
    kit.step(optimizer, loss)


@kit.on_ranks(3)
def test_one_rank_alone_may_read_the_model():
    """Rank 1 alone reads the whole state dict, evaluates a block, and reads a parameter."""
    model, optimizer = sharded()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad(), zero_core.uneven(model):
        if world()[0] == 1:
            state = model.state_dict()
            assert all(torch.equal(state[name], expected[name]) for name in expected)
            model.blocks[1](torch.ones(2, toys.WIDTH))
            assert torch.equal(model.head.bias + 0, expected["head.bias"])
    trains(model, optimizer)


@SEVERAL
@kit.on_ranks()
def test_several_models_in_one_block(size):
    """A policy, and a reference that nobody trains: ranks that are done serve both."""
    rank = world()[0]
    policy, optimizer = sharded()
    reference = toys.Stack()
    zero_core.shard(reference)
    x = toys.data(0, rank)
    with torch.no_grad():
        expected = policy(x), reference(x)
    with torch.no_grad(), zero_core.uneven(policy, reference):
        for _ in range(1 + 2 * rank):
            assert torch.equal(policy(x), expected[0])
            if rank:
                assert torch.equal(reference(x), expected[1])
    trains(policy, optimizer)


@kit.on_ranks(2)
def test_a_unit_that_was_gathered_ahead_before_the_block():
    """At stage 2, what the forward before the block gathered ahead and did not use is under way until the step."""
    model, optimizer = sharded(Leaving, stage=2)
    x = toys.data(0, 0)
    with torch.no_grad():
        expected = model(x)
        zero_core.handle(model).settle()
        model.order = ()
        model(x)
    assert any(unit.residency is Residency.UNSHARDING for unit in zero_core.units(model))
    model.order = (0, 1, 2)
    with torch.no_grad(), zero_core.uneven(model):
        assert world()[0] == 0 or torch.equal(model(x), expected)
    trains(model, optimizer)


class Unfortunate(toys.Stack):
    """Fails in its second block where it is told to."""

    fails = False

    def run(self, block, x):
        if self.fails and block is self.blocks[1]:
            raise KeyError("asked to fail")
        return super().run(block, x)


@pytest.mark.parametrize("done", [True, False])
@pytest.mark.parametrize("where", ["forward", "between"])
@kit.on_ranks(2)
def test_where_one_rank_fails_the_others_are_told_and_all_may_go_on(where, done):
    """Rank 0 fails in its second forward or between two; rank 1 is done, or runs on. Then all train."""
    rank = world()[0]
    model, optimizer = sharded(Unfortunate)
    expected = pytest.raises(KeyError) if rank == 0 else pytest.raises(CollectiveError, match="rank 0 of 2 left")
    with expected, torch.no_grad(), zero_core.uneven(model):
        for n in range(4 if rank == 0 or not done else 0):
            model.fails = rank == 0 and n == 1 and where == "forward"
            model(toys.data(n, rank))
            if rank == 0 and n == 1:
                raise KeyError("asked to fail")
    model.fails = False
    assert not any(unit.residency.unsharded for unit in zero_core.units(model))
    with torch.no_grad(), zero_core.uneven(model):
        for n in range(2 * rank):
            model(toys.data(n, rank))
    trains(model, optimizer)


class Broken(DeviceStore):
    """Cannot read any more, on rank 0, from its eighth reading on."""

    reads = 0

    def parameters(self, i):
        self.reads += 1
        if self.reads > 7 and world()[0] == 0:
            raise StoreError("asked to break")
        return super().parameters(i)


def one_store_breaks(runs):
    """What each rank is told where a store breaks on rank 0 in its second forward, or in the second that it serves."""
    patience.SECONDS = 0.3
    model, _ = sharded(store=Broken(), prefetch_bytes=0)
    try:
        with torch.no_grad(), zero_core.uneven(model):
            for _ in range(3 if world()[0] == runs else 0):
                model(toys.data(0, 0))
    except (CollectiveError, StoreError) as error:
        return str(error)
    return "nothing raised"


@pytest.mark.parametrize("runs", [0, 1])
def test_a_store_that_breaks_on_one_rank_ends_the_block_on_all(ranks, runs):
    pool = RankPool(2, collective_timeout_seconds=30, start_method=ranks(2).start_method)
    try:
        texts = pool.run(one_store_breaks, runs)
    finally:
        pool.close()
    assert texts[0] == "asked to break"
    assert "all_gather of unit 'blocks.1' failed on rank 1 of 2" in texts[1], texts


@kit.on_ranks(1, 2)
def test_what_cannot_be_uneven_is_refused():
    model, optimizer = sharded()
    other, _ = sharded()
    graph = toys.loss_of(model, toys.data(0, 0))
    x = toys.data(0, 0)

    def refused(does, match, models=(model,), grad=nullcontext):
        with pytest.raises(ZeroError, match=match), zero_core.uneven(*models), grad():
            does()

    refused(lambda: model(x), "with gradients inside zero_core.uneven")
    refused(graph.backward, "backward.. inside zero_core.uneven")
    refused(optimizer.step, "a step, a checkpoint or close.. inside zero_core.uneven")
    refused(lambda: zero_core.gathered(model).__enter__(), "gathered.. inside zero_core.uneven")
    refused(
        lambda: zero_core.full_state(model.head.bias, "master"), "full_state.. of head.bias inside zero_core.uneven"
    )
    refused(lambda: zero_core.uneven(other).__enter__(), r"name all models in one block, zero_core.uneven\(a, b\)")
    refused(lambda: None, "has no sharded parameter", [nn.Linear(2, 2)])
    refused(lambda: None, "without a model", [])
    if world()[1] > 1:
        refused(lambda: other(x), "which does not name this model", grad=torch.no_grad)
        refused(other.head.bias.tolist, "unit 'head' of Stack is used inside zero_core.uneven", grad=torch.no_grad)
    toys.loss_of(model, x).backward()
    optimizer.step()
    with torch.no_grad(), zero_core.gathered(model), zero_core.uneven(model):  # the other way round is allowed
        for _ in range(world()[0]):
            model(x)
