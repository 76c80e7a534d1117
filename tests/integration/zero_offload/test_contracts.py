"""Optimizers that step each parameter by itself, on every tier and on two ranks: the bits of plain torch.

A contract is declared: by the user, by the optimizer, or by the list. What a step shows against it is an error.
"""

import random
from functools import partial

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_offload.training import tiered
from zero_core import checkpoint
from zero_core.errors import UnsupportedOptimizerError
from zero_core.optim.contracts import contract_of
from zero_offload.testing import CrashByteStore

pytestmark = pytest.mark.promise("by-itself")

STEPS = 6
PLACES = ("device", "host", "nvme")


class Alone(torch.optim.Optimizer):
    """Looks at one parameter's norm, its class and its group's number, and counts steps in the group and in itself."""

    optimizer_contract = "by itself"

    def __init__(self, params, lr=0.1, noise=False):
        super().__init__(params, {"lr": lr, "noise": noise})
        self.k, self.rates = 0, [1.0 + i for i in range(len(self.param_groups))]

    @torch.no_grad()
    def step(self, closure=None):
        assert closure is None
        self.k += 1
        for number, group in enumerate(self.param_groups):
            group["step"] = group.get("step", torch.tensor(0)).add_(1)
            for p in group["params"]:
                if p.grad is not None:
                    self.move(p, group, self.rates[number] / (int(group["step"]) + self.k))

    def move(self, p, group, rate):
        state = self.state[p]
        if "exp_avg" not in state:
            state |= {"exp_avg": torch.zeros_like(p), "decay": 1.0, "steps": 0, "nothing": None}
            state |= {"rows": torch.zeros(p.shape[:1]), "most": torch.tensor(0.0), "seen": torch.tensor(0)}
        state["exp_avg"].lerp_(p.grad, 0.3)
        state["decay"] *= 0.9
        state["steps"] += 1
        state["seen"] += 1
        state["rows"] += p.grad.flatten(1).sum(1) if p.dim() > 1 else p.grad
        state["most"] = torch.maximum(state["most"], p.grad.norm())
        rate *= group["lr"] * (1 - state["decay"]) * getattr(p, "factor", 1.0) / (state["steps"] + state["seen"])
        if group["noise"]:
            p.add_(torch.randn_like(p), alpha=rate)
        p.data = p.data - rate * (state["exp_avg"] / (1e-3 + state["most"]) + 1e-3 * state["rows"].mean() * p)


class CountsUsed(torch.optim.Optimizer):
    """Counts a group's steps where one of its parameters has a gradient."""

    optimizer_contract = "by itself"

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "used": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            used = [p for p in group["params"] if p.grad is not None]
            group["used"] += bool(used)
            for p in used:
                p.sub_(p.grad.sign() * (group["lr"] / group["used"]))


class Looks(Alone):
    """Its groups' values depend on a parameter's gradient, so it does not step parameters by themselves."""

    def move(self, p, group, rate):
        group["d"] = group.get("d", 0.0) + float(p.grad.abs().sum())
        super().move(p, group, rate / (1.0 + group["d"]))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(7, 7, bias=False), nn.LayerNorm(7)) for _ in range(2))
        self.blocks[0][0].weight.factor = 3.0

    def forward(self, x):
        x = self.inside(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return x


def built():
    torch.manual_seed(0)
    return Model()


def groups_of(model):
    parameters = list(model.parameters())
    return [{"params": parameters[::2]}, {"params": parameters[1::2], "lr": 0.05}]


def loss_of(model, step):
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(step))
    return model(x).square().mean() * (1.0, 1.0, 1e-3, 30.0)[step % 4]


def train(model, optimizer, first=0, steps=STEPS):
    for step in range(first, first + steps):
        kit.step(optimizer, loss_of(model, step))


def plain(build, steps=STEPS):
    model = built()
    optimizer = build(groups_of(model))
    train(model, optimizer, steps=steps)
    return {name: value.clone() for name, value in model.state_dict().items()}, optimizer


def sharded(build, place="device", model=None, **options):
    model = model or built()
    store = None if place == "device" else tiered(place)
    return model, zero_core.shard(model, build(groups_of(model)), units=[nn.Sequential], store=store, **options)


def same(model, wanted):
    for name, value in model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


adafactor = partial(torch.optim.Adafactor, lr=0.05)
adamw = partial(torch.optim.AdamW, lr=0.05)
amsgrad = partial(torch.optim.AdamW, lr=0.05, amsgrad=True)
radam = partial(torch.optim.RAdam, lr=0.05)
adagrad = partial(torch.optim.Adagrad, lr=0.05, initial_accumulator_value=0.1, maximize=True)


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("build", [Alone, adafactor, amsgrad, radam, adagrad], ids=str)
def test_plain_torchs_bits_on_every_tier_and_rank(build, place):
    """All ranks have one batch, so their mean is exact."""
    wanted, dense = plain(build)
    model, optimizer = sharded(build, place)
    train(model, optimizer)
    same(model, wanted)
    for mine, theirs in zip(optimizer.param_groups, dense.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    optimizer.close()


def test_values_written_between_steps_that_give_parameters_other_memory_are_stepped():
    dense = built()
    model, optimizer = sharded(Alone)
    for each, its in ((dense, Alone(groups_of(dense))), (model, optimizer)):
        train(each, its)
        with torch.no_grad():
            each.inside.weight.fill_(0.5)
        train(each, its, STEPS)
    same(model, dense.state_dict())


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", PLACES)
def test_states_of_every_kind_go_to_plain_torch_and_back(place, tmp_path):
    wanted, _ = plain(Alone, 2 * STEPS)
    model, optimizer = sharded(Alone, place)
    train(model, optimizer)
    full = optimizer.full_state_dict(rank0_only=False)
    weights = model.state_dict()
    checkpoint.save(tmp_path / "saved", model, optimizer)
    optimizer.close()

    _, dense = plain(Alone)
    for number, theirs in dense.state_dict()["state"].items():
        mine = full["state"][number]
        assert {k: type(v) for k, v in mine.items()} == {k: type(v) for k, v in theirs.items()}
        assert all(torch.equal(mine[k], v) if isinstance(v, torch.Tensor) else mine[k] == v for k, v in theirs.items())

    model, optimizer = sharded(Alone, place)  # with numbers of its own that count steps: k is in no state dict
    model.load_state_dict(weights)
    optimizer.load_state_dict(full)
    again, other = sharded(Alone, place)
    checkpoint.load(tmp_path / "saved", again, other)
    torchs = built()
    torchs.load_state_dict(weights)
    theirs = Alone(groups_of(torchs))
    theirs.load_state_dict(full)
    for each, its in ((model, optimizer), (again, other), (torchs, theirs)):
        train(each, its, STEPS)
    same(model, torchs.state_dict())
    same(again, torchs.state_dict())
    assert not torch.equal(wanted["inside.weight"], torchs.state_dict()["inside.weight"])  # as with plain torch
    optimizer.close()
    other.close()


def test_a_state_before_shard_goes_on():
    wanted, _ = plain(Alone, 2 * STEPS)
    model = built()
    optimizer = Alone(groups_of(model))
    train(model, optimizer)
    optimizer = zero_core.shard(model, optimizer, units=[nn.Sequential], store=tiered("host"))
    train(model, optimizer, STEPS)
    same(model, wanted)


@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", PLACES)
def test_a_group_without_a_gradient_in_a_step_counts_as_in_plain_torch(place):
    def used(model, optimizer):
        for step in range(STEPS):
            x = torch.ones(3, 5) * (step + 1)
            kit.step(optimizer, (model.inside(x) if step % 3 else model(x)).square().sum())

    def apart(model):
        return CountsUsed([{"params": model.inside.parameters()}, {"params": model.blocks.parameters()}])

    dense = built()
    plain = apart(dense)
    used(dense, plain)
    model = built()
    store = None if place == "device" else tiered(place)
    optimizer = zero_core.shard(model, apart(model), units=[nn.Sequential], store=store)
    used(model, optimizer)
    same(model, dense.state_dict())
    assert [group["used"] for group in optimizer.param_groups] == [STEPS, 2]
    optimizer.close()


def _follows_it(build, **options):
    wanted, _ = plain(build)
    model, optimizer = sharded(build, **options)
    train(model, optimizer)
    same(model, wanted)


@pytest.mark.advice("Use another optimizer, such as AdamW")
@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_shows_that_the_word_was_wrong_is_an_error(place):
    model, optimizer = sharded(Looks, place)
    with pytest.raises(
        UnsupportedOptimizerError,
        match=r"the step of .* has set 'd' in .* of optimizer Looks to .*, but a trial step .*by itself",
    ):
        train(model, optimizer)
        model.state_dict()
    _follows_it(adamw)
    _follows_it(Alone)


class Adds(Alone):
    step = Alone.step
    optimizer_contract = "by itself"

    def move(self, p, group, rate):
        super().move(p, group, rate)
        if self.k == 3 and len(self.param_groups) == 2:
            self.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


@pytest.mark.parametrize("place", PLACES)
def test_a_step_that_adds_a_group_is_an_error_and_before_shard_it_is_none(place):
    """It was a KeyError of ours, of a key that shards have in their groups."""
    model, optimizer = sharded(Adds, place)
    with pytest.raises(UnsupportedOptimizerError, match="adds a param group.* before zero_core.shard"):
        train(model, optimizer)
    model = built()
    parameters = list(model.parameters())
    three = [{"params": each} for each in (parameters[:1], parameters[1:3], parameters[3:])]
    train(model, zero_core.shard(model, Adds(three), units=[nn.Sequential]))


class Odd(Alone):
    def move(self, p, group, rate):
        if group["noise"]:
            self.state[p]["queue"] = [p.grad]
        super().move(p, {**group, "noise": False}, rate)


@pytest.mark.advice(
    "set options without such states, or use another",
    "set options with which step() draws none, or use another",
    "steps its parameters together (optimizer_contract='together')",
    "Else leave update_in_backward out",
)
@pytest.mark.parametrize(
    ("build", "options", "told"),
    [
        (partial(Alone, noise=True), {}, r"Alone draws random numbers in step\(\).*No parameter was updated"),
        (partial(Odd, noise=True), {}, r"Odd keeps the state 'queue' \(list\). Shards keep only contiguous float32"),
        (Alone, {"place": "host", "optimizer_contract": "together"}, "Alone steps its parameters together"),
        (
            lambda groups: torch.optim.LBFGS([p for group in groups for p in group["params"]]),
            {"place": "host", "optimizer_contract": "by itself"},
            r"LBFGS steps its parameters together \(optimizer_contract='together'\)",
        ),
        (
            Alone,
            {"optimizer_contract": "alone"},
            "optimizer_contract='alone' of optimizer Alone is unknown. It must be 'elementwise'",
        ),
        (Alone, {"update_in_backward": True}, "that of Alone does, .*Else leave update_in_backward out"),
    ],
)
def test_what_cannot_be_stepped_by_itself_is_refused_and_no_parameter_was_updated(build, options, told):
    model = built()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(UnsupportedOptimizerError, match=told):
        train(*sharded(build, model=model, **options), steps=1)
    same(model, before)
    _follows_it(build.func if isinstance(build, partial) else Alone)
    _follows_it(adamw)


def test_a_class_that_replaces_the_step_of_a_declared_one_has_no_contract():
    """Fails if it inherits the word of another step: several ranks would train otherwise, in silence."""

    class Replaced(CountsUsed):
        @torch.no_grad()
        def step(self, closure=None):
            norm = sum(p.grad.norm() for group in self.param_groups for p in group["params"] if p.grad is not None)
            super().step()
            self.last = float(norm)

    class Named(CountsUsed):
        """Has another name alone."""

    class Clipped(zero_core.Muon):
        """Was said to need whole matrices, by a step that it has no more."""

        step = Replaced.step

    parameters = [nn.Parameter(torch.zeros(2))]
    assert contract_of(Clipped([nn.Parameter(torch.zeros(2, 2))])) == "together"
    assert contract_of(Replaced(parameters)) == "together"
    assert contract_of(Named(parameters)) == contract_of(CountsUsed(parameters)) == "by itself"
    mine = Replaced(parameters)
    mine.optimizer_contract = "by itself"
    assert contract_of(mine) == "by itself"


def test_the_list_says_nothing_of_subclasses():
    class Mine(torch.optim.AdamW):
        pass

    parameters = [nn.Parameter(torch.zeros(2))]
    assert contract_of(torch.optim.AdamW(parameters)) == "elementwise"
    assert contract_of(Mine(parameters)) == "together"


@pytest.mark.parametrize("build", [CountsUsed, Alone])
def test_a_durable_run_goes_on_with_what_steps_have_written(build):
    """Into groups and into the optimizer itself. Fails if a run that was killed counts from 0 again."""
    wanted, _ = plain(build, 2 * STEPS)

    def durable(disk):
        model = built()
        store = tiered("nvme", nvme=disk, durable=True)
        return model, zero_core.shard(model, build(groups_of(model)), units=[nn.Sequential], store=store)

    disk = CrashByteStore()
    model, optimizer = durable(disk)
    zero_core.resume(model, optimizer)
    train(model, optimizer)
    zero_core.commit(model)
    optimizer.close()
    model, optimizer = durable(disk.crashed(random.Random(0)))
    assert zero_core.resume(model, optimizer).step == STEPS
    train(model, optimizer, STEPS)
    same(model, wanted)
    optimizer.close()
