"""Optimizers without a contract, or that look at several parameters: plain torch's bits on one device, else refused."""

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from zero_core import checkpoint
from zero_core.errors import UnsupportedOptimizerError

pytestmark = pytest.mark.promise("together")


class Own(torch.optim.Optimizer):
    """A user's optimizer that declares nothing."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    def used(self):
        return [(group, p) for group in self.param_groups for p in group["params"] if p.grad is not None]


class Norm(Own):
    """One norm over all gradients, in a local variable."""

    @torch.no_grad()
    def step(self, closure=None):
        norm = sum(p.grad.square().sum() for _, p in self.used()).sqrt()
        for group, p in self.used():
            momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
            p.sub_(momentum.lerp_(p.grad / (norm + 0.1), 0.3), alpha=group["lr"])


class Depth(Own):
    """Later parameters of a group learn slower; some have classes, attributes or shapes of their own."""

    @torch.no_grad()
    def step(self, closure=None):
        for number, group in enumerate(self.param_groups):
            for depth, p in enumerate(group["params"]):
                if p.grad is not None:
                    rate = group["lr"] * 0.8 ** (depth + number) * getattr(p, "factor", 1.0)
                    p.sub_(p.grad / (p.grad.norm(dim=-1, keepdim=True) + 0.1) * rate)


class Counts(Own):
    """Counts uses of parameters in the group and in itself, and has numbers in its state."""

    k = 0

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.used():
            self.k += 1
            group["uses"] = group.get("uses", 0) + 1
            state = self.state[p]
            state["step"] = state.get("step", 0) + 1
            state["decay"] = state.get("decay", 1.0) * 0.9
            state["rows"] = state.get("rows", torch.zeros(p.shape[:1])) + p.grad.view(len(p), -1).sum(1)
            p.sub_(p.grad + 1e-3 * state["rows"].mean(), alpha=group["lr"] * state["decay"] / group["uses"])


class Noise(Own):
    """Langevin dynamics."""

    @torch.no_grad()
    def step(self, closure=None):
        for group, p in self.used():
            p.sub_(p.grad + 0.1 * torch.randn_like(p), alpha=group["lr"])


class Decays(Own):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)


class Slow(nn.Parameter):
    pass


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.LayerNorm(6)) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(1, 6))
        self.blocks[0][0].weight = Slow(self.blocks[0][0].weight.detach().clone())
        self.blocks[1][0].weight.factor = 0.5

    def forward(self, x):
        for block in self.blocks:
            x = x + block(x).tanh()
        return x * self.scale


def groups_of(model):
    """Not in the order of the model, so that an optimizer which looks at places in groups tells."""
    last, *others = reversed(list(model.parameters()))
    return [{"params": others[::2]}, {"params": [*others[1::2], last], "lr": 0.05}]


def train(model, optimizer, first=0, last=4):
    torch.manual_seed(7)
    for step in range(first, last):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step))
        kit.step(optimizer, model(x).square().mean())
    return {name: value.clone() for name, value in model.state_dict().items()}


def made(build):
    torch.manual_seed(0)
    model = Model()
    return model, build(groups_of(model))


def sharded(build, **options):
    model, optimizer = made(build)
    return model, zero_core.shard(model, optimizer, units=[nn.Sequential], **options)


BUILDS = [Norm, Depth, Counts, Noise]


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("build", BUILDS)
def test_each_has_the_bits_of_plain_torch_on_one_device(build, stage):
    model, optimizer = made(build)
    wanted = train(model, optimizer)
    shards, ours = sharded(build, stage=stage)
    kit.assert_bits(train(shards, ours), wanted)
    assert [{**g, "params": 0} for g in ours.param_groups] == [{**g, "params": 0} for g in optimizer.param_groups]


@pytest.mark.parametrize("build", [Norm, Depth, Counts])
@kit.on_ranks(2)
def test_each_has_the_bits_of_plain_torch_on_ranks_that_have_everything(build):
    kit.assert_bits(train(*sharded(build, stage=0)), train(*made(build)))


@pytest.mark.parametrize("build", [Norm, Counts])
def test_states_are_saved_and_a_run_goes_on(build, tmp_path):
    wanted = train(*made(build), last=6)
    model, optimizer = sharded(build)
    train(model, optimizer, last=3)
    checkpoint.save(tmp_path / "saved", model, optimizer)
    full, weights = optimizer.full_state_dict(), {name: v.clone() for name, v in model.state_dict().items()}
    kit.assert_bits(train(model, optimizer, 3, 6), wanted)
    if build is Counts:
        return  # torch's state_dict() has no attribute of the optimizer's own either
    again, theirs = sharded(build)
    checkpoint.load(tmp_path / "saved", again, theirs)
    kit.assert_bits(train(again, theirs, 3, 6), wanted)
    plain, stock = made(build)
    plain.load_state_dict(weights)
    stock.load_state_dict(full)
    kit.assert_bits(train(plain, stock, 3, 6), wanted)


def test_an_optimizer_that_has_stepped_and_a_second_stage_go_on():
    wanted = train(*made(Norm), last=6)
    model, optimizer = made(Norm)
    train(model, optimizer, last=2)
    ours = zero_core.shard(model, optimizer, units=[nn.Sequential])
    kit.assert_bits(train(model, ours, 2, 6), wanted)
    plain, stock = made(Norm)
    train(plain, stock, last=2)
    wanted = train(plain, Norm(groups_of(plain)), 2, 6)
    model, optimizer = sharded(Norm)
    train(model, optimizer, last=2)
    kit.assert_bits(
        train(model, zero_core.shard(model, Norm(groups_of(model)), units=[nn.Sequential], stage=3), 2, 6), wanted
    )


def test_masters_of_16_bit_parameters_are_stepped_together():
    """Gradients are bf16 both times; plain torch's masters are steps of an fp32 copy."""
    model, optimizer = sharded(Norm, param_dtype=torch.bfloat16)
    copies, _ = made(Norm)
    plain, _ = made(Norm)
    plain.to(torch.bfloat16)
    stock = Norm(groups_of(copies))
    for step in range(4):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        kit.step(optimizer, model(x).square().mean())
        plain(x).square().mean().backward()
        for p, q in zip(plain.parameters(), copies.parameters(), strict=True):
            q.grad, p.grad = p.grad.float(), None
        stock.step()
        with torch.no_grad():
            for p, q in zip(plain.parameters(), copies.parameters(), strict=True):
                p.copy_(q)
    kit.assert_bits(model.state_dict(), plain.state_dict())


@pytest.mark.advice(
    "Use one rank or stage=0, without store=",
    "options with which step() draws none, or another optimizer",
)
@kit.on_ranks(2)
def test_shards_of_several_ranks_are_refused_and_a_contract_helps():
    with pytest.raises(UnsupportedOptimizerError, match="Noise has drawn random numbers in step"):
        train(*sharded(Noise, stage=0), last=1)
    with pytest.raises(UnsupportedOptimizerError, match=r"Norm has no .*what step\(\) does: optimizer_contract="):
        sharded(Norm, stage=2)
    with pytest.raises(UnsupportedOptimizerError, match=r"='together'.*Or use an optimizer that steps"):
        sharded(Norm, stage=3, optimizer_contract="together")
    train(*sharded(Norm, stage=0, optimizer_contract="together"))
    train(*sharded(lambda groups: torch.optim.AdamW(groups), stage=2))


@pytest.mark.advice("Give each parameter a gradient, or use another")
def test_update_in_backward_and_a_step_of_what_had_no_gradient_are_refused():
    with pytest.raises(UnsupportedOptimizerError, match="that of Norm does, .*Else leave update_in_backward out"):
        sharded(Norm, stage=3, update_in_backward=True)
    model, optimizer = sharded(Decays)
    model.blocks[0](torch.ones(1, 6)).sum().backward()
    with pytest.raises(UnsupportedOptimizerError, match="Decays changed .* which had no gradient"):
        optimizer.step()
    kit.assert_bits(train(*sharded(Decays)), train(*made(Decays)))  # each has a gradient, as is advised
