"""The probe of an optimizer: what steps a parameter otherwise than its slices is refused before anything is cut."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from zero_core.errors import UnsupportedOptimizerError
from zero_core.optim import contracts, elementwise
from zero_core.optim.elementwise import kept_states
from zero_core.optim.segments import over_segments

CPU = torch.device("cpu")
TORCHS = json.loads(contracts._LIST.read_text(encoding="utf-8"))["torch"]["optimizers"]


class Toy(torch.optim.Optimizer):
    """An optimizer of the user's own: `change(self, p, gradient)` is what a subclass does to one parameter."""

    def __init__(self, params, lr=0.1, flag=False):
        super().__init__(params, {"lr": lr})
        self.flag = flag

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(group["lr"] * self.change(p, p.grad, group))

    def change(self, p, gradient, group):
        return gradient.sign() if self.flag else gradient


def parameters():
    return [nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(4))]


def make(change, **options):
    return type("Made", (Toy,), {"change": change})(parameters(), **options)


NOT_ELEMENTWISE = {
    "rows of matrices": lambda self, p, g, group: g / g.norm(dim=1, keepdim=True) if g.dim() == 2 else g.sign(),
    "centred kernels": lambda self, p, g, group: g - g.mean((1, 2, 3), keepdim=True) if g.dim() == 4 else g,
    "three dimensions": lambda self, p, g, group: g.cumsum(1) if g.dim() == 3 else g,
    "large matrices": lambda self, p, g, group: g - g.mean(0) if g.dim() == 2 and min(g.shape) >= 128 else g,
    "no decay of vectors": lambda self, p, g, group: g + (0.1 * p if p.dim() > 1 else 0.0),
    "the whole's norm": lambda self, p, g, group: g / g.norm(),
    "the first element": lambda self, p, g, group: g * g.reshape(-1)[0],
    "blocks of a large parameter": lambda self, p, g, group: (
        (g.reshape(-1, 256) / g.reshape(-1, 256).norm(dim=1, keepdim=True)).view_as(g)
        if g.numel() >= 4096 and g.numel() % 256 == 0
        else g
    ),
}


@pytest.mark.parametrize("change", NOT_ELEMENTWISE.values(), ids=NOT_ELEMENTWISE)
def test_optimizers_that_look_at_shapes_are_refused(change):
    with pytest.raises(UnsupportedOptimizerError, match="Made is not elementwise: of a parameter of shape"):
        kept_states(make(change), CPU)


LATE_OR_LARGE = {
    "after its fourth step": lambda self, p, g, group: g / g.norm() if count(self, p) > 4 else g,
    "in its second step": lambda self, p, g, group: g / g.norm() if count(self, p) == 2 else g,
    "above a norm": lambda self, p, g, group: g / max(1.0, float(g.norm()) / 300),
    "below a norm": lambda self, p, g, group: g / g.norm() if float(g.norm()) < 0.01 else g,
}


def cautious(self, p, gradient, group):
    """Signs of a momentum, where the gradient has them too, scaled by the part of the elements of which that is so."""
    state = self.state[p]
    momentum = state["momentum"] = 0.9 * state.get("momentum", torch.zeros_like(p)) + 0.1 * gradient
    agree = (momentum * gradient > 0).float()
    return momentum.sign() * agree / agree.mean().clamp(min=1e-3)


@pytest.mark.parametrize("rate", [0.1, 1e-6, 0.0])
def test_cautious_optimizers_are_refused_at_any_rate(rate):
    """They are elementwise as long as no gradient changes its sign, and by steps of 1e-6 as far as values show."""
    with pytest.raises(UnsupportedOptimizerError, match="Made is not elementwise: of a parameter of shape"):
        kept_states(make(cautious, lr=rate), CPU)


def test_a_mask_of_single_elements_passes():
    def masked(self, p, gradient, group):
        return cautious(self, p, gradient, group).sign()

    assert kept_states(make(masked, lr=1e-6), CPU).tensors == ("momentum",)


def count(self, p):
    self.state[p]["step"] = self.state[p].get("step", 0) + 1
    return self.state[p]["step"]


@pytest.mark.parametrize("change", LATE_OR_LARGE.values(), ids=LATE_OR_LARGE)
def test_optimizers_that_look_at_whole_parameters_late_or_at_some_sizes_are_refused(change):
    with pytest.raises(UnsupportedOptimizerError, match="Made is not elementwise: of a parameter of shape"):
        kept_states(make(change), CPU)


@pytest.mark.parametrize("name", [n for n, (each, *_) in TORCHS.items() if each == "elementwise"])
def test_the_optimizers_of_torch_that_are_not_probed_are_elementwise(name, monkeypatch):
    """The probe passes each of them, and finds what two steps show."""
    optimizer = getattr(torch.optim, name)(parameters())
    known = kept_states(optimizer, CPU)
    monkeypatch.setattr(elementwise, "contract_of", lambda optimizer: None)
    assert kept_states(optimizer, CPU) == known


class ByPosition(Toy):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for depth, p in enumerate(group["params"]):
                if p.grad is not None:
                    p.sub_(group["lr"] * 0.5**depth * p.grad)


class AllOrNothing(Toy):
    def step(self, closure=None):
        if all(p.grad is not None for group in self.param_groups for p in group["params"]):
            super().step()


@pytest.mark.parametrize(
    ("kind", "how"), [(ByPosition, "after another one with a"), (AllOrNothing, "before another one without a")]
)
def test_optimizers_that_look_at_neighbours_are_refused(kind, how):
    with pytest.raises(UnsupportedOptimizerError, match=f"steps a parameter otherwise {how} gradient in its group"):
        kept_states(kind(parameters()), CPU)


class Slow(nn.Parameter):
    """A class that an optimizer may look at."""


def with_looks(change):
    """A model of which one weight is a `Slow` and the other has an attribute, and an optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].weight = Slow(model[0].weight.detach().clone())
    model[1].weight.factor = 0.5
    return model, type("Made", (Toy,), {"change": change})


@pytest.mark.parametrize(
    "change",
    [
        lambda self, p, g, group: g * getattr(p, "factor", group.get("factor", 1.0)),
        lambda self, p, g, group: g * (group.get("factor", 0.5) if isinstance(p, Slow) else group.get("factor", 1.0)),
    ],
)
def test_optimizers_that_look_at_a_parameters_class_or_attributes_are_refused(change):
    """As geoopt's at a manifold: slices of parameters have neither."""
    model, kind = with_looks(change)
    with pytest.raises(UnsupportedOptimizerError, match=r"\(Parameter with factor, Slow with no attributes\)"):
        zero_core.shard(model, kind(model.parameters()))
    plain, _ = with_looks(change)
    kit.step(kind(plain.parameters()), plain(torch.ones(2, 4)).square().mean())
    halves = {"0.weight"} if "isinstance" in change.__code__.co_names else {"1.weight"}
    groups = [  # as is advised
        {"params": [p for name, p in model.named_parameters() if (name in halves) is half], "factor": factor}
        for half, factor in ((True, 0.5), (False, 1.0))
    ]
    model[0].weight.__class__ = nn.Parameter
    del model[1].weight.factor
    kit.step(zero_core.shard(model, kind(groups)), model(torch.ones(2, 4)).square().mean())
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_classes_and_attributes_that_an_optimizer_does_not_look_at_pass():
    model, kind = with_looks(lambda self, p, g, group: g)
    optimizer = zero_core.shard(model, kind(model.parameters()))
    kit.step(optimizer, model(torch.ones(2, 4)).square().mean())
    zero_core.shard(model, kind(model.parameters())).close()  # where parameters are sharded already
    model, _ = with_looks(lambda self, p, g, group: g)
    zero_core.shard(model, torch.optim.AdamW(model.parameters())).close()


class ByGroup(Toy):
    """Divides each step by its group's first rate, which it looks up by the group's number."""

    def __init__(self, params, lr=0.1, in_groups=False):
        super().__init__(params, lr)
        self.in_groups, self.betas = in_groups, (0.5, 0.9)
        self.first = [group["lr"] for group in self.param_groups]
        for group, rate in zip(self.param_groups, self.first, strict=True):
            group["first"] = rate
        if in_groups:
            self.first = []

    @torch.no_grad()
    def step(self, closure=None):
        rates = [group["first"] for group in self.param_groups] if self.in_groups else self.first
        for group, first in zip(self.param_groups, rates, strict=False):
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(0.01 * group["lr"] / first * p.grad)


def of_two_groups(first, second, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    groups = [{"params": list(part.parameters()), "lr": lr} for part, lr in zip(model, (first, second), strict=True)]
    return model, ByGroup(groups, **options)


def weights_after_a_step(model, optimizer):
    for group in optimizer.param_groups:
        group["lr"] = 0.3
    kit.step(optimizer, model(torch.ones(2, 4)).square().mean())
    return model.state_dict()["1.weight"]


def test_what_an_optimizer_looks_up_by_its_groups_number_is_refused():
    """AdaBound does so. A unit without the first group would be stepped with the first group's value."""
    model, optimizer = of_two_groups(0.1, 0.2)
    with pytest.raises(UnsupportedOptimizerError, match=r"its 2 groups \(as many entries: .*self\.first\)"):
        zero_core.shard(model, optimizer, units=[nn.Linear])
    wanted = weights_after_a_step(*of_two_groups(0.1, 0.2))
    model, optimizer = of_two_groups(0.1, 0.2, in_groups=True)  # as is advised
    sharded = zero_core.shard(model, optimizer, units=[nn.Linear])
    torch.testing.assert_close(weights_after_a_step(model, sharded), wanted)
    model, optimizer = of_two_groups(0.1, 0.2)
    several = [ByGroup([{"params": group["params"], "lr": group["lr"]}]) for group in optimizer.param_groups]
    sharded = zero_core.shard(model, several, units=[nn.Linear])
    torch.testing.assert_close(weights_after_a_step(model, sharded), wanted)


def test_what_an_optimizer_looks_up_by_its_groups_number_may_be_the_same_in_all():
    wanted = weights_after_a_step(*of_two_groups(0.1, 0.1))
    model, optimizer = of_two_groups(0.1, 0.1)
    sharded = zero_core.shard(model, optimizer, units=[nn.Linear])
    torch.testing.assert_close(weights_after_a_step(model, sharded), wanted)


def counts_itself(self, p, gradient, group):
    self.steps = getattr(self, "steps", 0) + 1
    return gradient / self.steps


def counts_in_its_group(self, p, gradient, group):
    group["k"] = group.get("k", 0) + 1
    return gradient / group["k"]


def counts_in_its_state(self, p, gradient, group):
    self.state["k"] = self.state.get("k", 0) + 1
    return gradient / self.state["k"]


def test_a_state_of_no_parameter_is_refused():
    with pytest.raises(UnsupportedOptimizerError, match=r"changes self\.state\['k'\] in step"):
        kept_states(make(counts_in_its_state), CPU)


def test_parameters_looked_up_by_identity_are_refused():
    for value in ({1: "x"}, None):
        optimizer = make(lambda self, p, g, group: g)
        first = optimizer.param_groups[0]["params"][0]
        optimizer.large = {id(first)} if value is None else {first: 1.0}
        with pytest.raises(UnsupportedOptimizerError, match=r"looks parameters up in self\.large"):
            kept_states(optimizer, CPU)


@pytest.mark.parametrize(
    ("change", "where"), [(counts_itself, r"self\.steps"), (counts_in_its_group, r"param_groups\[\.\.\.\]\['k'\]")]
)
def test_numbers_outside_of_the_state_are_refused(change, where):
    """Nobody would save them, and every unit would count for itself."""
    with pytest.raises(UnsupportedOptimizerError, match=f"changes {where} in step"):
        kept_states(make(change), CPU)


def test_tensors_outside_of_the_state_are_refused():
    optimizer = make(lambda self, p, g, group: g)
    optimizer.buffers = [torch.zeros_like(p) for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(UnsupportedOptimizerError, match=r"keeps tensors in self\.buffers"):
        kept_states(optimizer, CPU)


def test_an_optimizer_that_needs_a_closure_is_refused():
    class Needy(Toy):
        def step(self, closure):
            closure()

    with pytest.raises(UnsupportedOptimizerError, match=r"Needy over a new parameter .* raised TypeError"):
        kept_states(Needy(parameters()), CPU)


def test_arguments_that_are_not_options_of_a_group_are_kept():
    view = nn.Parameter(torch.tensor([1.0, 2.0]))
    copy = over_segments(Toy(parameters(), flag=True), [view], [0])
    view.grad = torch.tensor([3.0, -5.0])
    copy.step()
    torch.testing.assert_close(view.detach(), torch.tensor([0.9, 2.1]))


def test_probing_draws_no_random_number_and_changes_no_optimizer():
    def noisy(self, p, gradient, group):
        torch.randn(3)
        return gradient

    optimizer, state = make(noisy), torch.get_rng_state()
    before = {key: value for key, value in vars(optimizer).items()}
    kept_states(optimizer, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(optimizer) == before and not optimizer.state


@pytest.mark.parametrize("kind", ["Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam"])
@pytest.mark.parametrize("foreach", [False, True])
def test_stock_optimizers_pass(kind, foreach):
    kept = kept_states(getattr(torch.optim, kind)(parameters(), foreach=foreach), CPU)
    assert kept.tensors


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "SGD", "Adagrad"])
def test_fused_optimizers_pass(kind):
    options = {"momentum": 0.9} if kind == "SGD" else {}
    assert kept_states(getattr(torch.optim, kind)(parameters(), fused=True, **options), CPU).tensors


def test_a_schedulers_wrapper_is_no_attribute_of_the_class():
    optimizer = torch.optim.AdamW(parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    assert kept_states(optimizer, CPU).tensors == ("exp_avg", "exp_avg_sq")


class Warm(torch.optim.Optimizer):
    """Its only state is its step count, in which it warms up."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["step"] = state.get("step", 0) + 1
                    p.sub_(group["lr"] * min(1.0, state["step"] / 4) * p.grad)


def test_a_count_without_other_states_is_carried_over():
    def run(sharded):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = Warm(model.parameters())
        for step in range(3):
            if sharded and step == 2:
                optimizer = zero_core.shard(model, optimizer)
            kit.step(optimizer, model(torch.ones(2, 4)).square().mean())
        return model.state_dict()["weight"]

    torch.testing.assert_close(run(True), run(False))
