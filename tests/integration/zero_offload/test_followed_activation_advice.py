"""Advice about activations that is followed: each test makes a mistake, does what the error says, and that works, with
the gradients of plain torch."""

from dataclasses import dataclass

import pytest

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_offload.rows import MODELS, Case, batch_of, build, distance
from zero_offload import (
    ActivationError,
    BudgetError,
    ClosedError,
    MemoryByteStore,
    TieredStore,
    TorchStep,
    offload_activations,
)
from zero_offload.activations import checkpointed_forward
from zero_offload.activations import recompute as module_under_test

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.promise("activations-advice")]

BATCH, TOKENS, WIDTH = 8, 5, 6


class Block(nn.Module):
    """Gives `how` the sum of x and a layer of it."""

    def __init__(self, how):
        super().__init__()
        self.how, self.layer = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x, **given):
        return self.how(self, x + torch.tanh(self.layer(x)), **given)


class Model(nn.Module):
    """Two blocks, of which the second does nothing special."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList([Block(how), Block(lambda block, y: y)])

    def forward(self, x, **given):
        y = self.layers[0](self.stem(x), **given)
        return self.layers[1](y[0] if isinstance(y, tuple) else y)


def gradients(model, given, read, batch=BATCH):
    x = torch.randn(batch, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    model(x, **given).square().mean().backward()
    return {name: read(parameter).clone() for name, parameter in model.named_parameters()}


def refused(message, how, given=dict, batch=BATCH, policy="recompute"):
    model, optimizer = kit.sharded(Model(how))
    named = {"rows": 2, "row_modules": ["layers.*"]}
    with pytest.raises(ActivationError, match=message), offload_activations(model, None, policy, **named):
        gradients(model, given(), zero_core.full_gradient, batch)
    optimizer.close()


def works(policy, how, given=dict, batch=BATCH, **options):
    expected = gradients(Model(how), given(), lambda parameter: parameter.grad, batch)
    model, optimizer = kit.sharded(Model(how))
    with offload_activations(model, None, policy, row_modules=["layers.*"], **options) as activations:
        found = gradients(model, given(), zero_core.full_gradient, batch)
        assert activations.stats()["recomputed"]
    optimizer.close()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def appends(block: Block, y: Tensor, into: list[Tensor]) -> Tensor:
    into.append(y)
    return y


def marked() -> dict[str, Tensor]:
    """Of ten rows, only those that the comparison of the first and of the last does not see are marked."""
    return {"marks": torch.tensor([0] * 4 + [1] * 2 + [0] * 4)}


@pytest.mark.advice(", or leave {}= out", "give the unit with {} the policy 'keep'")
@pytest.mark.parametrize(
    ("message", "how", "options"),
    [
        ("adds, replaces or removes tensors in an argument", appends, {"given": lambda: {"into": []}}),
        (
            "returns outputs whose structure differs between rows",
            lambda block, y, marks: (y, y) if marks.any() else y,
            {"given": marked, "batch": 10},
        ),
        (
            r"returns, or stores in an attribute, a value of shape \(\)",
            lambda block, y, marks: (y, marks.sum()),
            {"given": marked, "batch": 10},
        ),
        ("returns outputs whose structure differs", lambda block, y: (y, y) if len(y) > 1 else y, {}),
    ],
)
def test_a_unit_that_cannot_be_cut_keeps_its_activations_or_computes_all_rows(message, how, options):
    told = (
        r".* (?:Else )?give the unit with layers.0 the policy 'keep' "
        r"\(policy={'layers.0': 'keep', 'layers.\*': 'recompute'}\). Or leave rows="
    )
    refused(f"module layers.0 {message}{told}", how, **options)
    works({"layers.0": "keep", "layers.*": "recompute"}, how, rows=2, **options)
    works("recompute", how, **options)


def test_frozen_and_trained_units_of_a_block_have_one_policy():
    model = Model(lambda block, y: y)
    model.layers[0].extra = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = zero_core.shard(model, torch.optim.SGD(trained, lr=0.1))
    names = [unit.name for unit in zero_core.units(model) if unit.name.startswith("layers.0")]
    assert len(names) == 2
    with pytest.raises(ActivationError, match="units of module layers.0 need one policy, not .*: give all the same"):
        offload_activations(model, policy={names[0]: "keep", "layers.*": "recompute"})
    offload_activations(model, policy=dict.fromkeys(names, "keep") | {"layers.*": "recompute"}).close()
    optimizer.close()


@dataclass
class Bag:
    bias: Tensor


@pytest.mark.advice("call torch.export.register_dataclass({})")
def test_a_dataclass_is_cut_once_torch_knows_it():
    def given():
        return {"bag": Bag(torch.linspace(-1, 1, BATCH * TOKENS * WIDTH).view(BATCH, TOKENS, WIDTH))}

    def adds(block, y, bag):
        return y + bag.bias

    refused(r"If class Bag is a dataclass, call torch.export.register_dataclass\(Bag\). Else give", adds, given)
    torch.export.register_dataclass(Bag)
    works("recompute", adds, given, rows=2)


def test_an_argument_without_which_no_part_can_be_computed_is_named_as_shared():
    """A bias of each head, of which there are as many as rows."""

    def attends(block, y, bias):
        of_heads = y[:, None].expand(-1, BATCH, -1, -1)
        return ((of_heads @ of_heads.transpose(-1, -2) + bias).softmax(-1) @ of_heads).mean(1)

    bias = torch.randn(BATCH, TOKENS, TOKENS, generator=torch.Generator().manual_seed(2))
    case = {"how": attends, "given": lambda: {"bias": bias}}
    refused(r"If an argument must not be cut, name it in shared=\[...\]", **case)
    works("recompute", rows=2, shared=["bias"], **case)


@pytest.mark.advice("update to 2.13, use fp32 parameters, or leave {}= out")
def test_gradients_of_16_bit_parameters_are_added_in_fp32_by_torch_or_need_not_be(monkeypatch):
    def train(dtype, old_torch, **options):
        model, optimizer = kit.sharded(Model(lambda block, y: y).to(dtype))
        with monkeypatch.context() as patch:
            if old_torch:
                patch.setattr(checkpointed_forward, "Tensor", type("TensorWithoutGradDtype", (), {}))
            activations = offload_activations(model, row_modules=["layers.*"], **options)
        with activations:
            model(torch.ones(BATCH, TOKENS, WIDTH, dtype=dtype)).square().mean().backward()
        optimizer.close()

    with pytest.raises(ActivationError, match="update to 2.13, use fp32 parameters, or leave rows= out"):
        train(torch.bfloat16, old_torch=True, rows=2)
    train(torch.float32, old_torch=True, rows=2)
    train(torch.bfloat16, old_torch=True)
    if hasattr(torch.Tensor, "grad_dtype"):
        train(torch.bfloat16, old_torch=False, rows=2)


# -- what is set aside -----------------------------------------------------------------------------------------------


def on_nvme(streams=None, capacity_bytes=1 << 22):
    model = Model(lambda block, y: y)
    store = TieredStore(nvme=MemoryByteStore(capacity_bytes=capacity_bytes), step=TorchStep(), streams=streams)
    return model, store, zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store)


@pytest.fixture
def all_are_set_aside(monkeypatch):
    monkeypatch.setattr(module_under_test, "SMALL_BYTES", 0)


def test_nvme_has_room_for_fewer_tokens_or_fewer_units(all_are_set_aside):
    many, few = 1600, 400
    of_an_input = many * TOKENS * WIDTH * 4

    def train(policy, batch):
        model, store, optimizer = on_nvme(capacity_bytes=of_an_input * 3 // 2)
        with offload_activations(model, store, policy, piece_bytes=4096):
            gradients(model, {}, zero_core.full_gradient, batch)
        optimizer.close()

    advice = 'Take fewer tokens a micro-batch. Or give some units the policy "recompute"'
    with pytest.raises(BudgetError, match=f"no room on nvme for .*{advice}"):
        train("nvme", many)
    train("nvme", few)
    train({"layers.0": "nvme", "layers.1": "recompute"}, many)


def test_activations_that_were_closed_are_offloaded_again(all_are_set_aside):
    model, store, optimizer = on_nvme()
    with offload_activations(model, store, "nvme"):
        loss = model(torch.ones(BATCH, TOKENS, WIDTH)).sum()
    with pytest.raises(ClosedError, match="call offload_activations again"):
        loss.backward()
    with offload_activations(model, store, "nvme"):
        model(torch.ones(BATCH, TOKENS, WIDTH)).sum().backward()
    optimizer.close()


# -- models of transformers --------------------------------------------------------------------------------------------


FP32 = 1e-6  # relative to a gradient's norm


def plain(kind: str, loss_of) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = MODELS[kind]().train()
    loss_of(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def gradients_of(model: nn.Module, loss_of, policy="recompute", **options) -> dict[str, Tensor]:
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
        found = gradients_of(model, lambda model: model(**batch, **given).loss, policy, rows=rows)
        assert distance(found, expected) < FP32

    for given in ({"use_cache": True}, {}):
        model.config.use_cache = True
        with pytest.raises(ActivationError, match=r"train with use_cache=False \(model.config.use_cache = False\). Or"):
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
        return gradients_of(model, lambda model: use(copy(model(**batch).logits)).logsumexp(-1).mean(), **options)

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

    with pytest.raises(RuntimeError, match="module head was .*: change a copy of the input. Or leave rows="):
        logits(lambda hidden: hidden.mul_(2), 2)
    assert torch.equal(logits(lambda hidden: hidden.mul(2), 2), logits(lambda hidden: hidden.mul_(2), None))
