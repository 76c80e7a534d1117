"""Experts that are modules of a list, each a unit on one rank: torch's numbers, and only those called are gathered."""

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.mixtures import LISTED, Listed, adamw, close, tokens

pytestmark = pytest.mark.promise("experts-listed")

SMALL = {"expert_bytes": 1}


def experts_of(model):
    return [unit.name for unit in zero_core.units(model) if ".experts." in unit.name]


@pytest.mark.parametrize(
    "size, stage, expert_bytes", [(1, 3, None), (1, 3, 1 << 30), (1, 2, 1), (1, 1, 1), (1, 0, 1), (2, 3, 1)]
)
@kit.on_ranks()
def test_they_stay_with_their_block_where_nothing_is_to_be_cut(size, stage, expert_bytes):
    """At stages that keep units, and on several ranks."""
    model, optimizer = kit.sharded(Listed, stage=stage, expert_bytes=expert_bytes)
    assert not experts_of(model)


MODELS = {"plain": {}, "one twice": {"again": True}}
MODELS |= {f"{kind} recomputed": {"again": True, "checkpointed": kind} for kind in ("block", "expert")}
OPTIONS = {
    "plain": {},
    "ahead": {"prefetch_bytes": 1 << 20},
    "resident": {"resident_bytes": 20_000},
    "clipped": {"max_grad_norm": 0.05},
    "in backward": {"update_in_backward": True},
}


@pytest.mark.parametrize(
    ("kind", "option"),
    [
        *(("plain", option) for option in OPTIONS),
        *((kind, "plain") for kind in [*MODELS][1:]),
        *(("one twice", "ahead"), ("one twice", "in backward"), ("block recomputed", "ahead")),
        *(("expert recomputed", "resident"), ("block recomputed", "clipped")),
    ],
)
def test_training_is_plain_torchs(kind, option):
    """A unit that is updated in backward is not used again there."""
    dense, plain, model, optimizer = kit.pair(
        lambda: Listed(**MODELS[kind]), adamw, **SMALL, **{"prefetch_bytes": 0, **OPTIONS[option]}
    )
    assert experts_of(model) == LISTED
    left = set()
    for step in range(4):
        with torch.no_grad():
            close(model(tokens(9 + step)), dense(tokens(9 + step)))
        losses = [each(tokens(step)) for each in (dense, model)]
        close(*losses)
        for loss in losses:
            loss.backward()
        left |= {name for name, p in dense.named_parameters() if p.grad is None}
        if option != "in backward":
            assert [p.grad is None for p in model.parameters()] == [p.grad is None for p in dense.parameters()]
            toys.same_gradients(model, dense, rtol=1e-4, atol=2e-6)
        if option == "clipped":
            nn.utils.clip_grad_norm_(dense.parameters(), 0.05)
        plain.step(), optimizer.step()
        plain.zero_grad(), optimizer.zero_grad()
        found, wanted = kit.values(model, master=True), [p.detach() for p in dense.parameters()]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=2e-6)
    assert left, "every expert was called, so nothing is said of those that are not"
    steps = [states["step"] for states in plain.state_dict()["state"].values()]
    assert len(set(map(int, steps))) > 1


@pytest.mark.parametrize("ahead", [0, 1 << 20])
@pytest.mark.parametrize("grad", [False, True])
def test_experts_that_are_not_called_are_not_asked_for(ahead, grad):
    store, called = toys.Noting(), set()
    model, optimizer = kit.sharded(Listed, adamw, store=store, prefetch_bytes=ahead, **SMALL)
    for path in LISTED:
        model.get_submodule(path).register_forward_hook(lambda *_, path=path: called.add(path))
    for number in range(6):
        store.asked.clear(), called.clear()
        with torch.set_grad_enabled(grad):
            loss = model(tokens(number))
        if grad:
            loss.backward()
        assert {name for name in store.asked if ".experts." in name} == called != set(LISTED)
        if grad:
            optimizer.step(), optimizer.zero_grad()
