"""A loss scale multiplies the gradient of the loss, so it is right wherever a forward's values are used."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import GradientError, ZeroError

pytestmark = pytest.mark.promise("loss-scale")

WIDTH = 5  # of toys.data


class Parts(nn.Module):
    """An encoder and a decoder, called together, alone, or one after the other."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.spread = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        self.hidden = self.encoder(x).tanh()
        return self.decoder(self.hidden)


class Spread(Parts):
    def forward(self, x):
        return torch.distributions.Normal(super().forward(x), self.spread.exp())


def recurrent(model, x):
    return model(model(x)).square().mean() + model(x).abs().mean()


def one_after_the_other(model, x):
    hidden = model.encoder(x) * 1.5
    return model.decoder(hidden).square().mean() + hidden.square().mean()


def in_an_attribute(model, x):
    return model(x).square().mean() + model.hidden.square().mean()


def in_a_hook(model, x):
    found = []
    handle = model.encoder.register_forward_hook(lambda module, args, output: found.append(output))
    loss = model(x).square().mean() + found[0].square().mean()
    handle.remove()
    return loss


def reentrant(model, x):
    return checkpoint(model, x.requires_grad_(), use_reentrant=True).square().mean()


def penalty(model, x):
    gradient = torch.autograd.grad(model(x.requires_grad_()).sum(), x, create_graph=True)[0]
    return model(x).square().mean() + (gradient.norm(dim=1) - 1).square().mean()


def by_a_distribution(model, x):
    return -model(x).log_prob(torch.ones(WIDTH)).mean()


def decayed(model, x):
    return model(x).square().mean() + 0.1 * sum(p.square().sum() for p in model.parameters())


USES = [recurrent, one_after_the_other, in_an_attribute, in_a_hook, reentrant, penalty, by_a_distribution, decayed]


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("loss", USES, ids=lambda loss: loss.__name__)
def test_whatever_a_loss_is_made_of_trains_as_without_a_scale(loss, stage):
    toys.beside(Spread if loss is by_a_distribution else Parts, loss=loss, stage=stage, loss_scale=64.0)


def test_the_scaled_loss_has_the_values_of_the_loss_and_is_the_loss_itself_without_a_scale():
    for scale in (None, 64.0):
        model, optimizer = kit.sharded(toys.Stack, toys.sgd, loss_scale=scale)
        x = toys.data(0, 0).requires_grad_()
        loss = toys.loss_of(model, x)
        scaled = optimizer.scale_loss(loss)
        assert torch.equal(scaled, loss) and (scaled is loss) == (scale is None)
        (plain,) = torch.autograd.grad(loss, x, retain_graph=True)
        (found,) = torch.autograd.grad(scaled, x)
        assert torch.equal(found, plain * (scale or 1.0))


def test_a_loss_that_was_not_scaled_is_refused_also_after_a_backward_that_raised():
    model, optimizer = kit.sharded(toys.Stack, toys.sgd, loss_scale=64.0)
    told = r"loss of this backward is not scaled.* Call optimizer.scale_loss\(loss\).backward\(\)"
    for raises in (False, True):
        if raises:
            hooked = model(toys.data(0, 0))
            hooked.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                optimizer.scale_loss(hooked.sum()).backward()
            optimizer.zero_grad()
        for loss in (lambda: model.head.weight.square().sum(), lambda: toys.loss_of(model, toys.data(0, 0))):
            with pytest.raises(GradientError, match=told):
                loss().backward()
            optimizer.zero_grad()
    kit.step(optimizer, toys.loss_of(model, toys.data(0, 0)))
    assert optimizer.step_count == 1


@pytest.mark.advice("a LossScale of its own")
def test_a_loss_scale_belongs_to_one_model_and_stays_with_it_in_a_second_stage():
    scale = zero_core.LossScale(64.0)
    model, _ = kit.sharded(Parts, toys.sgd, loss_scale=scale)
    with pytest.raises(
        ZeroError, match="LossScale is used with a Parts, whose step.*Give the Stack a LossScale of its own"
    ):
        kit.sharded(toys.Stack, toys.sgd, loss_scale=scale)
    kit.sharded(toys.Stack, toys.sgd, loss_scale=zero_core.LossScale(64.0))
    kit.step(zero_core.shard(model, toys.sgd(model.parameters()), loss_scale=scale), recurrent(model, toys.data(0, 0)))


def test_a_model_that_another_ones_loss_passes_through_is_frozen_for_it():
    """A generator's loss passes through the discriminator, which has a scale of its own."""
    torch.manual_seed(0)
    plain = [nn.Linear(4, 4), nn.Linear(4, 1)]
    ours = [nn.Linear(4, 4), nn.Linear(4, 1)]
    for a, b in zip(ours, plain, strict=True):
        a.load_state_dict(b.state_dict())
    theirs = [torch.optim.SGD(each.parameters(), lr=0.1) for each in plain]
    mine = [
        zero_core.shard(each, torch.optim.SGD(each.parameters(), lr=0.1), loss_scale=scale)
        for each, scale in zip(ours, (64.0, 8.0), strict=True)
    ]
    x = torch.randn(5, 4)
    with pytest.raises(GradientError, match=r"loss must not train the model, call model.requires_grad_\(False\)"):
        mine[0].scale_loss(ours[1](ours[0](x)).mean()).backward()
    mine[0].zero_grad(), mine[1].zero_grad()
    for _ in range(2):
        for (make, judge), (a, b) in ((ours, mine), (plain, theirs)):
            fake = make(x)
            kit.step(b, F.softplus(judge(fake.detach())).mean())
            judge.requires_grad_(False)
            kit.step(a, F.softplus(-judge(fake)).mean())
            judge.requires_grad_(True)
    for a, b in zip(ours, plain, strict=True):
        kit.assert_same(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.promise("grad-scaler")
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("clip", [None, 0.05])
@kit.on_ranks(1, 2)
def test_a_grad_scaler_of_torch_scales_skips_and_grows_as_with_a_plain_model(size, clip, stage):
    dense, theirs, model, ours = kit.pair(Parts, toys.sgd, stage=stage)
    scales = []
    for net, optimizer in ((model, ours), (dense, theirs)):
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(6):
            losses = [net(toys.data(step, each)).square().mean() for each in range(size)]
            losses[-1] = losses[-1] * (torch.inf if step == 2 else 1.0)  # of the last rank alone
            scaler.scale(losses[kit.world()[0]] if optimizer is ours else sum(losses) / size).backward()
            if clip is not None:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(net.parameters(), clip)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
    assert scales[:6] == scales[6:] == [64.0, 128.0, 64.0, 64.0, 128.0, 128.0]
    assert ours.step_count == 5
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)
