"""`shard` leaves the model as it was: no attribute that computes is read, no random number drawn, no class lost."""

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import ShardedParameterError, ZeroError


class Noise(nn.Module):
    """A parametrisation that counts how often it is computed, and draws random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, weight):
        self.calls += 1
        return weight + torch.randn_like(weight) * 0.01


@pytest.mark.promise("shard-computes-nothing")
def test_sharding_computes_no_parametrised_weight():
    model = nn.Sequential(nn.Linear(5, 4), parametrizations.spectral_norm(nn.Linear(4, 4)), nn.Linear(4, 3))
    noise = Noise()
    parametrize.register_parametrization(model[0], "weight", noise)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    calls, state = noise.calls, torch.get_rng_state()
    zero_core.shard(model, toys.adamw(model.parameters()))
    assert noise.calls == calls
    assert torch.equal(torch.get_rng_state(), state)
    kit.assert_bits(dict(model.named_buffers()), buffers)  # which a power iteration changes


class Labelled(nn.Parameter):
    """A subclass with a method, a property and an attribute of its own."""

    def label(self):
        return f"{self.note}: {self.sum().item():.3f}"

    @property
    def rows(self):
        return self.shape[0]


@pytest.mark.promise("parameter-class")
@kit.on_ranks(1, 2)
def test_a_parameter_keeps_its_class():
    class Asking(toys.Stack):
        def forward(self, x):
            seen.append((type(self.head.weight), self.head.weight.label()))
            return super().forward(x)

    seen = []
    model = Asking()
    model.head.weight = Labelled(model.head.weight.detach().clone())
    model.head.weight.note = "ours"
    expected = model.head.weight.label()
    optimizer = zero_core.shard(model, toys.sgd(model.parameters()))
    assert isinstance(model.head.weight, Labelled) and model.head.weight.rows == 3
    assert model.head.weight.label() == expected
    toys.loss_of(model, toys.data(0, 0)).backward()
    assert all(label == expected for _, label in seen)
    optimizer.step()
    assert isinstance(model.head.weight, Labelled)
    with zero_core.gathered(model):
        assert type(model.head.weight) is Labelled


class Wrapped(nn.Parameter):
    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.promise("parts", "uncuttable-class")
def test_a_class_that_cannot_be_cut_is_refused():
    model = toys.Stack()
    model.head.weight.__class__ = nn.Parameter
    model.head.weight = torch.Tensor._make_subclass(Wrapped, model.head.weight.detach(), True)
    with pytest.raises(ShardedParameterError, match="Wrapped have __torch_dispatch__ .*convert them to plain"):
        zero_core.shard(model, toys.sgd(model.parameters()))
    model.head.weight = nn.Parameter(torch.ones(3, toys.WIDTH))
    zero_core.shard(model, toys.sgd(model.parameters()))


@pytest.mark.promise("no-process-group")
def test_processes_without_a_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    model = toys.Stack()
    with pytest.raises(ZeroError, match=r"2 processes were started .*init_process_group\(\).* remove WORLD_SIZE"):
        zero_core.shard(model, toys.sgd(model.parameters()))
    monkeypatch.delenv("WORLD_SIZE")
    zero_core.shard(model, toys.sgd(model.parameters()))


@pytest.mark.promise("inside-ddp")
def test_a_wrapper_that_averages_itself_is_refused():
    model = nn.Sequential(nn.DataParallel(nn.Linear(2, 2)))
    with pytest.raises(ZeroError, match=r"module '0' is a DataParallel.*the module inside \(.module\), and leave the"):
        zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    zero_core.shard(model[0].module, torch.optim.SGD(model.parameters(), lr=0.1))
