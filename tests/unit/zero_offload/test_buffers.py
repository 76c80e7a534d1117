"""Units whose forward writes into a buffer or an attribute, recomputed: the gradients, and the values after it, are
plain torch's.

Fails if the second run sees what the first one wrote, or if its own writes stay.
"""

import random
from collections import deque
from contextlib import nullcontext

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

import zero_core
from tests import kit
from zero_offload import ActivationError, offload_activations
from zero_offload.activations import buffer_replay as buffers_of_units

pytestmark = pytest.mark.promise("recomputed-state")


class Block(nn.Module):
    """Writes into buffers as `kind` says, and computes with what it finds there."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.calls = kind, [0]
        self.inner, self.outer = nn.Linear(6, 6), nn.Linear(6, 6)
        if kind == "batch norm":
            self.norm = nn.BatchNorm1d(6)
        if kind == "spectral norm":
            self.inner = nn.utils.parametrizations.spectral_norm(self.inner)
        self.register_buffer("scale", torch.ones(6))
        self.register_buffer("mask", torch.ones(6))
        self.register_buffer("mean", None)
        self.count, self.state, self.seen = 0, torch.zeros(6), []
        self.generator = torch.Generator().manual_seed(1)
        self.python, self.numpy = random.Random(1), numpy.random.default_rng(1)
        self.nested, self.recent = {"counts": [0], "mean": torch.zeros(6)}, deque(maxlen=2)
        if kind == "two names":
            self.register_buffer("same", self.scale)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x) * self.scale.clone() * self.mask.clone()
        if self.kind == "batch norm":
            y = self.norm(y)
        if self.kind == "running":
            self.scale.mul_(0.5).add_(y.detach().abs().mean(0))
        if self.kind == "replaced" or (self.kind == "replaced later" and self.calls[0] > 2):
            self.scale = self.scale * 0.5 + 1
        if self.kind == "idempotent":
            self.mask.copy_(torch.ones(6))
        if self.kind == "in evaluation" and not self.training:
            self.scale += 1
        if self.kind == "attributes":
            self.count += 1
            y = y / self.count - self.state + len(self.seen)
            self.state = 0.5 * self.state + y.detach().mean(0)
            self.seen.append(y.detach())
        if self.kind == "none yet":
            self.mean = y.detach().mean(0) * 2 if self.mean is None else self.mean * 0.5 + y.detach().mean(0)
            y = y - self.mean
        if self.kind == "unseen" and self.calls[0] > 1:
            self.scale.data.mul_(0.5)
        if self.kind == "generator":
            y = y[:, torch.randperm(6, generator=self.generator)]
        if self.kind == "python and numpy":
            y = y[:, random.sample(range(6), 6)][:, numpy.random.permutation(6)]
        if self.kind == "its own of python and numpy":
            y = y[:, self.python.sample(range(6), 6)][:, self.numpy.permutation(6)]
        if self.kind == "nested":
            self.nested["counts"][0] += 1
            self.nested["mean"].mul_(0.5).add_(y.detach().mean(0))
            self.recent.append(float(y.detach().mean()))
            y = y / self.nested["counts"][0] - self.nested["mean"] + sum(self.recent)
        if self.kind == "two names":
            self.scale.mul_(0.5)
            y = y + self.same.clone()
        if self.kind == "later" and self.calls[0] > 1:
            self.scale += 1
        with torch.no_grad():
            if self.kind == "clamped parameter":
                self.inner.bias.clamp_(-0.1, 0.1)
            if self.kind == "averaged parameter":
                self.inner.bias.mul_(0.9).add_(y.mean(0))
        return x + self.outer(torch.tanh(y))


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.calls[0] += 1  # runs that recompute are none
            x = layer(x)
        return x


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, generator=generator) for _ in range(5)]


def train(model: nn.Module, read) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Gradients after each backward, and the buffers at the end. Forwards of which BatchNorm is frozen come first, and
    two run before the first backward of theirs."""
    found = []
    first, second, third, fourth, fifth = batches()
    random.seed(0)
    numpy.random.seed(0)
    norms = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]
    for norm in norms:
        norm.eval()
    model(first).square().mean().backward()
    for norm in norms:
        norm.train()
    losses = [model(x).square().mean() for x in (second, third)]
    for loss in reversed(losses):
        loss.backward()
        found.append(read(model))
    model.eval()
    model(fourth).square().mean().backward()  # no buffer of BatchNorm is written
    model.train()
    loss = model(fifth).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()
    found.append(read(model))
    values = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for number, layer in enumerate(model.layers):
        values[f"state {number}"] = layer.state
        values[f"counts {number}"] = torch.tensor([layer.count, len(layer.seen), random.random()])
    return found, values


@pytest.mark.parametrize(
    "kind",
    [
        *("batch norm", "spectral norm", "running", "replaced", "replaced later", "idempotent", "in evaluation"),
        *("attributes", "none yet", "unseen", "generator", "python and numpy", "later"),
        *("its own of python and numpy", "nested", "two names"),
    ],
)
@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_gradients_and_buffers_are_those_of_plain_torch(kind, policy):
    expected, buffers = train(Model(kind), lambda m: {n: p.grad.clone() for n, p in m.named_parameters()})
    model, optimizer = kit.sharded(Model(kind))
    with offload_activations(model, policy=policy) as activations:
        found, left = train(model, lambda m: {n: zero_core.full_gradient(p) for n, p in m.named_parameters()})
        assert activations.stats()["recomputed"] == 12
    optimizer.close()
    assert left.keys() == buffers.keys() and all(torch.equal(left[name], buffers[name]) for name in buffers)
    for ours, plain in zip(found, expected, strict=True):
        assert all(torch.equal(ours[name], plain[name]) for name in plain)


def test_a_buffer_of_a_layout_that_cannot_be_compared_is_left_alone():
    model = Model("plain")
    model.layers[0].register_buffer("graph", torch.eye(6).to_sparse())
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with offload_activations(model):
        model(batches()[0]).sum().backward()
    optimizer.close()


@pytest.fixture
def large(monkeypatch):
    """The buffers of these tests are taken for large ones, which are not copied at each call."""
    monkeypatch.setattr(buffers_of_units, "SMALL_BYTES", 0)


@pytest.mark.advice("change the {} after backward")
def test_a_write_between_forward_and_backward_is_refused(large):
    model, optimizer = kit.sharded(Model("plain"))
    with offload_activations(model):
        model(batches()[0]).sum().backward()
        loss = model(batches()[1]).sum()
        model.layers[1].scale += 1
        with pytest.raises(ActivationError, match="unit layers.1 repeats .* its buffer 'scale' was changed between"):
            loss.backward()
        model(batches()[1]).sum().backward()
        model.layers[1].scale += 1  # after backward, as the error says
    with offload_activations(model, policy={"layers.0": "recompute", "layers.1": "keep"}):
        loss = model(batches()[1]).sum()
        model.layers[1].scale += 1
        loss.backward()
    optimizer.close()


def test_modes_and_values_set_between_forward_and_backward_are_not_computed_with():
    """Fails if the second run computes in the mode, or with the attributes, that the module has by then."""
    found = []
    for recomputes in (False, True):
        model, optimizer = kit.sharded(Model("batch norm"))
        with offload_activations(model, policy="recompute" if recomputes else "keep"):
            loss = model(batches()[0]).square().mean()
            model.eval()
            for layer in model.layers:
                layer.scale += 1
                layer.kind = "running"
            loss.backward()
        found.append({name: zero_core.full_gradient(p) for name, p in model.named_parameters()})
        optimizer.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class Doubles(TorchFunctionMode):
    """As every mode, not in force in a backward."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        return 2 * result if function is torch.tanh else result


@pytest.mark.parametrize("what", ["hook", "later hook", "forward", "part", "values", "mode"])
def test_what_was_in_place_for_the_forward_alone_is_repeated(what):
    """Fails if the second run computes with the hooks, the parts, the parameters or the modes of by then."""
    found = []
    for policy in ("keep", "recompute"):
        model, optimizer = kit.sharded(Model("plain"))
        block, inner, x, values = model.layers[0], model.layers[0].inner, batches()[0], {}
        with offload_activations(model, policy=policy):
            if what == "hook":
                hook = inner.register_forward_hook(lambda module, given, out: 2 * out)
            if what == "forward":
                inner.forward = lambda x, linear=inner: 2 * nn.Linear.forward(linear, x)
            if what == "part":
                block.inner = nn.Sequential(inner, nn.Hardtanh())
            if what == "values":
                values = {"layers.0.inner.weight": 2 * inner.weight}
            with Doubles() if what == "mode" else nullcontext():
                loss = functional_call(model, values, (x,)).square().mean()
            if what == "hook":
                hook.remove()
            if what == "later hook":
                inner.register_forward_hook(lambda module, given, out: 2 * out)
            inner.__dict__.pop("forward", None)
            block.inner = inner
            loss.backward()
        found.append({name: zero_core.full_gradient(p) for name, p in model.named_parameters()})
        optimizer.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


class Learns(nn.Module):
    """Its forward takes a gradient, as of layers that learn while they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.rate, self.calls = nn.Linear(6, 6), 0.1, [0]

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            loss = (self.inner(x.detach()) - x.detach()).square().mean()
            (gradient,) = torch.autograd.grad(loss, [self.inner.weight])
        return x + nn.functional.linear(x, self.inner.weight - self.rate * gradient, self.inner.bias)


def test_a_backward_inside_of_the_forward_finds_the_unit_as_it_is():
    """Fails if the second run, which it begins inside of the first one, finds no buffers and attributes."""
    found = []
    for policy in ("keep", "recompute"):
        model = Model("plain")
        model.layers = nn.ModuleList(Learns() for _ in range(2))
        model, optimizer = kit.sharded(model)
        with offload_activations(model, policy=policy):
            model(batches()[0]).square().mean().backward()
        found.append({name: zero_core.full_gradient(p) for name, p in model.named_parameters()})
        optimizer.close()
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_a_write_into_a_parameter_that_changes_it_twice_is_refused():
    """A clamp changes it once only."""
    for kind in ("clamped parameter", "averaged parameter"):
        model, optimizer = kit.sharded(Model(kind))
        with offload_activations(model):
            loss = model(batches()[0]).sum()
            if kind == "clamped parameter":
                loss.backward()
            else:
                with pytest.raises(ActivationError, match="layers.1 writes into its parameter 'inner.bias' in forward"):
                    loss.backward()
        optimizer.close()


@pytest.mark.advice("make {} a buffer. Or write outside of the unit")
@pytest.mark.promise("activations-advice")
def test_a_write_into_a_parameter_is_one_into_a_buffer_or_outside_of_the_unit_or_the_unit_keeps():
    """What the error of the test before this one says. Fails if gradients or parameters differ from plain torch's."""

    def outcome(kind, outside, sharded, policy="recompute"):
        model = Model(kind)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if sharded:
            optimizer = zero_core.shard(model, optimizer)
        with offload_activations(model, policy=policy) if sharded else nullcontext():
            for x in batches():
                model(x).square().mean().backward()
                if outside:
                    with torch.no_grad():
                        model.layers[1].inner.bias.mul_(0.9)
                optimizer.step()
                optimizer.zero_grad()
        with zero_core.gathered(model) if sharded else nullcontext():
            return [parameter.detach().clone() for parameter in model.parameters()]

    for kind, outside, policy in (
        ("running", False, "recompute"),  # a buffer
        ("plain", True, "recompute"),
        ("averaged parameter", False, "keep"),
    ):
        found, expected = outcome(kind, outside, True, policy), outcome(kind, outside, False)
        assert all(map(torch.equal, found, expected)), kind


@pytest.mark.advice("but not in its first call in this mode")
def test_a_write_that_the_first_call_did_not_do_is_refused(large):
    model, optimizer = kit.sharded(Model("later"))
    with offload_activations(model):
        x = batches()[0]
        model(x).sum().backward()
        with pytest.raises(ActivationError, match="unit layers.0 wrote into its buffer 'scale' in forward"):
            model(x)
    with offload_activations(model, policy="keep"):  # as the error says
        model(x).sum().backward()
    optimizer.close()
