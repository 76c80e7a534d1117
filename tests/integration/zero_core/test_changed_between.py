"""Parameters that a step or a write changes between a forward and its backward.

Each program runs beside plain torch. A test fails if only one of the two raises, or if neither does and the parameters
differ after the next step: a backward that gathers new values silently gives a gradient that belongs to neither.
"""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from tests.integration.zero_core import toys

pytestmark = pytest.mark.promise("changed-between")

EVERYWHERE = pytest.mark.parametrize(("size", "stage"), [(1, 0), (1, 3), *((2, stage) for stage in range(4))])
MODIFIED = "modified by an inplace operation"


class Side:
    """A model and its optimizer, plain or sharded."""

    def __init__(self, model: nn.Module, stage: int | None, **options):
        self.model, self.sharded = model, stage is not None
        self.optimizer = toys.sgd(model.parameters())
        if stage is not None:
            self.optimizer = zero_core.shard(model, self.optimizer, stage=stage, **options)

    def gathered(self):
        return zero_core.gathered(self.model) if self.sharded else nullcontext(self.model)

    def loss(self, at=0):
        return toys.loss_of(self.model, toys.data(at, 0))

    def step(self):
        self.optimizer.step()
        self.optimizer.zero_grad()


def between(change, make=toys.Stack):
    """A program that calls `change` between a forward and its backward, with other gradients pending."""

    def program(side):
        side.loss(1).backward()
        loss = side.loss()
        change(side)
        loss.backward()

    return make, program


def written(write, name="blocks.1.up.weight", make=toys.Stack):
    def change(side):
        with torch.no_grad():
            write(side.model.get_parameter(name))

    return between(change, make)


def no_steps(side):
    """A learning rate of zero still counts as a change in plain torch."""
    side.optimizer.param_groups[0]["lr"] = 0.0
    side.step()


def load(side):
    side.model.load_state_dict({name: 0.9 * value for name, value in side.model.state_dict().items()})


def gathered(write, name="blocks.1.up.weight", rank=None):
    """Writes inside of zero_core.gathered, on all ranks or on one. What other ranks than the first write is lost."""

    def change(side):
        with side.gathered(), torch.no_grad():
            if rank is None or not side.sharded or toys.world()[0] == rank % toys.world()[1]:
                write(side.model.get_parameter(name))

    return between(change)


def evaluate(side):
    with torch.no_grad():
        side.loss(3)
    side.model.eval()
    side.loss(4)


def twice_over_one_graph(side):
    loss = side.loss()
    loss.backward(retain_graph=True)
    side.step()
    loss.backward()


def second_order(side):
    x = toys.data(0, 0).requires_grad_(True)
    (slope,) = torch.autograd.grad(toys.loss_of(side.model, x), x, create_graph=True)
    with torch.no_grad():
        side.model.head.weight.mul_(0.9)
    slope.square().sum().backward()


class Pair(nn.Module):
    """A generator and a discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(5, toys.WIDTH), nn.Tanh(), nn.Linear(toys.WIDTH, 5))
        self.discriminator = nn.Sequential(nn.Linear(5, toys.WIDTH), nn.Tanh(), nn.Linear(toys.WIDTH, 1))


def adversarial(again):
    """One optimizer steps the discriminator alone. `again`: the generator is judged by the stepped one, as it must."""

    def program(side):
        generator, discriminator = side.model.generator, side.model.discriminator
        for at in range(3):
            made = generator(toys.data(at, 0))
            judged = discriminator(made).mean()
            (discriminator(toys.data(at, 1)).mean() - discriminator(made.detach()).mean()).backward()
            side.step()
            (discriminator(made).mean() if again else judged).backward()
            side.step()

    return Pair, program


def external(use):
    """A weight that is used outside of its module, and then written."""

    def program(side):
        weight = side.model.blocks[1].up.weight
        term = use(weight)
        with torch.no_grad():
            weight.mul_(0.9)
        term.backward()

    return toys.Stack, program


class Clamping(toys.Twice):
    """A block that is called twice writes into its own weight, which its first call had saved."""

    def make_block(self):
        class Block(toys.Block):
            def forward(self, x):
                with torch.no_grad():
                    self.up.weight.clamp_(-0.1, 0.1)
                return super().forward(x)

        return Block()


RAISING = {
    "step": between(Side.step),
    "step of nothing": between(no_steps),
    "step, block called twice": between(Side.step, toys.Twice),
    "step, tied": between(Side.step, toys.Tied),
    "step, in place": between(Side.step, toys.InPlace),
    "write": written(lambda w: w.mul_(0.9)),
    "write of the head": written(lambda w: w.mul_(0.9), "head.weight"),
    "write of a frozen one": written(lambda w: w.mul_(0.9), "blocks.1.up.weight", toys.Frozen),
    "write to the tied one": written(lambda w: w.mul_(0.9), "blocks.0.up.weight", toys.Tied),
    "detach": written(lambda w: w.detach().mul_(0.9)),
    "row": written(lambda w: w[0].copy_(w[1])),
    "foreach": written(lambda w: torch._foreach_mul_([w], 0.9)),
    "init": written(lambda w: nn.init.constant_(w, 0.1)),
    "load": between(load),
    "gathered": gathered(lambda w: w.mul_(0.9)),
    "gathered on rank 0": gathered(lambda w: w.mul_(1.0), rank=0),
    "gathered on rank 1": gathered(lambda w: w.mul_(1.0), rank=1),
    "second backward": (toys.Stack, twice_over_one_graph),
    "second order": (toys.Stack, second_order),
    "adversarial": adversarial(again=False),
    "outside": external(lambda w: w.square().sum()),
    "outside, frozen": external(lambda w: (w.requires_grad_(False) * torch.ones(w.shape, requires_grad=True)).sum()),
    "clamped and called twice": (Clamping, lambda side: side.loss().backward()),
}
WORKING = {
    "nothing": between(lambda side: None),
    "evaluation": between(evaluate),
    "bias": written(lambda b: b.mul_(0.9), "blocks.1.up.bias"),
    "bias, gathered": gathered(lambda b: b.mul_(0.9), "blocks.1.up.bias"),
    "data": written(lambda w: w.data.mul_(0.9)),
    "data, gathered": gathered(lambda w: w.data.mul_(0.9)),
    "unused": written(lambda w: w.mul_(0.9), "blocks.2.up.weight", toys.Unused),
    "write, checkpointed": written(lambda w: w.mul_(0.9), make=lambda: toys.Checkpointed(False)),
    "write, checkpointed, reentrant": written(lambda w: w.mul_(0.9), make=lambda: toys.Checkpointed(True)),
    "adversarial": adversarial(again=True),
    "outside": external(lambda w: w.sum()),
}


SELECTED = ("step", "write", "gathered on rank 1", "outside", "bias", "adversarial")  # also on two ranks at stages 0-2


def both(make, program, stage, **options):
    """Whether plain torch raised; both did or neither. Then a clean step, after which the parameters are equal."""
    dense, model = kit.twins(make, seed=1)
    sides = [Side(dense, None), Side(model, stage, **options)]
    raised = []
    for side in sides:
        try:
            program(side)
        except RuntimeError as error:
            assert MODIFIED in str(error), error
            side.optimizer.zero_grad()
            raised.append(True)
        else:
            side.step()
            raised.append(False)
    assert raised[0] == raised[1], f"plain torch {'raised' if raised[0] else 'computed'}, and sharded did not"
    if type(model) not in (Pair, Clamping):
        for side in sides:
            side.loss(5).backward()
            side.step()
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)
    sides[1].optimizer.close()
    return raised[0]


def run_all(stage, raising):
    for name, (make, program) in (RAISING if raising else WORKING).items():
        if toys.world()[1] > 1 and stage != 3 and name not in SELECTED:
            continue
        try:
            assert both(make, program, stage) is raising, "plain torch does something else"
        except Exception as error:
            raise AssertionError(f"{name}: {error}") from error


@EVERYWHERE
def test_what_plain_torch_refuses_is_refused(ranks, size, stage):
    ranks(size).run(run_all, stage, True)


@EVERYWHERE
def test_what_plain_torch_computes_has_the_same_gradients(ranks, size, stage):
    ranks(size).run(run_all, stage, False)


@kit.on_ranks(1, 2)
def test_a_checkpoint_that_is_loaded_before_the_backward_is_a_change_on_every_rank(tmp_path):
    model, optimizer = kit.sharded(toys.Stack, toys.sgd)
    zero_core.checkpoint.save(tmp_path, model, optimizer)
    loss = toys.loss_of(model, toys.data(0, 0))
    zero_core.checkpoint.load(tmp_path, model, optimizer)
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))


@kit.on_ranks(2)
def test_a_step_changes_the_parameters_that_had_a_gradient_alone():
    model, optimizer = kit.sharded(Pair, toys.sgd)
    stepped, other = model.discriminator[0].weight.data, model.generator[0].weight.data
    model.discriminator(toys.data(0, 0)).sum().backward()
    optimizer.step()
    other.mul_(0.5)
    with pytest.raises(zero_core.errors.ChangedParameterError, match="is used after a step"):
        stepped.mul_(0.5)


class Rewriting(nn.Module):
    """A recomputation writes into the root's own parameter, before the backward gets to the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(5, 5), nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(5))

    def tail(self, x):
        with torch.no_grad():
            self.scale.mul_(0.9)
        return x * self.scale

    def forward(self, x):
        return checkpoint(self.tail, self.second(self.first(x)), use_reentrant=False)


@pytest.mark.parametrize("stage", [0, 3])
@kit.on_ranks(1, 2)
def test_what_a_recomputation_wrote_before_the_error_is_kept(stage):
    program = written(lambda w: w.mul_(0.9), "second.weight")[1]
    assert both(Rewriting, program, stage, units=[nn.Linear])


@kit.on_ranks(1, 2)
def test_an_update_in_backward_is_a_change_before_the_next_one():
    model, optimizer = kit.sharded(toys.Stack, toys.sgd, update_in_backward=True)
    loss = toys.loss_of(model, toys.data(0, 0))
    toys.loss_of(model, toys.data(1, 0)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match=MODIFIED):
        loss.backward()
