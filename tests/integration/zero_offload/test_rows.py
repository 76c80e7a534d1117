"""`offload_activations(rows=)`: a large batch through each unit a few rows at a time, with the large batch's results.

Fails if a part sees other rows, masks, values or random numbers than it should, if a gradient is lost, counted twice
or summed in 16 bits, or if a unit is gathered once a part.
"""

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from tests import kit

pytest.importorskip("transformers")

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import zero_core
from tests.integration.zero_offload.rows import (
    BF16,
    FP32,
    MODELS,
    Case,
    Toy,
    batch_of,
    build,
    distance,
    toy_batch,
    toy_sharded,
    train,
)
from zero_offload import ActivationError, Timeline, offload_activations

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.promise("rows")]


BY_TOKENS = ("llama", "gpt2", "mixtral", "t5", "vit")
CASES = [
    *(Case(kind, rows=rows) for kind in MODELS for rows in (1, 4)),  # of six rows: one at a time, and four and two
    Case(rows=4, lora=True, placement="nvme", steps=2),
    *(Case(kind, batch=3, tokens=3, rows=rows) for kind in BY_TOKENS for rows in (None, 2)),
    Case(tokens=7, options={"loss_scale": 8.0}),  # as many as a row has
]


@pytest.mark.promise("tokens")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.kind} {case.rows} {case.tokens} {case.lora}")
def test_losses_and_gradients_are_those_of_the_whole_batch(case):
    """Rows have seven tokens, and of images seventeen."""
    if case.lora:
        pytest.importorskip("peft")
    whole, parts = train(replace(case, rows=None, tokens=None)), train(case)
    assert parts.losses == pytest.approx(whole.losses, rel=1e-6)
    assert distance(parts.gradients, whole.gradients) < FP32
    assert distance(parts.parameters, whole.parameters) < FP32
    norms = 2 if case.kind in ("t5", "whisper") else 1  # the last of the decoder, and of the encoder
    once, found = whole.stats["recomputed"], parts.stats["recomputed"]
    if case.tokens is None:
        assert found == (once + norms * case.steps) * -(-6 // case.rows)
    else:
        assert found > 2 * once if case.tokens < 7 else found == once + norms


ROUNDED = [(kind, {"rows": 2}) for kind in ("llama", "mixtral", "t5", "whisper")]


@pytest.mark.promise("tokens")
@pytest.mark.parametrize(("kind", "cut"), [*ROUNDED, ("llama", {"tokens": 2}), ("gpt2", {"tokens": 2})])
def test_in_bf16_they_are_as_near_as_rounding_lets_them(kind, cut):
    whole, parts = (train(Case(kind, dtype=torch.bfloat16, **each)) for each in ({}, cut))
    assert parts.losses == pytest.approx(whole.losses, rel=BF16)
    assert distance(parts.gradients, whole.gradients) < 1.5 * BF16  # LayerNorm sums all rows in bf16, parts in fp32
    exact = train(Case(kind)).gradients
    assert distance(parts.gradients, exact) < 1.1 * distance(whole.gradients, exact)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        *((kind, {"dtype": torch.float32}) for kind in ("llama", "gpt2", "mixtral")),
        *((kind, {"dtype": torch.bfloat16}) for kind in ("llama", "gpt2", "mixtral")),
        ("llama", {"autocast": True}),
    ],
)
def test_gradients_of_units_are_those_of_accumulation_bit_for_bit(kind, options):
    """Four parts of two rows, of equal numbers of tokens, added in fp32 and in the order of the loop. Embeddings are
    computed on the whole batch: theirs are equal but for the rounding of sums."""
    case = Case(kind, batch=8, reduce_dtype=torch.float32, padded=False, **options)
    accumulated, parts = train(replace(case, accumulate=4)), train(replace(case, rows=2))
    by_rows = [name for name in parts.gradients if not any(each in name for each in ("embed", "wte", "wpe"))]
    assert any("norm" in name or "ln_f" in name for name in by_rows) and len(by_rows) > 2 * 7
    for name in by_rows:
        assert torch.equal(parts.gradients[name], accumulated.gradients[name]), name
    assert distance(parts.gradients, accumulated.gradients) < (FP32 if options == {"dtype": torch.float32} else BF16)


@pytest.mark.promise("tokens", "rows-dropout")
@pytest.mark.parametrize("case", [Case(rows=4), Case("gpt2", tokens=3)], ids=["rows", "tokens"])
@pytest.mark.parametrize("placement", [None, "host", "nvme"])
def test_the_same_bits_at_every_placement_and_under_every_policy(placement, case):
    """With dropout, whose random numbers are those of the first forward again."""
    case = replace(case, dropout=0.1, steps=2)
    expected = train(case)
    for policy in ("recompute", "host") + (("nvme",) if placement else ()):
        found = train(replace(case, placement=placement, policy=policy))
        assert found.losses == expected.losses
        assert all(torch.equal(found.gradients[n], g) for n, g in expected.gradients.items())
        if placement is not None and case.rows:
            assert found.stats["spilled_bytes"] == (2 * 2 * 6 * 7 * 32 * 4 if policy != "recompute" else 0)
    whole = train(replace(case, rows=None, tokens=None))
    assert expected.losses != whole.losses  # dropout draws other numbers, as documented


ON_RANKS = [Case(rows=2, stage=stage, more_rows=2, batch=2 if stage % 2 else 4, steps=2) for stage in range(4)]
ON_RANKS += [Case("mixtral", batch=2, placement="nvme", policy="nvme", tokens=2, more_rows=1)]


@pytest.mark.promise("tokens")
@pytest.mark.parametrize("case", ON_RANKS, ids=lambda case: f"{case.kind} {case.stage}")
def test_two_ranks(ranks, case):
    """The second rank has more rows, and so one part more; of two rows, a rank has only one part."""
    whole, parts = (ranks(2).run(train, each) for each in (replace(case, rows=None, tokens=None), case))
    for left, right in zip(parts, whole, strict=True):
        assert left.losses == pytest.approx(right.losses, rel=1e-5)
        assert distance(left.gradients, right.gradients) < FP32
        assert distance(left.parameters, right.parameters) < FP32


# -- what it costs -------------------------------------------------------------------------------------------------


def test_the_timeline_has_a_span_for_each_part_that_is_computed():
    model = MODELS["llama"]()
    timeline = Timeline()
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), observer=timeline)
    with offload_activations(model, rows=4):
        batch = batch_of("llama", 6)
        model(**batch).loss.backward()  # the units are compared with their halves: no part of a batch
        timeline.clear()
        model(**batch).loss.backward()
    optimizer.close()
    parts = [event.unit for event in timeline.events() if event.kind == "part"]
    names = ["model.layers.0", "model.layers.1", "model.norm"]
    forward = [f"{name} {rows}" for name in names for rows in ("4:6", "0:4")]
    backward = [f"{name} {rows}" for name in reversed(names) for rows in ("0:4", "4:6")]
    assert parts == forward + backward


@pytest.mark.promise("tokens")
@pytest.mark.parametrize(
    ("cut", "sizes"), [({"rows": 2}, [2, 2, 2] * 4), ({"tokens": 2}, [1, 2, 2, 2] * 2 + [2, 2, 2, 1] * 2)]
)
def test_a_part_is_alive_at_a_time_and_computed_in_forward_and_once_more(cut, sizes):
    """Of two layers. What a layer gets is not kept between forward and backward."""
    model, _, optimizer = build(Case())
    calls: list[int] = []
    alive: list[weakref.ref[Tensor]] = []
    inputs: list[weakref.ref[Tensor]] = []
    most = 0

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal most
        calls.append(output.shape["tokens" in cut])
        alive.append(weakref.ref(output.untyped_storage()))
        most = max(most, sum(ref() is not None for ref in alive))

    def arrives(module: nn.Module, args: Any) -> None:
        inputs.append(weakref.ref(args[0].untyped_storage()))

    with offload_activations(model, policy="recompute", **cut):
        for layer in model.model.layers:
            layer.mlp.act_fn.register_forward_hook(note)
            layer.mlp.register_forward_pre_hook(arrives)
        batch = batch_of("llama", 6)
        model(**batch).loss.backward()  # compares the units, which it would do again with hooks that are new
        calls.clear()
        inputs.clear()
        most = 0
        loss = model(**batch).loss
        assert inputs and not any(ref() for ref in inputs)
        loss.backward()
    assert calls == sizes and most == 1
    optimizer.close()


# -- logits ----------------------------------------------------------------------------------------------------------


def logits_of(rows: int | None, use: Callable[..., Tensor], kind: str = "llama", lora: bool = False) -> Any:
    """A loss that `use` makes of the model's output, and its gradients."""
    rank, _ = kit.world()
    model, _, optimizer = build(Case(kind, lora=lora))
    batch = batch_of(kind, 6 - 3 * rank, rank)
    with offload_activations(model, policy="recompute", rows=rows):
        loss = use(model(**batch), model, batch)
        loss.backward()
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        found = {name: g.clone() for name, p in trained if (g := zero_core.full_gradient(p)) is not None}
    optimizer.close()
    return float(loss.detach()), found


def soft_capped(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy((output.logits / 3).tanh().flatten(0, 1), batch["labels"].flatten())


def smoothed(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(output.logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)


def shifted_and_more(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = output.logits[:, :-1].float().transpose(1, 2)
    return (
        output.loss + nn.functional.cross_entropy(logits, batch["labels"][:, 1:]) + output.logits.logsumexp(-1).mean()
    )


def summed(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = nn.functional.cross_entropy(output.logits.float().view(-1, 64), batch["labels"].view(-1), reduction="sum")
    return loss / 10 + output.loss


def written(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """In place, into a cast, which has memory of its own, and into the logits, whose memory views share."""
    cast, views = output.logits.to(torch.float64), output.logits.view(-1, 64)
    cast[..., :5] = -3.0
    output.logits.mul_(0.5)
    labels = batch["labels"].flatten()
    return nn.functional.cross_entropy(cast.flatten(0, 1), labels) + nn.functional.cross_entropy(views, labels)


def cast_twice(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = output.logits.to(torch.bfloat16).float()
    assert torch.equal(logits.detach(), output.logits.detach().to(torch.bfloat16).float())
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def compiled(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    def loss(logits: Tensor) -> Tensor:
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())

    return torch.compile(loss, backend="eager")(output.logits)


class Scaled(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 1.5 * found if func is nn.functional.linear else found


def under_a_mode(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A function mode, which has ended when the logits are used."""
    with Scaled():
        logits = model(**batch).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def replaced(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Another weight of the head for one call, which has ended when the logits are used."""
    weights = {"lm_head.weight": 1.5 * model.lm_head.weight}
    logits = torch.func.functional_call(model, weights, (), batch).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def under_autocast(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(**batch).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert (logits.dtype, loss.dtype) == (torch.bfloat16, torch.float32)
    return loss


def unlabelled(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Of adapters under a frozen head: nothing that the model returns has a graph, and nothing around it is trained."""
    return soft_capped(model(**{name: values for name, values in batch.items() if name != "labels"}), model, batch)


USES = [(kind, use) for use in (soft_capped, smoothed, shifted_and_more, summed) for kind in ("llama", "gpt2")]
USES += [("llama", use) for use in (written, cast_twice, replaced, under_a_mode, compiled)]


@pytest.mark.promise("rows-logits")
@pytest.mark.parametrize(("kind", "use"), [*USES, ("llama", unlabelled)])
def test_whatever_is_done_with_logits_has_the_values_and_gradients_of_all_of_them(kind, use):
    lora = use is unlabelled
    if lora:
        pytest.importorskip("peft")
    (whole, expected), (loss, found) = (logits_of(rows, use, kind, lora) for rows in (None, 4))
    assert loss == pytest.approx(whole, rel=1e-6)
    assert distance(found, expected) < FP32


@pytest.mark.promise("rows-logits")
def test_under_autocast_a_loss_of_logits_is_in_fp32():
    (whole, _), (loss, _) = (logits_of(rows, under_autocast) for rows in (None, 4))
    assert loss == pytest.approx(whole, rel=1e-6)


@pytest.mark.promise("rows-logits")
@pytest.mark.parametrize("use", [soft_capped, shifted_and_more])
def test_two_ranks_of_which_one_has_a_single_part_use_all_logits(ranks, use):
    """The ranks gather the head in the same order, whatever is computed by rows."""
    whole, parts = (ranks(2).run(logits_of, rows, use) for rows in (None, 4))
    for (expected, gradients), (loss, found) in zip(whole, parts, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert distance(found, gradients) < FP32


@pytest.mark.promise("rows-old-logits")
def test_logits_can_be_read_and_are_refused_once_a_step_has_changed_the_head():
    model, _, optimizer = build(Case())
    batch = batch_of("llama", 6)
    expected = model(**batch).logits.detach()
    with offload_activations(model, policy="recompute", rows=4):
        output = model(**batch)
        assert output.logits.shape == (6, 7, 64)
        assert output.logits.dtype == torch.float32
        assert not output.logits.is_leaf or output.logits.requires_grad
        with torch.no_grad():
            assert torch.allclose(output.logits * 2, 2 * expected, atol=1e-6)
            assert torch.equal(output.logits.argmax(-1), expected.argmax(-1))
        output.loss.backward()
        read, (unread, used, copied) = output.logits, (model(**batch).logits for _ in range(3))
        best, copied = used.argmax(-1), copied.clone()
        optimizer.step()
        assert torch.allclose(read.detach(), expected, atol=1e-6)
        told = (
            r"a step or a write has changed the head.*use the logits before step\(\). Or take logits.clone\(\) before"
        )
        with pytest.raises(ActivationError, match=told):
            unread.argmax(-1)
        assert torch.equal(used.argmax(-1), best) and torch.equal(copied.argmax(-1), best)
        optimizer.zero_grad()
        told = "register_hook on logits.*a gradient of all logits never exists. Leave rows= and tokens= out"
        with pytest.raises(ActivationError, match=told):
            model(**batch).logits.register_hook(print)
        with pytest.raises(ActivationError, match="grad on logits.*a gradient of all logits never exists"):
            torch.autograd.grad(output.logits.sum(), output.logits, allow_unused=True)
    optimizer.close()


@pytest.mark.promise("rows-logits", "tokens")
@pytest.mark.parametrize(
    ("kind", "cut"),
    [*((kind, {"rows": 2}) for kind in ("llama", "gpt2", "mixtral", "t5", "whisper")), ("llama", {"tokens": 4})],
)
def test_the_loss_of_a_model_never_has_more_than_a_part_of_the_logits(kind, cut):
    """A part has 2 x 12 or 6 x 4 of 6 x 12 tokens."""
    model, _, optimizer = build(Case(kind, options={"loss_scale": 8.0 if kind == "gpt2" else None}))
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.device.type != "meta" and found.shape[-1:] == (64,):
                if found.dim() > 1 and found.shape[-2] != 32:  # those have the shape of the head's weight, transposed
                    largest = max(largest, found.numel() // 64)
            return found

    batch = batch_of(kind, 6, tokens=12)
    with offload_activations(model, policy="recompute", **cut):
        kit.step(optimizer, model(**batch).loss)
        with Watch():
            optimizer.scale_loss(model(**batch).loss).backward()
    assert largest == 24
    optimizer.close()


# -- whatever a unit is, and whoever asks for gradients --------------------------------------------------------------


@pytest.mark.promise("rows-dropout")
@pytest.mark.parametrize("kind", ["plain", "captured"])
@pytest.mark.parametrize("calls", [1, 2])
def test_dropout_a_shared_bias_and_a_unit_that_is_called_twice_give_the_bits_of_parts_by_hand(kind, calls):
    plain = Toy(kind, parts=2)
    torch.manual_seed(3)
    plain(toy_batch(), calls).square().mean().backward()
    model, optimizer, _ = toy_sharded(kind, rows=2)
    torch.manual_seed(3)
    loss = model(toy_batch(), calls).square().mean()
    loss.backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            assert torch.equal(zero_core.full_gradient(q), p.grad), name
    optimizer.close()


def test_hooks_on_parameters_see_one_gradient_and_torch_autograd_grad_gets_it():
    model, optimizer, _ = toy_sharded(rows=2)
    calls: list[Tensor] = []
    model.layers[0].inner.weight.register_hook(lambda gradient: calls.append(gradient.clone()))
    torch.manual_seed(3)
    model(toy_batch()).square().mean().backward()
    assert len(calls) == 1
    torch.manual_seed(3)
    (found,) = torch.autograd.grad(model(toy_batch()).square().mean(), [model.layers[0].inner.weight])
    assert torch.equal(found, calls[0])
    optimizer.close()


def test_a_frozen_parameter_and_an_output_in_a_dataclass():
    plain = Toy("record")
    for module in (plain, plain.layers[0]):
        module.eval()
    plain.layers[0].inner.weight.requires_grad_(False)
    plain(toy_batch()).square().mean().backward()
    model, optimizer, _ = toy_sharded("record", rows=3)
    model.eval()
    model.layers[0].inner.weight.requires_grad_(False)
    model(toy_batch()).square().mean().backward()
    found = {n: zero_core.full_gradient(p) for n, p in model.named_parameters() if p.requires_grad and n != "scale"}
    assert distance(found, {name: p.grad for name, p in plain.named_parameters() if name in found}) < FP32
    optimizer.close()


def test_sums_of_16_bit_gradients_of_a_bias_that_rows_share_are_in_fp32():
    """bf16 would lose what small parts add to a large sum."""

    def gradient(rows: int | None) -> Tensor:
        model, _, offloaded = toy_sharded(rows=rows)
        bias = torch.zeros(5, 16, dtype=torch.bfloat16, requires_grad=True)
        (model(toy_batch(256), bias=bias).sum()).backward()
        offloaded.close()
        return bias.grad

    assert torch.equal(gradient(1), gradient(None))


def test_closing_puts_the_dtype_of_gradients_back():
    model, store, optimizer = build(Case(dtype=torch.bfloat16))
    offloaded = offload_activations(model, store, "recompute", rows=2)
    weight = model.model.layers[0].mlp.up_proj.weight
    assert weight.grad_dtype == torch.float32
    offloaded.close()
    assert weight.grad_dtype == torch.bfloat16
    optimizer.close()


def test_evaluation_computes_the_whole_batch():
    model, optimizer, offloaded = toy_sharded(rows=2)
    sizes = []
    model.layers[0].inner.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    with torch.no_grad():
        model(toy_batch())
    assert sizes == [8]
    optimizer.close()
