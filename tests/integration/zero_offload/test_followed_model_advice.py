"""Advice about activations of transformers' models that is followed: each test makes a mistake, does what the error
says, and the gradients are those of plain torch."""

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

import zero_core
from tests.integration.zero_offload.rows import MODELS, Case, batch_of, build, distance
from zero_offload import ActivationError, offload_activations

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.promise("activations-advice")]
FP32 = 1e-6  # relative to a gradient's norm


def plain(kind: str, loss_of) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients(model: nn.Module, loss_of, policy="recompute", **options) -> dict[str, Tensor]:
    with offload_activations(model, None, policy, **options):
        loss_of(model).backward()
    found = {name: zero_core.full_gradient(parameter).clone() for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        parameter.grad = None
    return found


@pytest.mark.parametrize("rows", [None, 2])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_a_cache_is_not_used_or_the_units_keep_their_activations(kind, rows):
    batch = batch_of(kind, 4)
    expected = plain(kind, lambda model: model(**batch, use_cache=False).loss)
    model, _, optimizer = build(Case(kind))

    def follow(policy="recompute", **given):
        found = gradients(model, lambda model: model(**batch, **given).loss, policy, rows=rows)
        assert distance(found, expected) < FP32

    for given in ({"use_cache": True}, {}):
        model.config.use_cache = True
        with pytest.raises(ActivationError, match=r"train with use_cache=False \(model.config.use_cache = False\), or"):
            follow(**given)
    follow(use_cache=False)
    follow("keep")
    model.config.use_cache = False
    follow()
    optimizer.close()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits):
        return logits * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def reentrant(logits: Tensor) -> Tensor:
    return torch.utils.checkpoint.checkpoint(lambda x: x * 2, logits, use_reentrant=True)


def past_torchs_functions(logits: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return logits * 2


@pytest.mark.promise("rows-logits-past-torch")
@pytest.mark.parametrize("use", [Doubled.apply, reentrant, past_torchs_functions])
def test_what_cannot_follow_logits_is_given_copies_or_all_of_them(use):
    """Fails if the gradient of logits that are computed later is lost, or that of their copy is another one."""
    batch = batch_of("llama", 6)
    expected = plain("llama", lambda model: (model(**batch).logits * 2).logsumexp(-1).mean())
    model, _, optimizer = build(Case())

    def follow(copy=lambda logits: logits, **options):
        return gradients(model, lambda model: use(copy(model(**batch).logits)).logsumexp(-1).mean(), **options)

    with pytest.raises(ActivationError, match=r"use logits.clone\(\) there, or leave rows= and tokens= out"):
        follow(rows=2)
    assert distance(follow(torch.clone, rows=2), expected) < FP32
    assert distance(follow(), expected) < FP32
    optimizer.close()


def test_the_input_of_a_head_is_changed_out_of_place_or_rows_are_left_out():
    batch = {name: values for name, values in batch_of("llama", 6).items() if name != "labels"}

    def logits(change, rows):
        torch.manual_seed(0)
        model = MODELS["llama"]()
        model.lm_head.requires_grad_(False)  # so that autograd does not need the head's input
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = zero_core.shard(model, torch.optim.SGD(trained, lr=0.1))
        with offload_activations(model, rows=rows):
            hidden = model.model(**batch).last_hidden_state
            logits = model.lm_head(hidden)
            with torch.no_grad():
                change(hidden)
            found = logits.argmax(-1)
            logits.logsumexp(-1).sum().backward()
        optimizer.close()
        return found

    with pytest.raises(RuntimeError, match="unit head was .* out of place, or leave rows="):
        logits(lambda hidden: hidden.mul_(2), 2)
    assert torch.equal(logits(lambda hidden: hidden.mul(2), 2), logits(lambda hidden: hidden.mul_(2), None))
