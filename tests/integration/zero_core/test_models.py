"""Any nn.Module in any training loop, unchanged: what it returns, shares, freezes, leaves out or uses elsewhere."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import GradientError


def plain():
    """No parameters of the root's own, so the first layer's unit is the last to be reduced."""
    return nn.Sequential(nn.Linear(5, toys.WIDTH), nn.Tanh(), nn.Linear(toys.WIDTH, 3))


def parametrised():
    return nn.Sequential(
        parametrizations.weight_norm(nn.Linear(5, toys.WIDTH)),
        nn.Tanh(),
        parametrizations.orthogonal(nn.Linear(toys.WIDTH, toys.WIDTH)),
        nn.Linear(toys.WIDTH, 3),
    )


def normed():
    model = toys.Stack()
    for linear in (model.head, model.blocks[1].up):
        nn.utils.weight_norm(linear)
    return model


class Failing(toys.Stack):
    """Raises where it is told to."""

    where = ""

    def run(self, block, x):
        if block is self.blocks[1] and self.where == "forward":
            self.fail()
        if block is self.blocks[1] and self.where == "backward":
            x = x.clone()
            x.register_hook(self.fail)
        return super().run(block, x)

    @staticmethod
    def fail(gradient=None):
        raise ValueError("asked to fail")


# ---- before a step ---------------------------------------------------------------------------------------------------


def log_norms(model, step):
    for parameter in model.parameters():
        parameter.norm().item()  # with gradients enabled, as loggers do


def evaluate(model, step):
    model.eval()
    x = toys.data(50 + step, 0)
    with torch.no_grad():
        first = model(x)
    with torch.inference_mode():
        second = model(x)
        model.blocks[1](torch.ones(2, toys.WIDTH))  # a unit on its own
    assert torch.equal(first, second)
    model(x)  # a forward whose graph is thrown away
    model.train()


def fail(where, model, step):
    model.where = where
    with pytest.raises(ValueError, match="asked to fail"):
        toys.loss_of(model, toys.data(70, 0)).backward()
    model.where = ""
    zero_core.handle(model).optimizer.zero_grad()


# ---- losses ----------------------------------------------------------------------------------------------------------


def loss_in(dtype, model, x):
    return model(x.to(dtype)).float().square().mean()


def penalty_after(model, x):
    return toys.loss_of(model, x) + 0.01 * model[0].weight.square().sum()


def penalty_before(model, x):
    penalty = 0.01 * model[0].weight.square().sum() + 0.02 * model[2].bias.square().sum()
    return penalty + toys.loss_of(model, x)


def penalty_on_one_rank(model, x):
    """Both ranks read, so that the collectives match; one uses what it read."""
    penalty = model[2].weight.square().sum()
    loss = toys.loss_of(model, x)
    return loss + 0.01 * penalty if float(x.sum()) > 0 else loss


def of_a_weight_alone(model, x):
    """Without any forward."""
    return 0.5 * model[0].weight.square().sum()


def slope(model, x):
    """A second-order loss: backward through a backward, over parameters that stage 3 would have taken away."""
    x = x.detach().requires_grad_(True)
    (found,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    return found.square().mean()


# ---- backwards -------------------------------------------------------------------------------------------------------


def quietly(model, step, m, x):
    """Without a reduction before the last of three micro-batches."""
    with zero_core.no_sync(model) if m < 2 else torch.enable_grad():
        toys.loss_of(model, x).backward()


HELD: list[torch.Tensor] = []


def summed(model, step, m, x):
    """Three forwards, their losses summed, one backward."""
    HELD.append(toys.loss_of(model, x))
    if m == 2:
        sum(HELD).backward()
        HELD.clear()


def reversed_and_repeated(model, step, m, x):
    """The first forward's backward comes after the second's, and one graph is used twice."""
    HELD.append(toys.loss_of(model, x))
    if m == 1:
        HELD[1].backward()
        (HELD[0] / 2).backward(retain_graph=True)
        (HELD[0] / 2).backward()
        HELD.clear()


def case(make, *stages, **options):
    """What toys.train() is given, and the stages on two ranks; on one rank it is the last of them."""
    return make, stages or (3,), options


SOME = {"steps": 9, "find_unused_parameters": True}  # each part of `Sometimes` on either rank alone, on both, on none
FP32 = {"reduce_dtype": torch.float32, "tolerance": 2e-3}
BF16 = {"param_dtype": torch.bfloat16, "loss": partial(loss_in, torch.bfloat16), **FP32}
PECULIAR = (toys.Stack, toys.Unused, toys.Frozen, toys.Tied, toys.External, toys.Routed, toys.Twice)
CASES = {
    **{make.__name__: case(make, 0, 1, 2, 3) for make in (*PECULIAR, toys.InPlace, toys.InPlaceView)},
    **{f"returns {kind}": case(partial(toys.Returning, kind)) for kind in toys.Returning.WRAP},
    **{f"checkpoint of {n}": case(partial(toys.Checkpointed, False, n)) for n in (1, 2, 4)},
    **{f"reentrant checkpoint of {n}": case(partial(toys.Checkpointed, True, n)) for n in (1, 2, 4)},
    **{f"{n} bytes ahead": case(toys.Twice, prefetch_bytes=n) for n in (0, 1, 1 << 20)},
    **{f"{n} bytes stay": case(toys.Stack, resident_bytes=n) for n in (0, 3000, 1 << 20)},
    "bf16": case(toys.Stack, **BF16),
    "fp16": case(toys.Stack, param_dtype=torch.float16, loss=partial(loss_in, torch.float16), **FP32),
    "updated in backward": case(toys.Unused, 0, 2, 3, update_in_backward=True),
    **{f"{make.__name__} updated in backward": case(make, update_in_backward=True) for make in (toys.Twice, toys.Tied)},
    "a constant scale": case(toys.External, loss_scale=1024.0),
    "parametrised": case(parametrised, 0, 1, 2, 3),
    "weight norm": case(normed),
    "norms are logged": case(plain, 0, 1, 2, 3, before=log_norms),
    "penalty after": case(plain, 0, 1, 2, 3, loss=penalty_after),
    "without any forward": case(plain, loss=of_a_weight_alone),
    "penalty before": case(plain, 0, 1, 2, 3, loss=penalty_before),
    "penalty before, accumulated": case(plain, 0, 1, 2, 3, loss=penalty_before, micro=3),
    "penalty on one rank": case(plain, 0, 1, 2, 3, loss=penalty_on_one_rank),
    "accumulated": case(toys.Unused, 0, 1, 2, 3, micro=3),
    "accumulated quietly": case(toys.Unused, 0, 1, 2, 3, micro=3, backward=quietly),
    "several forwards": case(toys.Unused, micro=3, backward=summed),
    "several forwards, resident": case(toys.Unused, micro=3, backward=summed, resident_bytes=1 << 20),
    "backwards in another order": case(toys.Twice, micro=2, backward=reversed_and_repeated),
    "evaluated between steps": case(toys.Stack, 1, 3, before=evaluate),
    "an exception in forward": case(Failing, before=partial(fail, "forward")),
    "an exception in backward": case(Failing, before=partial(fail, "backward")),
    "second order": case(toys.Stack, 1, 3, loss=slope),
    "some units on some ranks": case(toys.Sometimes, 0, 1, 2, **SOME),
    "some, adamw": case(toys.Sometimes, 0, 1, 2, build=toys.adamw, before=evaluate, **SOME),
    "some, accumulated quietly": case(toys.Sometimes, 0, 1, 2, micro=3, backward=quietly, **SOME),
    "some, several forwards": case(toys.Sometimes, 1, micro=3, backward=summed, **SOME),
    "some, scaled, bf16": case(toys.Sometimes, 1, 2, loss_scale=8.0, **BF16, **SOME),
}
PLACES = [
    (name, size, stage)
    for name, (_, stages, _) in CASES.items()
    for size, stage in ((1, stages[-1]), *((2, stage) for stage in stages))
]


@pytest.mark.promise("module-outputs", "residency-no-number", "frozen-unused-tied", "units-on-some-ranks")
@pytest.mark.promise("moe-routing", "activation-checkpointing", "late-gradients", "second-order", "fp32-reduction")
@pytest.mark.promise("accumulation", "several-forwards", "backward-orders", "modes", "exception-retry")
@pytest.mark.promise("update-in-backward", "loss-scale-constant", "parameter-over-sharded", "changed-between")
@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize(("name", "size", "stage"), PLACES)
@kit.on_ranks()
def test_trains_as_its_dense_twin(name, size, stage):
    make, _, options = CASES[name]
    toys.train(make, stage=stage, **options)


@pytest.mark.promise("units-on-some-ranks")
@pytest.mark.parametrize("stage", [0, 1, 2])
@kit.on_ranks(2)
def test_gradients_of_another_rank_alone_are_read_and_clipped_as_with_ddp(stage):
    """Rank 1 alone has the tower; neither has the second block."""
    batches = [toys.data(step, rank) for step, rank in ((7, 1), (8, 1))]
    assert [(x[0, :2] > 0).tolist() for x in batches] == [[False, False], [True, False]]
    dense, _, model, optimizer = kit.pair(toys.Sometimes, toys.sgd, stage=stage, find_unused_parameters=True)
    toys.loss_of(model, batches[kit.world()[0]]).backward()
    (sum(toys.loss_of(dense, x) for x in batches) / 2).backward()
    toys.same_gradients(model, dense, rtol=1e-5, atol=1e-7)
    norms = [torch.nn.utils.clip_grad_norm_(each.parameters(), 0.1) for each in (model, dense)]
    torch.testing.assert_close(*map(float, norms), rtol=1e-5, atol=0.0)
    for each in (optimizer, toys.sgd(dense.parameters())):
        each.step()
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-7)


@pytest.mark.promise("uneven-sizes")
@kit.on_ranks(4)
def test_ranks_that_hold_only_the_zero_tail_of_a_unit():
    """The head has 42 elements, its storage 128: on four ranks the last one holds nothing of it."""
    model, _ = toys.train(toys.Unused)
    rank = toys.world()[0]
    held = [len(unit.layout.pieces(rank)) for unit in zero_core.units(model)]
    assert all(held) if rank == 0 else rank < 3 or not all(held)


@pytest.mark.promise("resharded-after-step")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_everything_is_resharded_after_the_step(stage):
    model, optimizer = kit.sharded(toys.External, toys.sgd, stage=stage, prefetch_bytes=1 << 20)
    for step in range(3):
        with torch.no_grad():
            model(toys.data(9, 0))
        toys.loss_of(model, toys.data(step, 0)).backward()
        if stage == 3:
            assert all(unit.residency.value == "sharded" for unit in zero_core.units(model)), "right after backward"
        optimizer.step()
        optimizer.zero_grad()
        for unit in zero_core.units(model):
            assert unit.residency.value == "sharded" and unit.flat.untyped_storage().nbytes() == 0
            assert unit.gradient.current is None and unit.gradient.kept is None and unit.users == 0
        assert not zero_core.handle(model).engine.pool.lent


class Attending(nn.Module):
    """out_proj is a unit of its own whose weight the attention uses itself, in a recomputation too."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.embed(x)[None]
        return checkpoint(lambda y: self.attention(y, y, y, need_weights=False)[0], x, use_reentrant=False)


@pytest.mark.promise("use-in-recomputation")
@kit.on_ranks(1, 2)
def test_gradients_of_a_weight_that_a_recomputation_uses_outside_of_its_module():
    dense, _, model, _ = kit.pair(Attending, toys.sgd)
    found, expected = (
        torch.autograd.grad(toys.loss_of(each, toys.data(0, 0)), list(each.parameters())) for each in (model, dense)
    )
    torch.testing.assert_close(found, expected)
    toys.loss_of(model, toys.data(0, 0)).backward(inputs=[model.attention.in_proj_weight])
    assert model.attention.in_proj_weight.grad is not None
    unused = torch.autograd.grad(model.embed(toys.data(0, 0)).sum(), model.parameters(), materialize_grads=True)
    assert float(unused[-1].abs().sum()) == 0.0


@pytest.mark.promise("late-under-update")
@kit.on_ranks(1, 2)
def test_uses_outside_of_what_is_updated_in_backward():
    """A read updates nothing twice. A gradient that comes after the update is refused."""
    model, optimizer = kit.sharded(plain, toys.sgd, update_in_backward=True)
    loss = toys.loss_of(model, toys.data(0, 0))
    model[0].weight.norm().item()
    loss.backward()
    optimizer.step()
    assert optimizer.grad_norm > 0
    optimizer.zero_grad()
    for of in (plain, lambda: toys.Checkpointed(True)):
        model, optimizer = kit.sharded(of, toys.sgd, update_in_backward=True)
        penalty = (model[2] if of is plain else model.blocks[3].up).weight.square().sum()
        with pytest.raises(GradientError, match="a gradient reached unit .* used outside its module"):
            (penalty + toys.loss_of(model, toys.data(0, 0))).backward()
            optimizer.step()
