"""torch.func, forward-mode derivatives and torch.compile over a sharded model equal plain torch, or are refused."""

import pytest
import torch
from torch import Tensor, func, nn
from torch.autograd import forward_ad, functional
from torch.func import functional_call

from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import ChangedParameterError, ZeroError


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def square(model, x):
    return lambda p: functional_call(model, p, (x,)).square().sum()


def per_row(model, x):
    return torch.vmap(lambda row, whole: (row * whole).sum(), in_dims=(0, None))(
        model.head.weight, model.blocks[0].norm.weight
    )


def per_sample(model, x):
    gradient = func.grad(lambda p, row: functional_call(model, p, (row,)).square().sum())
    return torch.vmap(gradient, in_dims=(None, 0))(values(model), x)


def ensemble(model, x):
    stacked = {name: torch.stack([value, 2 * value]) for name, value in values(model).items()}
    return torch.vmap(lambda p: functional_call(model, p, (x,)))(stacked)


def tangent(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent.square().mean()


# Their results can be trained on: second derivatives, or a graph under the transform.
TRAINED = {
    "vmap": lambda model, x: torch.vmap(model)(x),
    "grad": lambda model, x: func.grad(lambda y: model(y).square().sum())(x),
    "vmap of grad": lambda model, x: torch.vmap(func.grad(lambda y: model(y).square().sum()))(x),
    "jacrev": lambda model, x: func.jacrev(model)(x),
    "jacfwd": lambda model, x: func.jacfwd(model)(x),
    "jvp": lambda model, x: func.jvp(model, (x,), (x,))[1],
    "vjp": lambda model, x: func.vjp(model, x)[1](torch.ones(6, 3))[0],
    "hessian": lambda model, x: func.hessian(lambda y: model(y).square().sum())(x[0]),
    "a weight in a closure": lambda model, x: func.jacrev(lambda y: model.head.weight @ y)(x[0, :1].expand(toys.WIDTH)),
    "dual numbers": tangent,
    "its own parameters": lambda model, x: functional_call(model, dict(model.named_parameters()), (x,)),
    "jacobian": lambda model, x: functional.jacobian(model, x, create_graph=True),
}
# Of values that are not the model's own parameters, or without a graph.
VALUES = {
    "grad of values": lambda model, x: func.grad(square(model, x))(values(model)),
    "jacrev of values": lambda model, x: func.jacrev(square(model, x))(values(model)),
    "grad of parameters": lambda model, x: func.grad(square(model, x))(dict(model.named_parameters())),
    "jacrev of parameters": lambda model, x: func.jacrev(square(model, x))(dict(model.named_parameters())),
    "grad and value": lambda model, x: func.grad_and_value(square(model, x))(dict(model.named_parameters())),
    "jacfwd of a parameter": lambda model, x: func.jacfwd(lambda w: x[0] @ w[:5, :5])(model.blocks[0].down.weight),
    "vmap of parameters": per_row,
    "per sample": per_sample,
    "ensemble": ensemble,
    "some values": lambda model, x: functional_call(model, {"head.weight": torch.ones(3, toys.WIDTH)}, (x,)),
    "vectorised": lambda model, x: functional.jacobian(model, x, vectorize=True, strategy="forward-mode"),
    "hvp": lambda model, x: functional.hvp(lambda y: model(y).square().sum(), x, x)[1],
}


@pytest.mark.promise("torch-func")
@pytest.mark.parametrize(("size", "stage"), [(1, 0), (2, 3)])
@kit.on_ranks()
def test_each_equals_plain_torch(size, stage: int) -> None:
    """Two steps trained on the transform, or one ordinary step after it, against plain torch on the same data."""
    x = toys.data(0, 0)
    for name, run in (TRAINED | VALUES).items():
        dense, plain, model, optimizer = kit.pair(toys.Stack, toys.sgd, seed=1, stage=stage)
        for _ in range(2):
            expected, found = run(dense, x), run(model, x)
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)
            for each, step, result in ((dense, plain, expected), (model, optimizer, found)):
                kit.step(step, result.square().mean() if name in TRAINED else toys.loss_of(each, x))
        torch.testing.assert_close(values(model), values(dense), rtol=1e-4, atol=1e-5)


class Chunked(torch.autograd.Function):
    """A loss that is computed in chunks with its gradients, as Liger's fused losses compute it."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        def loss(x, weight, bias):
            return torch.nn.functional.linear(x, weight, bias).square().sum()

        chunks = [func.grad_and_value(loss, argnums=(0, 1, 2))(part, weight, bias) for part in x.chunk(2)]
        ctx.save_for_backward(
            torch.cat([gradients[0] for gradients, _ in chunks]),
            *(sum(gradients[k] for gradients, _ in chunks) for k in (1, 2)),
        )
        return sum(value for _, value in chunks)

    @staticmethod
    def backward(ctx, by):
        return tuple(by * gradient for gradient in ctx.saved_tensors)


@pytest.mark.promise("torch-func")
@pytest.mark.parametrize(("size", "stage"), [(1, 0), (1, 3), (2, 3)])
@kit.on_ranks()
def test_a_chunked_loss_over_the_heads_weight_trains_as_plain_torch(size, stage):
    def loss(model, x):
        return Chunked.apply(model.blocks[0](model.embed(x)), model.head.weight, model.head.bias)

    toys.beside(toys.Stack, steps=2, loss=loss, stage=stage)


@pytest.mark.promise("compiled-model")
def test_a_whole_model_compiled():
    def loss(model, x):
        if "compiled" not in model.__dict__:
            model.__dict__["compiled"] = torch.compile(model, backend="aot_eager")
        return model.__dict__["compiled"](x).square().mean()

    toys.beside(toys.Stack, steps=2, loss=loss)
    torch.compiler.reset()


@pytest.mark.promise("compiled-model")
def test_a_compiled_loss_of_a_parameter_after_a_forward():
    square = torch.compile(lambda weight: weight.square().sum(), backend="aot_eager")
    toys.beside(toys.Stack, steps=2, loss=lambda model, x: toys.loss_of(model, x) + square(model.head.weight))
    torch.compiler.reset()


@pytest.mark.promise("traced")
def test_what_would_keep_parameters_without_memory_is_refused():
    model = kit.sharded(toys.Stack, toys.sgd)[0]
    x = toys.data(0, 0)
    with pytest.raises(ZeroError, match="be traced, exported or run .* or with a plain model that loads this one's"):
        torch.jit.trace(model, (x,))
    plain = toys.Stack()
    plain.load_state_dict(model.state_dict())
    torch.testing.assert_close(torch.jit.trace(plain, (x,))(x), model(x))
    up = model.blocks[0].up
    for part in (model.blocks[0], up, lambda x: up(x)):  # the last one would end the process
        with pytest.raises(ZeroError, match="cannot be traced, exported or run on fake tensors"):
            torch.jit.trace(part, (torch.ones(2, toys.WIDTH),))
    with pytest.raises(ZeroError, match="cannot be traced, exported or run on fake tensors"):
        func.linearize(model, x)
    with pytest.raises(ZeroError, match=r"a sharded model|For torch.export, load the state_dict"):
        torch.export.export(model, (x,))
    told = r"For torch.func.functional_call, pass plain tensors: \{name: parameter.detach"
    with pytest.raises(ChangedParameterError, match=told):
        functional_call(model, dict(toys.Stack().named_parameters()), (x,))
    with pytest.raises(Exception, match="leave fullgraph=True out, or compile the blocks"):
        torch.compile(model, backend="eager", fullgraph=True)(x)
    torch.compiler.reset()


class Halves(nn.Linear):
    """Writes into its weight before it uses it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.advice("Pass copies, {name: p.detach()")
@pytest.mark.promise("torch-func-write")
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_write_into_what_a_transform_is_given_is_refused(stage):
    plain, _, model, _ = kit.pair(lambda: nn.Sequential(Halves(4, 4), Halves(4, 4)), toys.sgd, stage=stage)
    x = torch.linspace(-1, 1, 8).view(2, 4)

    before, copies, copied = ({n: v.clone() for n, v in values(each).items()} for each in (model, model, plain))
    with pytest.raises(ZeroError, match="a function wrote into a parameter of shape .* and the write would be lost"):
        func.grad(square(model, x))(dict(model.named_parameters()))
    kit.assert_bits(values(model), before)
    kit.assert_bits(func.grad(square(model, x))(copies), func.grad(square(plain, x))(copied))  # as the error advises
    assert torch.equal(copies["0.weight"], before["0.weight"] * 0.5)
    assert func.grad(lambda w: (w * w).sum())(x).equal(2 * x)  # after a refused one
