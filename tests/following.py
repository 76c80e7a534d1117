"""What the tests of followed advice share: a small model, sharded or not, an error's text, and where a call is made."""

from contextlib import contextmanager

import pytest
import torch
from torch import nn

import zero_core

X = torch.ones(2, 4)


def model(width=4):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 1))


def adamw(net):
    return torch.optim.AdamW(net.parameters(), lr=0.1)


def backward(net, width=4):
    net(torch.ones(2, width)).sum().backward()


def step(net, optimizer, width=4):
    backward(net, width)
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def advised(*parts):
    """An error of ours is raised, and its text has each of the parts."""
    with pytest.raises(Exception) as raised:
        yield raised
    text = str(raised.value)
    assert type(raised.value).__module__.startswith("zero_") or isinstance(raised.value, (ValueError, TypeError)), text
    for part in parts:
        assert part in text, text


def sgd(net):
    return torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1)


def sharded(make=adamw, **options):
    net = model()
    return net, zero_core.shard(net, make(net), **options)


def same(net, other):
    ours, theirs = net.state_dict(), other.state_dict()
    assert all(torch.allclose(value, theirs[name], atol=1e-6) for name, value in ours.items())


def trains(net, optimizer=None, width=4, **options):
    """One step changes the first trained parameter."""
    optimizer = zero_core.shard(net, optimizer or sgd(net), **options)
    name, parameter = next((n, p) for n, p in net.named_parameters() if p.requires_grad)
    before = parameter.detach().clone()
    step(net, optimizer, width)
    assert not torch.equal(net.get_parameter(name).detach(), before)
    return optimizer
