"""`offload_activations(rows=)`: a large batch through each unit a few rows at a time, with the large batch's results.

Fails if a part sees other rows, masks, values or random numbers than it should, if a gradient is lost, counted twice
or summed in 16 bits, if a unit is gathered once a part, or if a unit whose rows depend on each other is computed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from tests import kit

pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero_core
from tests.integration.zero_offload.rows import MODELS, Case, batch_of, build, distance, train
from zero_core.runtime.residency import CAN_SWAP
from zero_offload import ActivationError, TieredStore, Timeline, TorchStep, offload_activations

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own, of small configurations
FP32, BF16 = 1e-6, 2e-2  # relative to a gradient's norm; measured: 3e-7 and 8e-3


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("rows", [1, 4])
def test_losses_and_gradients_are_those_of_the_whole_batch(kind, rows):
    """Six rows: in parts of one, and in parts of four and two."""
    whole, parts = train(Case(kind)), train(Case(kind, rows=rows))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-6)
    assert distance(parts.gradients, whole.gradients) < FP32
    norms = 2 if kind in ("t5", "whisper") else 1  # the last of the decoder, and of the encoder
    assert parts.stats["recomputed"] == (whole.stats["recomputed"] + norms) * -(-6 // rows)


@pytest.mark.parametrize("kind", ["llama", "mixtral", "t5", "whisper"])
def test_in_bf16_they_are_as_near_as_rounding_lets_them(kind):
    whole, parts = (train(Case(kind, rows=rows, dtype=torch.bfloat16)) for rows in (None, 2))
    assert parts.losses == pytest.approx(whole.losses, rel=BF16)
    assert distance(parts.gradients, whole.gradients) < 1.5 * BF16  # LayerNorm sums all rows in bf16, parts in fp32
    exact = train(Case(kind)).gradients
    assert distance(parts.gradients, exact) < 1.1 * distance(whole.gradients, exact)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_of_units_are_those_of_accumulation_bit_for_bit(kind, dtype):
    """Four parts of two rows, of equal numbers of tokens, added in the order of the loop. Embeddings are computed on
    the whole batch: theirs are equal but for the rounding of sums."""
    case = Case(kind, batch=8, dtype=dtype, reduce_dtype=torch.float32, padded=False)
    accumulated, parts = train(replace(case, accumulate=4)), train(replace(case, rows=2))
    by_rows = [name for name in parts.gradients if not any(each in name for each in ("embed", "wte", "wpe"))]
    assert any("norm" in name or "ln_f" in name for name in by_rows) and len(by_rows) > 2 * 7
    for name in by_rows:
        assert torch.equal(parts.gradients[name], accumulated.gradients[name]), name
    assert distance(parts.gradients, accumulated.gradients) < (FP32 if dtype == torch.float32 else BF16)


@pytest.mark.parametrize("placement", [None, "host", "nvme"])
def test_the_same_bits_at_every_placement_and_under_every_policy(placement):
    """With dropout, whose random numbers are those of the first forward again."""
    case = Case(rows=4, dropout=0.1, steps=2)
    expected = train(case)
    for policy in ("recompute", "host") + (("nvme",) if placement else ()):
        found = train(replace(case, placement=placement, policy=policy))
        assert found.losses == expected.losses
        assert all(torch.equal(found.gradients[n], g) for n, g in expected.gradients.items())
        if placement is not None:
            assert found.stats["spilled_bytes"] == (2 * 2 * 6 * 7 * 32 * 4 if policy != "recompute" else 0)
    whole = train(replace(case, rows=None))
    assert expected.losses != whole.losses  # dropout draws other numbers, as documented


@pytest.mark.parametrize("kind", MODELS)
def test_dropout_is_replayed(kind):
    """A gradient through other numbers than the forward's is not the loss's, whose central difference is taken."""
    model, _, optimizer = build(Case(kind, dropout=0.2, options={}))
    batch = batch_of(kind, 4)
    with offload_activations(model, policy="recompute", rows=2):

        def loss_of() -> Tensor:
            torch.manual_seed(5)
            return model(**batch).loss

        loss_of()  # compares the units, once
        loss_of().backward()
        name, parameter = max(
            ((n, p) for n, p in model.named_parameters() if "layers.0" in n or ".h.0." in n or "block.0" in n),
            key=lambda pair: zero_core.full_gradient(pair[1]).norm(),
        )
        gradient = zero_core.full_gradient(parameter).double()
        step = (gradient / gradient.norm()).float() * 1e-2
        losses = []
        for sign in (1, -2):
            with zero_core.gathered(model), torch.no_grad():
                parameter.add_(sign * step)
            losses.append(float(loss_of().detach()))
    slope = (losses[0] - losses[1]) / 2e-2
    assert slope == pytest.approx(float(gradient.norm()), rel=0.05), name
    optimizer.close()


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_two_ranks(ranks, stage):
    """The second rank has two rows more, and so one part more; of two rows, a rank has only one part."""
    case = Case(stage=stage, more_rows=2, batch=2 if stage % 2 else 4, steps=2)
    whole, parts = (ranks(2).run(train, replace(case, rows=rows)) for rows in (None, 2))
    for left, right in zip(parts, whole, strict=True):
        assert left.losses == pytest.approx(right.losses, rel=1e-5)
        assert distance(left.gradients, right.gradients) < FP32
        assert distance(left.parameters, right.parameters) < FP32


@pytest.mark.parametrize("kind", ["t5", "mixtral"])
def test_two_ranks_with_everything_on_nvme(ranks, kind):
    case = Case(kind, batch=4, placement="nvme", policy="nvme", dropout=0.1, rows=2)
    on_nvme, on_host = (ranks(2).run(train, replace(case, placement=where)) for where in ("nvme", "host"))
    for left, right in zip(on_nvme, on_host, strict=True):
        assert left.losses == right.losses
        assert all(torch.equal(left.gradients[n], g) for n, g in right.gradients.items())


def test_lora(ranks):
    pytest.importorskip("peft")
    whole, parts = (train(Case(rows=rows, lora=True, placement="nvme", steps=2)) for rows in (None, 4))
    assert parts.losses == pytest.approx(whole.losses, rel=1e-6)
    assert distance(parts.gradients, whole.gradients) < FP32
    assert distance(parts.parameters, whole.parameters) < FP32


def test_autocast_sums_the_parts_in_fp32():
    """The parts' gradients of fp32 parameters are those of accumulation under autocast, bit for bit in the blocks."""
    case = Case(batch=8, autocast=True, padded=False)
    accumulated, parts = train(replace(case, accumulate=4)), train(replace(case, rows=2))
    blocks = [name for name in parts.gradients if ".layers." in name]
    assert all(torch.equal(parts.gradients[n], accumulated.gradients[n]) for n in blocks)


# -- what it costs -------------------------------------------------------------------------------------------------


def count_calls(store: Any, name: str, calls: Counter[str]) -> None:
    method = getattr(store, name)

    def counted(unit: int, *args: Any) -> Any:
        calls[f"{name} {unit}"] += 1
        return method(unit, *args)

    setattr(store, name, counted)


def test_a_unit_is_read_twice_and_its_gradient_written_once_whatever_the_number_of_parts():
    """The bytes of three steps, and how often the store is asked for a unit and given a gradient."""

    def moved(rows: int | None, steps: int) -> tuple[int, int, Counter[str]]:
        model, store, optimizer = build(Case(placement="nvme", overlap=False))
        calls: Counter[str] = Counter()
        for name in ("parameters", "accept_gradient"):
            count_calls(store, name, calls)
        with offload_activations(model, store, "recompute", rows=rows):
            for step in range(steps):
                kit.step(optimizer, model(**batch_of("llama", 6, step)).loss)
        done = Counter(calls)
        with zero_core.gathered(model):  # every update is done
            found = store.stats()
        optimizer.close()
        return found["nvme_read_bytes"], found["nvme_write_bytes"], done

    whole = moved(None, 3)
    assert whole[0] > moved(None, 2)[0] > 0
    for parts in (moved(2, 3), moved(1, 3)):
        assert parts[:2] == whole[:2]
        for found in (parts[2], whole[2]):
            assert {calls for name, calls in found.items() if "gradient" in name} == {3}
        assert parts[2] == whole[2] or not CAN_SWAP  # units of their own memory are copied from the store once more


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


def test_a_model_without_parameters_has_nothing_to_cut():
    model = nn.Sequential(nn.ReLU())
    behind = zero_core.shard(model)
    with offload_activations(model, rows=2) as activations:
        assert activations.policies == {}
        assert torch.equal(model(torch.tensor([[-1.0, 2.0]])), torch.tensor([[0.0, 2.0]]))
    behind.close()


def test_no_more_than_rows_rows_of_a_unit_are_alive_at_once():
    model, _, optimizer = build(Case())
    alive: list[tuple[weakref.ref[Tensor], int]] = []
    most = widest = 0

    def note(module: nn.Module, args: Any, output: Tensor) -> None:
        nonlocal most, widest
        widest = max(widest, output.shape[0])
        alive.append((weakref.ref(output), output.shape[0]))
        most = max(most, sum(rows for ref, rows in alive if ref() is not None))

    offloaded = offload_activations(model, policy="recompute", rows=2)
    for layer in model.model.layers:
        layer.mlp.act_fn.register_forward_hook(note)
    model(**batch_of("llama", 6)).loss.backward()  # compares the units, which it would do again with hooks that are new
    alive.clear()
    most, widest = 0, 0
    model(**batch_of("llama", 6)).loss.backward()
    assert widest == 2
    assert len(alive) == 2 * 2 * 3  # layers, directions, parts
    assert most == 2
    offloaded.close()
    optimizer.close()


# -- logits ----------------------------------------------------------------------------------------------------------


def logits_of(rows: int | None, use: Callable[..., Tensor], kind: str = "llama", lora: bool = False) -> Any:
    """A loss that `use` makes of the model's output, and its gradients."""
    rank = dist.get_rank() if dist.is_initialized() else 0
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


@pytest.mark.parametrize("use", [soft_capped, smoothed, shifted_and_more, summed])
@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_whatever_is_done_with_logits_has_the_values_and_gradients_of_all_of_them(kind, use):
    (whole, expected), (loss, found) = (logits_of(rows, use, kind) for rows in (None, 4))
    assert loss == pytest.approx(whole, rel=1e-6)
    assert distance(found, expected) < FP32


@pytest.mark.parametrize("use", [soft_capped, shifted_and_more])
def test_two_ranks_of_which_one_has_a_single_part_use_all_logits(ranks, use):
    """The ranks gather the head in the same order, whatever is computed by rows."""
    whole, parts = (ranks(2).run(logits_of, rows, use) for rows in (None, 4))
    for (expected, gradients), (loss, found) in zip(whole, parts, strict=True):
        assert loss == pytest.approx(expected, rel=1e-6)
        assert distance(found, gradients) < FP32


def test_a_loss_of_logits_without_labels_trains_adapters_under_a_frozen_head():
    """Nothing that the model returns has a graph, and none of what encloses the head is trained."""
    pytest.importorskip("peft")

    def unlabelled(output: Any, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        given = {name: values for name, values in batch.items() if name != "labels"}
        return soft_capped(model(**given), model, batch)

    (whole, expected), (loss, found) = (logits_of(rows, unlabelled, lora=True) for rows in (None, 4))
    assert loss == pytest.approx(whole, rel=1e-6)
    assert distance(found, expected) < FP32


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
        read, unread = output.logits, model(**batch).logits
        optimizer.step()
        assert torch.allclose(read.detach(), expected, atol=1e-6)
        with pytest.raises(ActivationError, match="after a step or a write has changed the head"):
            unread.argmax(-1)
        optimizer.zero_grad()
        with pytest.raises(ActivationError, match="register_hook on logits"):
            model(**batch).logits.register_hook(print)
    optimizer.close()


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "t5", "whisper"])
def test_the_loss_of_a_model_never_has_more_than_rows_rows_of_logits(kind):
    model, _, optimizer = build(Case(kind))
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if isinstance(found, Tensor) and found.shape[-1:] == (64,) and found.dim() > 1 and found.shape[-2] != 32:
                largest = max(largest, found.numel() // 64)
            return found

    batch = batch_of(kind, 6)
    with offload_activations(model, policy="recompute", rows=2):
        kit.step(optimizer, model(**batch).loss)
        with Watch():
            model(**batch).loss.backward()
    assert largest <= 64, "the largest is the head's own weight, or its gradient: (vocabulary, width)"
    optimizer.close()


# -- whatever a unit is, and whoever asks for gradients --------------------------------------------------------------


class Block(nn.Module):
    """Adds to x what `kind` says. Every other block returns what the first one does, but for one thing."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.outer, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5)
        if kind == "batch norm":
            self.norm = nn.BatchNorm1d(16)
        if kind == "buffer":
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, bias: Any = None, **kwargs: Any) -> Any:
        y = self.outer(self.drop(torch.relu(self.inner(x))))
        if self.kind == "batch norm":
            y = self.norm(y.flatten(0, -2)).view_as(x)
        if self.kind == "contrast":
            y = y - y.mean(0)
        if self.kind == "capacity":  # at most six tokens, the first ones
            y = y * (torch.arange(y[..., 0].numel()) < 6).view(y.shape[:-1])[..., None]
        if self.kind == "noise":
            y = y + torch.rand_like(y) * self.training
        if self.kind == "buffer":
            self.seen += 1
        if isinstance(bias, Tensor):
            y = y + bias
        if self.kind == "record":
            return Record(x + y, {"twice": 2 * y}, x.new_ones(3))
        return (x + y, y.square().mean()) if self.kind == "loss" else x + y


@dataclass
class Record:
    hidden: Tensor
    more: dict[str, Tensor]
    shared: Tensor


class Toy(nn.Module):
    """Calls its one block, as `calls` says. parts: does by hand what `rows` does."""

    def __init__(self, kind: str = "plain", parts: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Block(kind)])
        self.scale = nn.Parameter(torch.rand(5, 16))
        self.parts = parts

    def forward(self, x: Tensor, calls: int = 1, **kwargs: Any) -> Tensor:
        x = self.stem(x)
        if self.layers[0].kind == "captured":
            kwargs["bias"] = self.scale[: x.shape[1]].sigmoid()
        for _ in range(calls):
            if self.parts is None:
                x = self.layers[0](x, **kwargs)
            else:
                given = [self.layers[0](piece, **kwargs) for piece in x.split(self.parts)[::-1]]
                x = torch.cat(given[::-1])
            if isinstance(x, Record):
                x = x.hidden + x.more["twice"] * x.shared[0]
            if isinstance(x, tuple):
                x = x[0]
        return x


def sharded(kind: str = "plain", **options: Any) -> tuple[Toy, Any, Any]:
    model = Toy(kind)
    store = TieredStore("host", "host", "host", step=TorchStep(), tile_numel=1 << 20)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store)
    return model, optimizer, offload_activations(model, store, "recompute", **options)


def toy_batch(rows: int = 8, tokens: int = 5) -> Tensor:
    return torch.randn(rows, tokens, 16, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kind", ["plain", "captured"])
@pytest.mark.parametrize("calls", [1, 2])
def test_dropout_a_shared_bias_and_a_unit_that_is_called_twice_give_the_bits_of_parts_by_hand(kind, calls):
    plain = Toy(kind, parts=2)
    torch.manual_seed(3)
    plain(toy_batch(), calls).square().mean().backward()
    model, optimizer, _ = sharded(kind, rows=2)
    torch.manual_seed(3)
    loss = model(toy_batch(), calls).square().mean()
    loss.backward()
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        if p.grad is not None:
            assert torch.equal(zero_core.full_gradient(q), p.grad), name
    optimizer.close()


def test_hooks_on_parameters_see_one_gradient_and_torch_autograd_grad_gets_it():
    model, optimizer, _ = sharded(rows=2)
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
    model, optimizer, _ = sharded("record", rows=3)
    model.eval()
    model.layers[0].inner.weight.requires_grad_(False)
    model(toy_batch()).square().mean().backward()
    found = {n: zero_core.full_gradient(p) for n, p in model.named_parameters() if p.requires_grad and n != "scale"}
    assert distance(found, {name: p.grad for name, p in plain.named_parameters() if name in found}) < FP32
    optimizer.close()


def test_sums_of_16_bit_gradients_of_a_bias_that_rows_share_are_in_fp32():
    """bf16 would lose what small parts add to a large sum."""

    def gradient(rows: int | None) -> Tensor:
        model, _, offloaded = sharded(rows=rows)
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
    model, optimizer, offloaded = sharded(rows=2)
    sizes = []
    model.layers[0].inner.register_forward_hook(lambda module, args, output: sizes.append(len(output)))
    with torch.no_grad():
        model(toy_batch())
    assert sizes == [8]
    optimizer.close()


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("batch norm", "unit layers.0 contains norm, a BatchNorm1d"),
        ("contrast", "unit layers.0 mixes the rows of a batch: 4 rows at once and 2 at a time"),
        ("capacity", "unit layers.0 mixes the rows of a batch"),
        ("buffer", "unit layers.0 writes into its buffer seen in forward"),
        ("loss", r"unit layers.0 returns an output of shape \(\)"),
    ],
)
def test_a_unit_whose_rows_depend_on_each_other_is_refused(kind, message):
    model, optimizer, _ = sharded(kind, rows=2)
    with pytest.raises(ActivationError, match=message):
        model(toy_batch())
    optimizer.close()


class Hidden(nn.Module):
    """Mixes the rows of a batch where values do not show it: by a gate of zero, or in gradients alone."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.inner, self.gate, self.kind = nn.Linear(16, 16), nn.Parameter(torch.zeros(())), kind

    def forward(self, x: Tensor) -> Tensor:
        if self.kind == "gate":
            return self.inner(x) + self.gate * (x - x.mean(0, keepdim=True))
        return Adds.apply(self.inner(x), x.mean(0).square().sum())


class Adds(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0].new_ones(())


@pytest.mark.parametrize(
    ("kind", "message"), [("gate", "NaN in one row reaches others"), ("loss", "gradients added in backward differ")]
)
def test_a_unit_that_mixes_rows_without_a_trace_in_values_is_refused(kind, message):
    model = Toy()
    model.layers = nn.ModuleList([Hidden(kind)])
    model.forward = lambda x: model.layers[0](x)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with offload_activations(model, policy="recompute", rows=2), pytest.raises(ActivationError, match=message):
        model(toy_batch())
    optimizer.close()


def test_each_block_is_compared_also_where_one_of_its_class_has_passed():
    """Fails if blocks are taken to be alike because their classes are: the second has another setting."""
    model = Toy()
    model.layers.append(Block("contrast"))
    model.forward = lambda x: model.layers[1](model.layers[0](model.stem(x)))
    store = TieredStore("host", "host", "host", step=TorchStep(), tile_numel=1 << 20)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store)
    offload_activations(model, store, "recompute", rows=2)
    with pytest.raises(ActivationError, match="unit layers.1 mixes the rows of a batch"):
        model(toy_batch())
    optimizer.close()


class CountingNorm(nn.Module):
    """Counts its calls in a buffer, and refuses half of the batch after that."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x.view(8, -1).view_as(x) / self.calls


class RunningNorm(nn.Module):
    """Replaces its buffer by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("size", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.size = self.size * 0.5 + x.detach().abs().mean()
        return x / self.size


class CentredNorm(nn.Module):
    """Mixes the rows of a batch, which its class does not tell."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@pytest.mark.parametrize(
    ("kind", "given", "seen"),
    [
        (nn.LayerNorm, (16,), {2}),
        (CentredNorm, (), {8}),
        (CountingNorm, (), {8}),
        (RunningNorm, (), {8}),
        (nn.BatchNorm1d, (5,), {8}),
    ],
)
def test_a_norm_between_blocks_and_head_computes_by_rows_if_it_can_and_else_all(kind, given, seen):
    """It is in no unit but the model's own, and has no policy by which it could be told to keep."""
    sizes, gradients = [], []

    class Norm(kind):
        def forward(self, x: Tensor) -> Tensor:
            sizes.append(len(x))
            return super().forward(x)

    for rows in (None, 2):
        model = Toy()
        model.norm, model.layers[0].drop.p = Norm(*given), 0.0
        model.forward = lambda x, model=model: model.norm(model.layers[0](model.stem(x)))
        optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        with offload_activations(model, policy="recompute", rows=rows):
            model(toy_batch())  # what computes by rows is compared with its halves
            sizes.clear()
            model(toy_batch()).pow(3).sum().backward()
        gradients.append({name: zero_core.full_gradient(p) for name, p in model.named_parameters() if name != "scale"})
        optimizer.close()
    assert {*sizes} == seen
    assert len(sizes) == (1 if seen == {8} else 2 * 4)  # what computes the whole batch is not recomputed
    assert distance(gradients[1], gradients[0]) < 1e-4  # the mean's gradient nearly cancels


def test_a_unit_that_draws_random_numbers_is_compared_in_eval_mode():
    model, optimizer, _ = sharded("noise", rows=2)
    model(toy_batch()).sum().backward()
    assert model.layers[0].training
    assert model.layers[0].drop.training
    optimizer.close()


@dataclass
class Bag:
    bias: Tensor


class Opaque:
    def __init__(self, bias: Tensor) -> None:
        self.bias = bias


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"bias": Opaque(torch.ones(8, 5, 16))}, "is given bias of class Opaque, which holds tensors of 8 rows"),
        (
            {"cu_seqlens": torch.tensor([0, 3, 5])},
            "packed over 8 rows .it is given cu_seqlens of shape .3,.., and rows=2 would cut them",
        ),
        ({"past_key_values": object()}, "use_cache=False"),
        ({"bias": torch.ones(3, 5, 16)}, "fails on 4 of its 8 rows"),
    ],
)
def test_arguments_that_cannot_be_cut_are_refused(given, message):
    model, optimizer, _ = sharded(rows=2)
    with pytest.raises(ActivationError, match=message):
        model(toy_batch(), **given)
    optimizer.close()


def test_where_the_batch_is_as_long_as_the_sequence_the_user_says_what_is_shared():
    bias = torch.randn(5, 16)
    plain = Toy().eval()
    expected = plain(toy_batch(5), bias=bias)
    model, optimizer, offloaded = sharded(rows=2)
    with pytest.raises(ActivationError, match=r"for bias a first dimension of 5 may be .*shared=\[...\]"):
        model.eval()(toy_batch(5), bias=bias)
    offloaded.close()
    with offload_activations(model, policy="recompute", rows=2, shared=["bias"]):
        assert torch.allclose(model(toy_batch(5), bias=bias), expected, atol=1e-6)
    optimizer.close()


@pytest.mark.parametrize("rows", [0, -1, 2.0, True])
def test_a_number_of_rows_that_is_none_is_refused(rows):
    model, store, optimizer = build(Case())
    with pytest.raises(ActivationError, match="rows="):
        offload_activations(model, store, "recompute", rows=rows)
    optimizer.close()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_cache": True}, "use_cache=False"),
        ({"output_attentions": True}, "output_attentions=True with rows=.*an entry for each part"),
        ({"output_router_logits": True}, "output_router_logits=True with rows="),
    ],
)
@pytest.mark.parametrize("kind", ["mixtral", "gpt2"])
def test_the_cache_and_what_transformers_records_inside_of_blocks_are_refused(kind, given, message):
    model, store, optimizer = build(Case(kind))
    with offload_activations(model, store, "recompute", rows=2), pytest.raises(ActivationError, match=message):
        model(**batch_of(kind, 4), **given)
    optimizer.close()


def test_units_inside_of_a_unit_are_refused():
    model = Toy("batch norm")
    zero_core.tile_linear(model, 300)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(ActivationError, match=r"unit layers.0 contains the unit layers.0.inner.*tile_linear"):
        offload_activations(model, None, {"layers.0": "recompute"}, rows=2)
    optimizer.close()
