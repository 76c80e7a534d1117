"""torch's own clipping, and other reads and edits of `p.grad`, on sharded parameters between backward and step.

Fails if a norm is not that of the mean gradient of all ranks, if a factor is lost or applied twice, or if a stale norm
or gradient is used.
"""

import pytest
import torch
from torch import nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import ChangedParameterError, GradientError

pytestmark = pytest.mark.promise("stock-clipping")

UTILS = nn.utils


def norms_of(parameters):
    return [p.grad.norm() for p in parameters if p.grad is not None]


def each(model, edit):
    for parameter in model.parameters():
        if parameter.grad is not None:
            edit(parameter)


def multiplied(parameter):
    parameter.grad *= 0.7
    parameter.grad.mul_(torch.tensor(0.5))


def row_zeroed(parameter):
    view = parameter.grad.detach()[0]
    view.zero_()
    view.reshape(-1)[0] += 0.5


def flat_clamped(parameter):
    parameter.grad.data.view(-1).clamp_(-0.01, 0.01)
    parameter.grad[parameter.grad > 0.005] = 0.25
    for row in parameter.grad:
        row.mul_(1.5)


def multiplied_and_dropped(model):
    """Of what is dropped, the factor is forgotten, too."""
    model.head.weight.grad.mul_(0.1)
    model.head.weight.grad = None
    model.blocks[0].up.weight.grad.mul_(0.5)


def shrunk(model):
    """Each gradient is multiplied by what the factor is then."""
    factor = torch.tensor(0.5)
    for parameter in model.parameters():
        parameter.grad.mul_(factor)
        factor.mul_(0.9)


CLIPPINGS = {
    "L2": lambda model: UTILS.clip_grad_norm_(model.parameters(), 0.05),
    "foreach": lambda model: UTILS.clip_grad_norm_(model.parameters(), 0.05, foreach=True),
    "one by one": lambda model: UTILS.clip_grad_norm_(model.parameters(), 0.05, foreach=False),
    "inf": lambda model: UTILS.clip_grad_norm_(model.parameters(), 0.05, norm_type=torch.inf),
    "L1": lambda model: UTILS.clip_grad_norm_(model.parameters(), 0.05, norm_type=1.0),
    "a subset": lambda model: UTILS.clip_grad_norm_(model.blocks[0].parameters(), 0.05),
    "two subsets": lambda model: [UTILS.clip_grad_norm_(p.parameters(), 0.03) for p in (model.blocks, model.head)],
    "each alone": lambda model: [UTILS.clip_grad_norm_(p, 0.02) for p in model.parameters()],
    "twice": lambda model: [UTILS.clip_grad_norm_(model.parameters(), most) for most in (0.05, 0.02)][1],
    "values": lambda model: UTILS.clip_grad_value_(model.parameters(), 0.01),
    "values, foreach": lambda model: UTILS.clip_grad_value_(model.parameters(), 0.01, foreach=True),
    "total first": lambda model: UTILS.clip_grads_with_norm_(
        model.parameters(), 0.05, UTILS.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
    ),
    "by hand": lambda model: torch.norm(torch.stack(norms_of(model.parameters())), 2),
    "squares": lambda model: sum(norm**2 for norm in norms_of(model.parameters())) ** 0.5,
    "largest": lambda model: max(p.grad.abs().max() for p in model.parameters() if p.grad is not None),
    "multiplied": lambda model: each(model, multiplied),
    "divided": lambda model: each(model, lambda p: p.grad.div_(3)),
    "halved": lambda model: each(model, lambda p: p.grad.div_(2)),
    "decayed": lambda model: each(model, lambda p: p.grad.add_(p.detach(), alpha=0.1)),
    "a row": lambda model: each(model, row_zeroed),
    "views": lambda model: each(model, flat_clamped),
    "centred": lambda model: each(model, lambda p: p.grad.sub_(p.grad.mean())),
    "multiplied and dropped": multiplied_and_dropped,
    "by a factor that changes": shrunk,
}


def twins(**options):
    return kit.pair(lambda: toys.Stack(2), toys.adamw, **options)


def step_both(*optimizers):
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def clipped(names, stage, micro_batches=1, **options):
    for name in names:
        dense, theirs, model, ours = twins(stage=stage, **options)
        for step in range(2):
            for micro in range(micro_batches):
                toys.backward_both(model, dense, 10 * step + micro)
                found, expected = CLIPPINGS[name](model), CLIPPINGS[name](dense)
                if expected is not None:
                    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-7)
            step_both(ours, theirs)
        kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)
        ours.close()


@pytest.mark.parametrize(("stage", "size"), [(3, 1), (0, 2), (1, 2), (3, 2)])
def test_clipping_and_edits_are_those_of_plain_torch(ranks, stage, size):
    ranks(size).run(clipped, list(CLIPPINGS), stage)


@pytest.mark.parametrize(("stage", "size"), [(3, 1), (1, 2), (3, 2)])
def test_what_was_clipped_is_added_to_as_in_plain_torch(ranks, stage, size):
    """Each micro-batch clips the sum so far."""
    ranks(size).run(clipped, ["L2", "a subset", "values", "multiplied"], stage, 2)


def test_norms_and_edits_are_without_the_loss_scale():
    clipped(["L2", "L1", "values", "decayed"], 3, loss_scale=1024.0)


@pytest.mark.promise("stock-clipping-reads-none")
@kit.on_ranks(1, 2)
def test_clipping_all_gradients_reads_and_writes_none():
    """The norm of all gradients is step()'s own, and the coefficient is step()'s own factor."""
    _, _, model, ours = twins()
    store = zero_core.handle(model).store
    store.read_gradient = store.write_gradient = None
    toys.loss_of(model, toys.data(0, toys.world()[0])).backward()
    norm = UTILS.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05
    ours.step()
    assert ours.grad_norm == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize("foreach", [None, True])
def test_two_sharded_models_and_a_plain_layer_are_clipped_together(foreach):
    pairs, layers = (twins(), twins()), [nn.Linear(3, 3), nn.Linear(3, 3)]
    layers[1].load_state_dict(layers[0].state_dict())
    for step, (dense, _, model, _) in enumerate(pairs):
        toys.backward_both(model, dense, step)
    norms = []
    for layer, *beside in zip(layers, *([pair[2], pair[0]] for pair in pairs), strict=True):
        layer(torch.ones(1, 3)).sum().backward()
        together = [p for part in (layer, *beside) for p in part.parameters()]
        norms.append(UTILS.clip_grad_norm_(together, 0.05, foreach=foreach))
    torch.testing.assert_close(*norms)
    torch.testing.assert_close(layers[0].weight.grad, layers[1].weight.grad)
    for dense, theirs, model, ours in pairs:
        step_both(ours, theirs)
        kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)


@pytest.mark.promise("plain-optimizer")
@pytest.mark.parametrize("foreach", [False, True])
def test_a_plain_optimizer_steps_with_the_gradients_of_all_ranks(foreach):
    """Slowly, gathering each; the sharded optimizer is not asked."""
    dense, _, model, _ = twins()
    plain = [torch.optim.Adam(each.parameters(), lr=0.1, foreach=foreach) for each in (model, dense)]
    for step in range(2):
        toys.backward_both(model, dense, step)
        step_both(*plain)
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)


def test_stock_clipping_and_max_grad_norm_clip_one_after_the_other():
    dense, theirs, model, ours = twins(max_grad_norm=0.02)
    toys.backward_both(model, dense, 0)
    for each_model in (model, dense):
        UTILS.clip_grad_norm_(each_model.parameters(), 0.05)
    UTILS.clip_grad_norm_(dense.parameters(), 0.02)
    step_both(ours, theirs)
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)


def test_what_is_not_finite_is_seen():
    _, _, model, ours = twins()
    (toys.loss_of(model, toys.data(0, 0)) * torch.inf).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        UTILS.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    assert not torch.isfinite(UTILS.clip_grad_norm_(model.parameters(), 1.0))
    assert not torch.isfinite(UTILS.clip_grad_norm_(model.parameters(), 1.0, norm_type=torch.inf))
    with pytest.raises(GradientError, match="gradient norm is (nan|inf)"):
        ours.step()


@pytest.mark.advice("Read p.grad again after backward(), or keep")
def test_an_old_gradient_and_an_old_norm_are_refused():
    _, _, model, ours = twins()
    toys.loss_of(model, toys.data(0, 0)).backward()
    gradient, norm = model.head.weight.grad, model.head.weight.grad.norm()
    gradient.mul_(0.5)
    with pytest.raises(GradientError, match=r"read after the gradient has changed.* call norm.item\(\) before"):
        norm.item()
    before = gradient.norm().item()
    gradient.mul_(0.5)
    assert gradient.norm().item() == pytest.approx(before / 2)
    ours.step()
    with pytest.raises(GradientError, match=r"step\(\) has used up the gradient|was read before a step"):
        gradient.mul_(0.5)
    ours.zero_grad()
    toys.loss_of(model, toys.data(0, 0)).backward()
    with pytest.raises(GradientError, match="was read before a step"):
        gradient.mul_(0.5)


@pytest.mark.advice("parameter has none: use zero_core.full_gradient", "would be lost. Write p.grad.copy_(tensor)")
def test_views_of_a_gradient_are_kept_or_refused():
    _, _, model, ours = twins()
    toys.loss_of(model, toys.data(0, 0)).backward()
    weight = model.head.weight
    row, copied, array = weight.grad[0], weight.grad.cpu(), weight.grad.numpy()
    before = weight.grad.clone()
    weight.grad.mul_(0.5)
    with pytest.raises(GradientError, match="a view of head.weight.grad is used after"):
        row.mul_(2.0)
    assert torch.equal(copied, before)
    with pytest.raises(GradientError, match="a view of head.weight.grad is used after"):
        copied.zero_()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 0.0
    for replace in (lambda: setattr(weight.grad, "data", before), lambda: weight.grad.set_(before)):
        with pytest.raises(GradientError, match="memory"):
            replace()
    assert torch.equal(weight.grad.clone(), before * 0.5)
    ours.step()
    with pytest.raises(GradientError, match="used up the gradient|before a step"):
        row.sum()


@pytest.mark.advice("take gradients from torch.autograd.grad(loss, parameters", "write p.grad.detach()")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_a_loss_of_gradients_with_a_graph_is_refused_and_trains_by_autograd_grad():
    dense, theirs, model, ours = twins()
    for step in range(2):
        norms = []
        for each_model, optimizer in ((dense, theirs), (model, ours)):
            loss, parameters = toys.loss_of(each_model, toys.data(step, 0)), [*each_model.parameters()]
            loss.backward(create_graph=True)
            assert parameters[0].grad.requires_grad and not parameters[0].grad.detach().requires_grad
            norms.append([float(parameters[0].grad.detach().norm()), float(UTILS.clip_grad_norm_(parameters, 100.0))])
            gradients = [p.grad for p in parameters]
            if each_model is model:
                with pytest.raises(GradientError, match=r"square on embed.weight.grad after backward.create_graph"):
                    gradients[0].square()
                gradients = torch.autograd.grad(loss, parameters, create_graph=True)
            optimizer.zero_grad()
            (toys.loss_of(each_model, toys.data(step, 1)) + sum(g.square().sum() for g in gradients)).backward()
            assert not parameters[0].grad.requires_grad
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        step_both(ours, theirs)
    kit.assert_same(model, dense, rtol=1e-5, atol=1e-6)


@kit.on_ranks(2)
def test_ranks_that_multiply_by_different_numbers_are_refused():
    """A rank that multiplies by a number of its own."""
    _, _, model, ours = twins()
    toys.loss_of(model, toys.data(0, toys.world()[0])).backward()
    for parameter in model.parameters():
        parameter.grad.mul_(0.5 + toys.world()[0])
    before = kit.values(model)
    with pytest.raises(ChangedParameterError, match="wrote different values"):
        ours.step()
    kit.assert_bits(kit.values(model), before)
