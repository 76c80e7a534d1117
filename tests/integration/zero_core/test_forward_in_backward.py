"""Forwards inside a backward, and backwards inside a forward: adjoints, reversible blocks, hooks that run the model.

Each model trains beside a dense twin. At stage 3 a test fails if a unit's memory goes while a graph still needs it, or
if a gradient is reduced before all of it has arrived.
"""

import threading
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import GradientError

pytestmark = pytest.mark.promise("forward-in-backward")


class Adjoint(torch.autograd.Function):
    """Euler's method without a graph. Its backward computes each step anew, more often than forward did."""

    @staticmethod
    def forward(ctx, function, steps, z, *parameters):
        ctx.function, ctx.steps = function, steps
        with torch.no_grad():
            states = [z]
            for _ in range(steps):
                states.append(states[-1] + function(states[-1]) / steps)
        ctx.save_for_backward(*states[:-1], *parameters)
        return states[-1]

    @staticmethod
    def backward(ctx, gradient):
        states, parameters = ctx.saved_tensors[: ctx.steps], ctx.saved_tensors[ctx.steps :]
        totals = [torch.zeros_like(p) for p in parameters]
        trained = [k for k, p in enumerate(parameters) if p.requires_grad]
        for z in reversed(states):
            with torch.no_grad():
                ctx.function(z)  # an adaptive solver tries steps that it throws away
            with torch.enable_grad():
                z = z.detach().requires_grad_()
                step = ctx.function(z) / ctx.steps
            back, *found = torch.autograd.grad(step, [z, *(parameters[k] for k in trained)], gradient)
            gradient = gradient + back
            for k, each in zip(trained, found, strict=True):
                totals[k] += each
        return None, None, gradient, *(totals[k] if k in trained else None for k in range(len(totals)))


class Couple(torch.autograd.Function):
    """y = x + f(x), of which backward keeps only y's gradient and computes the rest with a nested backward()."""

    @staticmethod
    def forward(ctx, function, x):
        ctx.function = function
        ctx.save_for_backward(x)
        with torch.no_grad():
            return x + function(x)

    @staticmethod
    def backward(ctx, gradient):
        with torch.enable_grad():
            x = ctx.saved_tensors[0].detach().requires_grad_()
            y = ctx.function(x)
        torch.autograd.backward(y, gradient)
        return None, gradient + x.grad


class Ode(toys.Stack):
    """Every block is the right side of an equation of its own."""

    def run(self, block, x):
        return Adjoint.apply(block, 3, x, *block.parameters())


class Reversible(toys.Stack):
    def run(self, block, x):
        return Couple.apply(block, x)


class Equilibrium(toys.Stack):
    """A deep equilibrium: a hook on the fixed point solves for the gradient by walking a second graph several times."""

    def layer(self, z, x):
        for block in self.blocks:
            z = 0.3 * block(z) + x
        return z

    def forward(self, x):
        x = self.embed(x)
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(3):
                z = self.layer(z, x)
        z = self.layer(z, x)
        start = z.detach().requires_grad_()
        end = self.layer(start, x.detach())

        def solve(gradient):
            total = gradient
            for _ in range(3):
                total = gradient + torch.autograd.grad(end, start, total, retain_graph=True)[0]
            return total

        if z.requires_grad and torch.is_grad_enabled():
            z.register_hook(solve)
        return self.head(z)


class ScaledBlock(toys.Block):
    """A hook inside of the block's own backward runs other blocks, and in their backwards the hook of those."""

    others = ()

    def forward(self, x):
        hidden = self.norm(x)
        if hidden.requires_grad and self.others:
            hidden.register_hook(partial(self.scaled, hidden.detach()))
        return x + self.down(torch.relu(self.up(hidden)))

    def scaled(self, hidden, gradient):
        with torch.enable_grad():
            given = hidden.requires_grad_()
            energy = sum(other(given) for other in self.others).sum()
        return gradient + 0.01 * torch.autograd.grad(energy, given)[0]


class HookInsideBlock(toys.Stack):
    def __init__(self):
        super().__init__()
        first, second, third = self.blocks
        object.__setattr__(second, "others", (first, third))
        object.__setattr__(third, "others", (first,))

    def make_block(self):
        return ScaledBlock()


class Energy(toys.Stack):
    """The output is the slope of an energy, which forward computes with torch.autograd.grad."""

    def forward(self, x):
        train = torch.is_grad_enabled() and self.training
        with torch.enable_grad():
            given = x.detach().requires_grad_()
            energy = super().forward(given).square().sum()
            slope = torch.autograd.grad(energy, given, create_graph=train)[0]
        return self.head(self.embed(x)) + slope.sum()


class Frozen(Reversible):
    """The middle block is not trained, nor the first adjoint's."""

    def __init__(self):
        super().__init__(4)
        self.blocks[1].requires_grad_(False)
        self.blocks[3].up.weight.requires_grad_(False)

    def run(self, block, x):
        return Ode.run(self, block, x) if block is self.blocks[3] else super().run(block, x)


MODELS = {
    "adjoint": Ode,
    "reversible": Reversible,
    "equilibrium": Equilibrium,
    "hook inside a block": HookInsideBlock,
    "energy": Energy,
    "frozen": Frozen,
}


EVERYWHERE = pytest.mark.parametrize(("size", "stages"), [(1, (0, 3)), (2, (0, 1, 2, 3))])


@EVERYWHERE
@pytest.mark.parametrize("model", MODELS)
@kit.on_ranks()
def test_trains_as_plain_torch(size, stages, model):
    for stage in stages:
        toys.train(MODELS[model], stage=stage, steps=2)


@pytest.mark.parametrize(("size", "model"), [(1 + number % 2, model) for number, model in enumerate(MODELS)])
@kit.on_ranks()
def test_without_gathering_ahead(size, model):
    toys.train(MODELS[model], steps=2, micro=2, prefetch_bytes=0, resident_bytes=600)


def square():
    return nn.Sequential(nn.Linear(5, toys.WIDTH), nn.Tanh(), nn.Linear(toys.WIDTH, 5))


def around_and_along(model, x):
    """The whole sharded model is the right side of an equation, and is called once more."""
    return Adjoint.apply(model, 2, x, *model.parameters()).square().mean() + model(x).mean()


def checkpointed(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean()


@EVERYWHERE
@pytest.mark.parametrize("loss", [around_and_along, checkpointed])
@kit.on_ranks()
def test_a_model_inside_of_a_function(size, stages, loss):
    for stage in stages:
        toys.train(square, stage=stage, steps=2, loss=loss)


@EVERYWHERE
@kit.on_ranks()
def test_gradients_inside_of_a_forward_without_gradients(size, stages):
    for stage in stages:
        dense, _, model, optimizer = kit.pair(lambda: Energy().eval(), toys.sgd, stage=stage)
        for step in range(2):
            with torch.no_grad():
                torch.testing.assert_close(model(toys.data(step, 0)), dense(toys.data(step, 0)))


@kit.on_ranks(1, 2)
def test_updates_in_backward_train_as_plain_torch_or_refuse_a_later_use():
    for name in ("reversible", "equilibrium", "frozen", "energy"):
        toys.train(MODELS[name], steps=2, update_in_backward=True)
    model = kit.sharded(HookInsideBlock, toys.sgd, update_in_backward=True)[0]
    with pytest.raises(GradientError, match="unit 'blocks.2' is used inside a backward that updates it"):
        toys.loss_of(model, toys.data(0, 0)).backward()


def test_an_inner_backward_that_raises_is_closed():
    """A nested backward that raises and is caught leaves no memory, and the gradients are those of plain torch."""

    class Caught(toys.Stack):
        def scaled(self, given, gradient):
            with torch.enable_grad():
                found = self.blocks[0](given)
                found.register_hook(lambda g: 1 / 0)
                energy = self.blocks[2](found).sum()
            with pytest.raises(ZeroDivisionError):
                torch.autograd.grad(energy, given)
            return gradient * 2

        def run(self, block, x):
            if block is self.blocks[1]:
                x.register_hook(partial(self.scaled, x.detach().requires_grad_()))
            return block(x)

    toys.train(Caught, steps=2)


def chain():
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def runs_the_same(run, stage):
    dense, _, model, _ = kit.pair(chain, stage=stage, units=[nn.Linear])
    run(dense), run(model)
    toys.same_gradients(model, dense)


def in_a_hook(call):
    """A backward that makes the call inside of it."""
    with torch.enable_grad():
        x = torch.ones(1, requires_grad=True) * 2
        x.register_hook(lambda gradient: call())
        x.sum().backward()


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_so_deep_that_autograd_runs_it_on_another_thread(stage):
    def run(model):
        threads = set()

        def innermost():
            threads.add(threading.get_ident())
            with torch.enable_grad():
                model(torch.ones(2, 4)).sum().backward()

        call = innermost
        for _ in range(70):
            call = partial(in_a_hook, call)
        output = model(torch.full((3, 4), 0.5))
        output.register_hook(lambda gradient: call())
        output.square().sum().backward()
        assert threading.get_ident() not in threads

    runs_the_same(run, stage)


@pytest.mark.parametrize("stage", [0, 3])
def test_a_backward_after_one_that_raised_is_not_inside_of_it(stage):
    """Called from C++, so that no caller in Python tells one from the other."""

    def backward(loss):
        engine = torch.autograd.Variable._execution_engine
        engine.run_backward((loss,), (torch.ones(()),), True, False, (), allow_unreachable=True, accumulate_grad=True)

    def run(model):
        output = model(torch.ones(2, 4))
        loss, raises = output.square().sum(), [True]

        def hook(gradient):
            if raises.pop():
                raise ArithmeticError("once")

        output.register_hook(hook)
        with pytest.raises(ArithmeticError, match="once"):
            backward(loss)
        raises.append(False)
        backward(loss)

    runs_the_same(run, stage)


class Trained(toys.Block):
    """A block that learns inside of its forward, every `every`-th time. It notes in `seen` what gradients are left."""

    def __init__(self, learn, every=1):
        super().__init__()
        self.learn, self.every, self.calls, self.seen = learn, every, 0, []

    def forward(self, x):
        self.calls += 1
        if self.calls % self.every == 0:
            with torch.enable_grad():
                self.learn(self, x.detach())
        return super().forward(x)

    def energy(self, x):
        return super().forward(x).square().mean()


def left(block, x):
    block.energy(x).backward()


def of_an_input(block, x):
    block.energy(x.requires_grad_()).backward(inputs=[x])
    assert x.grad.abs().sum() > 0


def by_autograd_grad(block, x):
    """As the refusal advises."""
    parameters = [*block.parameters()]
    for p, gradient in zip(parameters, torch.autograd.grad(block.energy(x), parameters), strict=True):
        p.grad = gradient


def stepped(block, x, clears=1, learn=left):
    """Steps an optimizer of its own, and clears the gradients every `clears`-th time."""
    learn(block, x)
    block.seen.append([p.grad.clone() for p in block.parameters()])
    torch.optim.SGD(block.parameters(), lr=0.1).step()
    if block.calls % clears == 0:
        for p in block.parameters():
            p.grad = None


class Training(toys.Stack):
    """again: its blocks learn only when a checkpoint runs them again."""

    def __init__(self, learn=left, again=False):
        self.make_block, self.again = partial(Trained, learn, 1 + again), again
        super().__init__()

    def run(self, block, x):
        return checkpoint(block, x, use_reentrant=True) if self.again else block(x)


class Greedy(toys.Stack):
    """Every block has a loss of its own, whose backward runs in the model's forward, after the block's."""

    def run(self, block, x):
        if torch.is_grad_enabled():
            block(x.detach()).square().mean().backward()
        return block(x)


INSIDE = {
    "stepped and cleared": partial(Training, stepped),
    "left every other time": partial(Training, partial(stepped, clears=2)),
    "by autograd.grad": partial(Training, partial(stepped, learn=by_autograd_grad)),
    "left": Training,
    "run again by backward": partial(Training, again=True),
    "of an input": partial(Training, of_an_input),
    "after the unit's forward": Greedy,
}


@pytest.mark.advice("To step another optimizer in this forward")
@EVERYWHERE
@pytest.mark.parametrize("kind", INSIDE)
@kit.on_ranks()
def test_a_backward_inside_of_a_forward_trains_as_plain_torch(size, stages, kind):
    """What the forward leaves in p.grad is added to, stepped and counted in the norm as any other gradient."""
    for stage in stages:
        for ours, plain in zip(*(model.blocks for model in toys.beside(INSIDE[kind], stage=stage)), strict=True):
            torch.testing.assert_close(getattr(ours, "seen", []), getattr(plain, "seen", []))


REFUSED = r"blocks\.0\.\w+\.\w+ got a gradient, .*of unit 'blocks\.0' .* call backward\(\) after this forward"


@EVERYWHERE
@kit.on_ranks()
def test_it_is_refused_while_the_shards_have_an_earlier_gradient(size, stages):
    """torch adds to that gradient, and p.grad shows the sum; here p.grad would be a part of it."""
    for stage in stages:
        model, optimizer = kit.sharded(Training, stage=stage)
        toys.loss_of(model, toys.data(0, 0)).backward()
        for grad in (True, False):
            with pytest.raises(GradientError, match=REFUSED), torch.set_grad_enabled(grad):
                model(toys.data(0, 0))
        optimizer.zero_grad()
        kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"update_in_backward": True, "max_grad_norm": None}, REFUSED),
        ({"loss_scale": 8.0}, "this backward is not scaled"),
    ],
)
def test_so_it_is_with_updates_in_backward_and_a_scaled_loss(options, told):
    model, _ = kit.sharded(Training, stage=3, **options)
    with pytest.raises(GradientError, match=told):
        model(toys.data(0, 0))


class Weighing(torch.autograd.Function):
    """Adds the weight's gradient to p.grad itself, as layers that accumulate in the matrix product do."""

    @staticmethod
    def forward(ctx, x, layer):
        ctx.save_for_backward(x)
        ctx.layer = layer
        return x @ layer.weight.t()

    @staticmethod
    def backward(ctx, gradient):
        (x,), weight = ctx.saved_tensors, ctx.layer.weight
        found = gradient.t() @ x
        weight.grad = found if weight.grad is None else weight.grad + found
        return gradient @ weight, None


class Weighed(nn.Linear):
    def forward(self, x):
        return Weighing.apply(x, self) + self.bias


class Setting(nn.Linear):
    def forward(self, x):
        if self.weight.grad is None:
            self.weight.grad = torch.full_like(self.weight, 0.5)
        return super().forward(x)


def of_kind(kind):
    return type("Given", (toys.Stack,), {"make_block": lambda self: kind(toys.WIDTH, toys.WIDTH)})


@EVERYWHERE
@pytest.mark.parametrize(("kind", "micro_batches"), [(Weighed, 2), (Setting, 1)])
@kit.on_ranks()
def test_what_a_visit_leaves_in_p_grad_is_stepped(size, stages, kind, micro_batches):
    """Also where no backward adds to it, and by a step that clips."""
    for stage in stages:
        dense, theirs, model, ours = kit.pair(of_kind(kind), toys.sgd, seed=1, stage=stage)
        for step in range(2):
            for micro in range(micro_batches):
                if step or kind is Weighed:
                    toys.backward_both(model, dense, 2 * step + micro)
                else:
                    with torch.no_grad():
                        [each(toys.data(step, 0)) for each in (model, dense)]
            toys.same_gradients(model, dense, rtol=1e-5, atol=1e-6)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)


def by_a_hook(model):
    layer = model.blocks[0]
    layer.register_full_backward_hook(lambda *_: setattr(layer.weight, "grad", torch.ones_like(layer.weight)))
    toys.loss_of(model, toys.data(0, 0)).backward()


def in_gathered(model):
    toys.loss_of(model, toys.data(0, 0)).backward()
    with zero_core.gathered(model):
        model.blocks[0].weight.grad = torch.ones(toys.WIDTH, toys.WIDTH)


@pytest.mark.advice("In a torch.autograd.Function, return the gradient", "or zero_core.set_full_gradient(p, tensor)")
@pytest.mark.parametrize("give", [by_a_hook, in_gathered])
def test_it_is_refused_where_torch_has_an_earlier_gradient(give):
    model, optimizer = kit.sharded(of_kind(nn.Linear), stage=3)
    with pytest.raises(GradientError, match="blocks.0.weight got a gradient, .* because a first gradient is in shards"):
        give(model)
    with pytest.raises(GradientError, match="is lost"):
        optimizer.step()
    model.blocks[0]._backward_hooks.clear()
    optimizer.zero_grad()
    toys.loss_of(model, toys.data(0, 0)).backward()
    zero_core.set_full_gradient(model.blocks[0].weight, torch.ones(toys.WIDTH, toys.WIDTH))
    optimizer.step()
