"""An optimizer that has stepped, or was loaded, before shard(): its state goes on where it was."""

import copy

import pytest
import torch

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from tests.integration.zero_core.test_full_states import OPTIMIZERS, Thawed, steps
from zero_core.errors import UnsupportedOptimizerError, ZeroError

pytestmark = pytest.mark.promise("carried-state")

NAMES = ("adamw", "momentum", "NAdam", "adagrad", "ASGD")


def go_on(name, stage, reload):
    torch.manual_seed(toys.world()[0])  # rank 0's parameters and state are everybody's
    dense = Thawed()
    theirs = OPTIMIZERS[name](dense.parameters())
    steps(dense, theirs, 0, 3)
    model = copy.deepcopy(dense)
    optimizer = OPTIMIZERS[name](model.parameters())
    if reload:
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    else:
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            if q in theirs.state:
                optimizer.state[p] = copy.deepcopy(theirs.state[q])
    given = optimizer.state
    ours = zero_core.shard(model, optimizer, stage=stage)
    assert not given, "its memory went to the store"
    if name != "momentum":
        assert ours.step_count == 3 and ours.engine.units[0].steps[0] == 3
    steps(model, ours, 3, 6)
    steps(dense, theirs, 3, 6)
    return kit.values(model), [p.detach() for p in dense.parameters()]


@pytest.mark.parametrize("reload", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_one_rank_goes_on_with_the_same_bits(name, reload):
    torch.testing.assert_close(*go_on(name, 3, reload), rtol=0, atol=0)


@pytest.mark.parametrize(("name", "stage"), [("NAdam", 3), ("adamw", 2), ("momentum", 1), ("adagrad", 0)])
def test_two_ranks_go_on_from_rank_0(ranks, name, stage):
    (ours, theirs), (other, _) = ranks(2).run(go_on, name, stage, True)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)  # both ranks gave the same gradient
    torch.testing.assert_close(ours, other, rtol=0, atol=0)


@pytest.mark.advice("ranks bring optimizers of different steps", "give shard() an optimizer that has not stepped")
@pytest.mark.promise("ranks-drop-differently")
@kit.on_ranks(2)
def test_ranks_of_different_steps_are_told():
    model = toys.Stack()
    optimizer = toys.adamw(model.parameters())
    steps(model, optimizer, 0, 1 + toys.world()[0])
    with pytest.raises(ZeroError, match="of different steps .*: give shard.. an optimizer that has not stepped"):
        zero_core.shard(model, optimizer)
    kit.sharded(toys.Stack, toys.adamw)


class Early(torch.optim.Optimizer):
    """Has states of each parameter before any step: `early(p, n)`, of the n-th one. counts: its steps."""

    counts = True

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for n, p in enumerate(p for group in self.param_groups for p in group["params"]):
            self.state[p].update(self.early(p, n))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    if self.counts:
                        state["step"] = state.get("step", 0) + 1
                    state["mean"] = (0.9 * state.get("mean", torch.zeros_like(p))).add_(p.grad, alpha=0.1)
                    p.sub_(group["lr"] / (1 - 0.9 ** state.get("step", 5)) * state["mean"])


def early_run(early, first, counts=True):
    """Weights and states after four steps, sharded before step `first`, if that is a number."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    kind = type("Early", (Early,), {"early": staticmethod(early), "counts": counts})
    optimizer = kind(model.parameters())
    for step in range(4):
        if step == first:
            optimizer = zero_core.shard(model, optimizer)
        kit.step(optimizer, model(torch.ones(2, 4)).square().mean())
    states = optimizer.state_dict() if first is None else optimizer.full_state_dict()
    return model.state_dict(), states["state"]


@pytest.mark.parametrize(
    ("early", "named"),
    [
        (lambda p, n: {"seed": 1}, "'seed' in the state of 0.weight"),  # as APOLLO, which numbers its projections
        (lambda p, n: {"seed": n, "step": 0}, "'seed' in the state of 0.bias"),
    ],
)
def test_a_state_from_before_the_first_step_is_refused_and_carried_over_after_one(early, named):
    """It passed for the state of a step, so the count was one too high, or it was lost."""
    with pytest.raises(UnsupportedOptimizerError, match=rf"Early has {named} .* Or take one step of the plain model"):
        early_run(early, 0)
    torch.testing.assert_close(early_run(early, 1), early_run(early, None))
    stateless = [early_run(lambda p, n: {}, first) for first in (0, None)]
    torch.testing.assert_close(*stateless)  # what step() makes


@pytest.mark.parametrize(
    ("early", "counts"),
    [
        (lambda p, n: {"step": 0, "mean": torch.zeros_like(p), "seed": 1}, True),
        (lambda p, n: {"mean": torch.ones_like(p)}, False),
    ],
)
def test_a_state_that_a_copy_begins_with_or_that_counts_no_steps_goes_on(early, counts):
    torch.testing.assert_close(early_run(early, 0, counts), early_run(early, None, counts))
