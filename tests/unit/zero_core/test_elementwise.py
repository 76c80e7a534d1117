"""What an elementwise optimizer keeps: found by two dry steps, and refused where no shard can keep it."""

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from zero_core.errors import UnsupportedOptimizerError
from zero_core.optim.contracts import over_segments
from zero_core.optim.state_names import kept_states

CPU = torch.device("cpu")


class Toy(torch.optim.Optimizer):
    """An optimizer of the user's own: `change(self, p, gradient)` is what a subclass does to one parameter."""

    optimizer_contract = "elementwise"

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


def make(change=Toy.change, **attributes):
    return type("Made", (Toy,), {"change": change, **attributes})(parameters())


def keeping(name, value):
    """An optimizer that has, under `name`, what `value` makes of its parameters."""
    optimizer = make()
    setattr(optimizer, name, value(optimizer.param_groups[0]["params"]))
    return optimizer


def counting(where):
    """An optimizer that counts in a dictionary besides those of its parameters."""

    def change(self, p, gradient, group):
        counts = where(self, group)
        counts["k"] = counts.get("k", 0) + 1
        return gradient / counts["k"]

    return make(change)


def needs_a_closure(self, closure):
    closure()


@pytest.mark.promise("elementwise-refused")
@pytest.mark.parametrize(
    ("build", "told"),
    [
        (lambda: keeping("large", lambda given: {given[0]: 1.0}), r"keeps parameters in self\.large"),
        (lambda: keeping("large", lambda given: {id(given[0])}), r"keeps parameters in self\.large"),
        (
            lambda: keeping("buffers", lambda given: [torch.zeros_like(p) for p in given]),
            r"in self\.buffers, .*: keep tensors of each parameter's shape in self.state\[parameter\]",
        ),
        (lambda: counting(lambda optimizer, group: optimizer.state), r"changes self\.state\['k'\] in step.*Keep it"),
        (lambda: counting(lambda optimizer, group: vars(optimizer)), r"changes self\.k in step"),
        (lambda: counting(lambda optimizer, group: group), r"changes param_groups\[\.\.\.\]\['k'\] in step"),
        (lambda: make(step=needs_a_closure), r"raised TypeError.* without a closure. Or use another optimizer"),
    ],
)
def test_what_a_shard_cannot_keep_is_refused(build, told):
    """Numbers that are of no parameter nobody would save, and every unit would count for itself."""
    with pytest.raises(UnsupportedOptimizerError, match=told):
        kept_states(build(), CPU)


@pytest.mark.advice("Keep it in self.state[p]")
def test_a_number_of_each_parameter_is_kept():
    def count(self, p, gradient, group):
        self.state[p]["k"] = self.state[p].get("k", 0) + 1
        return gradient

    assert kept_states(make(count), CPU).scalars == ("k",)


@pytest.mark.advice("may have only numbers, and tensors of the shape of p")
def test_states_of_other_shapes_are_refused_of_an_elementwise_one_and_kept_of_one_by_itself():
    def rows(self, p, gradient, group):
        self.state[p]["rows"] = torch.zeros(3)
        return gradient

    with pytest.raises(UnsupportedOptimizerError, match=r"keeps 'rows' \(shape \(3,\)\) .*\"by itself\""):
        kept_states(make(rows), CPU)
    optimizer = make(rows)
    optimizer.optimizer_contract = "by itself"  # as is advised
    assert kept_states(optimizer, CPU).shaped == ("rows",)


def test_arguments_that_are_not_options_of_a_group_are_kept():
    view = nn.Parameter(torch.tensor([1.0, 2.0]))
    copy = over_segments(Toy(parameters(), flag=True), [view], [0])
    view.grad = torch.tensor([3.0, -5.0])
    copy.step()
    torch.testing.assert_close(view.detach(), torch.tensor([0.9, 2.1]))


@pytest.mark.promise("shard-computes-nothing")
def test_a_dry_step_draws_no_random_number_and_changes_no_optimizer():
    def noisy(self, p, gradient, group):
        torch.randn(3)
        return gradient

    optimizer, state = make(noisy), torch.get_rng_state()
    before = {key: value for key, value in vars(optimizer).items()}
    kept_states(optimizer, CPU)
    assert torch.equal(torch.get_rng_state(), state)
    assert vars(optimizer) == before and not optimizer.state


def test_a_schedulers_wrapper_is_no_attribute_of_the_class():
    optimizer = torch.optim.AdamW(parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    optimizer.step()
    assert kept_states(optimizer, CPU).tensors == ("exp_avg", "exp_avg_sq")


@pytest.mark.promise("count-only")
def test_a_count_without_other_states_is_carried_over():
    def warm(self, p, gradient, group):
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        return min(1.0, state["step"] / 4) * gradient

    def run(sharded):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = type("Warm", (Toy,), {"change": warm})(model.parameters())
        for step in range(3):
            if sharded and step == 2:
                optimizer = zero_core.shard(model, optimizer)
            kit.step(optimizer, model(torch.ones(2, 4)).square().mean())
        return model.state_dict()["weight"]

    torch.testing.assert_close(run(True), run(False))
