"""Parameters that are more than one tensor, or whose memory other tensors show, as in quantised models.

The classes do what bitsandbytes' and torchao's do. Fails if a forward reads another memory than the unit's.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_core import toys
from zero_core.errors import ChangedParameterError, ShardedParameterError, StoreError, ZeroError

pytestmark = pytest.mark.promise("parts")
KINDS = pytest.mark.parametrize("kind", ["wrapper", "packed"])


WIDTH = 24


class Scaled(Tensor):
    """A wrapper subclass: int8 times one scale a row. Its inner tensors know the memory, it does not."""

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor) -> Scaled:
        made: Any = Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)
        made.codes, made.scale = codes, scale
        return made

    @classmethod
    def of(cls, weight: Tensor) -> nn.Parameter:
        scale = weight.detach().abs().amax(1, keepdim=True) / 127
        return nn.Parameter(cls((weight.detach() / scale).round().to(torch.int8), scale), requires_grad=False)

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: None, size: Any, stride: Any) -> Scaled:
        return cls(inner["codes"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is nn.functional.linear:
            x, weight, bias = args
            return nn.functional.linear(x, weight.codes.to(x.dtype) * weight.scale, bias)
        return super().__torch_function__(func, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            into, values = args
            into.codes.copy_(values.codes), into.scale.copy_(values.scale)
            return into
        return cls(*(getattr(args[0], name).detach() for name in ("codes", "scale")))  # detach, clone, ...


class Packed(nn.Parameter):
    """A weight whose module computes with another tensor over its memory, and with a scale beside it."""

    SCB: Any = None


class PackedLinear(nn.Linear):
    def __init__(self) -> None:
        super().__init__(WIDTH, WIDTH)
        packed = Scaled.of(self.weight)
        self.weight: Any = Packed(packed.codes, requires_grad=False)
        self.weight.SCB = packed.scale
        self.state = SimpleNamespace(CB=self.weight.data)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self.state.CB.to(x.dtype) * self.weight.SCB, self.bias)
        self.weight.data = self.state.CB
        return y


class Adapted(nn.Module):
    """A quantised linear with an adapter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.base: nn.Module = PackedLinear() if kind == "packed" else nn.Linear(WIDTH, WIDTH)
        if kind == "wrapper":
            self.base.weight = Scaled.of(self.base.weight)
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


def build(kind: str) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList(Adapted(kind) for _ in range(2)))
    model.forward = lambda x: model[1][1](model[1][0](model[0](x)))
    return model


def run(model: nn.Module, optimizer: Any) -> list[Tensor]:
    """Outputs and gradients of the input in three steps, all ranks on the same batch."""
    found = []
    for step in range(3):
        x = torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH).roll(step).requires_grad_()
        y = model(x)
        y.square().sum().backward()
        found += [y.detach(), x.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(kit.trained(model), lr=0.1)


def shard(model: nn.Module, **options: Any) -> Any:
    return zero_core.shard(model, sgd(model), **options)


def inner(values: Tensor) -> list[Tensor]:
    return [values.codes, values.scale] if isinstance(values, Scaled) else [values.as_subclass(Tensor)]


def parts(model: nn.Module) -> dict[str, Tensor]:
    return {f"{n}.{k}": part for n, values in model.state_dict().items() for k, part in enumerate(inner(values))}


def same_outputs(model: nn.Module, dense: nn.Module) -> None:
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, WIDTH)), dense(torch.ones(2, WIDTH)))


@pytest.mark.promise("second-stage")
@KINDS
@kit.on_ranks(1, 2)
def test_a_second_stage_and_a_plain_model_have_the_same_parts(size: int, kind: str) -> None:
    """All adapters, then one; a shard() before each of them fails. Then a plain model."""
    dense, model = build(kind), build(kind)
    for second in (False, True):
        for each in (dense, model) if second else ():
            each[1][0].adapter.requires_grad_(False)
        if size == 1:
            with pytest.raises(StoreError if second else toys.Refused):
                shard(model, store=toys.Refusing())
            same_outputs(model, dense)
        kit.assert_bits(run(model, shard(model)), run(dense, sgd(dense)))
    zero_core.unshard(model)
    same_outputs(model, dense)
    kit.assert_bits(parts(model), parts(dense))


@pytest.mark.promise("removed-parameter")
@KINDS
def test_the_parts_of_a_weight_that_was_removed_are_not_usable(kind: str) -> None:
    model = build(kind)
    shard(model)
    base: Any = model[1][1].base
    model[1][1].base = nn.Linear(WIDTH, WIDTH)
    shard(model)
    for use in (lambda: base.weight + 0, lambda: base.weight.detach(), lambda: base(torch.ones(2, WIDTH))):
        with pytest.raises(ShardedParameterError, match="the values of .* were lost"):
            use()
    if kind == "packed":
        with pytest.raises(ShardedParameterError, match="the values of .* were lost"):
            base.weight.SCB.sum()


def test_parts_are_shards_of_their_own_dtype() -> None:
    """Fails if a scale is cast to the dtype that the model is computed in, or stays in memory."""
    for kind, names in (("wrapper", ("codes", "scale")), ("packed", ("", "SCB"))):
        model = build(kind)
        shard(model, param_dtype=torch.bfloat16)
        dtypes = {slot.name: unit.dtype for unit in zero_core.units(model) for slot in unit.layout.slots}
        weight = "1.0.base.weight"
        assert [dtypes[f"{weight}.{name}".rstrip(".")] for name in names] == [torch.int8, torch.float32]
        assert dtypes["1.0.base.bias"] == torch.bfloat16


def test_values_are_written_with_copy_and_load_state_dict() -> None:
    model, other = build("wrapper"), build("wrapper")
    other[1][0].base.weight.scale.mul_(2)
    shard(model)
    weight: Any = model[1][0].base.weight
    with pytest.raises(
        AttributeError, match="the inner tensors of .* have no memory here: use `with zero_core.gathered"
    ):
        weight.__tensor_flatten__()
    with zero_core.gathered(model):
        assert weight.__tensor_flatten__()[0] == ["codes", "scale"]
    model.load_state_dict(other.state_dict())
    same_outputs(model, other)
    with pytest.raises(ShardedParameterError, match="would be lost. Read with p.detach"):
        model[1][0].base.weight.data.copy_(other[1][0].base.weight)
    with zero_core.gathered(model):
        model[1][1].base.weight.copy_(build("wrapper")[1][0].base.weight)
    other[1][1].base.weight.copy_(build("wrapper")[1][0].base.weight)
    same_outputs(model, other)
    with pytest.raises(ChangedParameterError, match="write values with p.copy_"):
        model[1][0].base.weight.data = other[1][0].base.weight.data
    with zero_core.gathered(model):  # as model.to(dtype) replaces them
        model[1][0].base.weight.codes = torch.zeros(WIDTH, WIDTH, dtype=torch.int8)
    with pytest.raises(ChangedParameterError, match=r"1.0.base.weight has been .*: move, cast and quantise the model"):
        model(torch.ones(2, WIDTH))


def convert(base: Any) -> None:
    base.weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)


def freeze(base: Any) -> None:
    base.weight.requires_grad_(False)


ASKS = r"Scaled, requires a gradient.*: call requires_grad_\(False\) on it, or convert it to a plain parameter"
REFUSED: list[tuple[str, Any, type[ZeroError], str, Any]] = [
    ("packed", lambda base: setattr(base.state, "other", base.weight.data.view(torch.uint8)),
     ShardedParameterError, r"1.0.base.state.other' .* memory with 1.0.base.weight", None),
    ("wrapper", lambda base: setattr(base.weight, "codes", Scaled.of(torch.ones(WIDTH, WIDTH)).data),
     ShardedParameterError,
     "codes', a Scaled, .* tensor 'codes' inside .* Replace .* by a plain nn.Parameter", convert),
    ("wrapper", lambda base: base.weight.requires_grad_(True), ShardedParameterError, ASKS, convert),
    ("wrapper", lambda base: base.weight.requires_grad_(True), ShardedParameterError, ASKS, freeze),
    ("packed", lambda base: setattr(base.weight, "bnb_quantized", False),
     ZeroError, "1.0.base.weight, of class Packed, is not quantised yet", None),
    ("packed", lambda base: setattr(base.weight, "quant_state", SimpleNamespace(packing_format_for_cpu=True)),
     ZeroError, "was repacked by bitsandbytes.*: load the model again", None),
]  # fmt: skip


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    """And taken after what the error says."""
    for kind, change, error, told, mend in REFUSED:
        model = build(kind)
        change(model[1][0].base)
        with pytest.raises(error, match=told):
            shard(model)
        if mend is not None:
            mend(model[1][0].base)
            run(model, shard(model))


@pytest.mark.advice("Before the forward, set support_avx512bf16_for_cpu")
@pytest.mark.promise("quantised")
def test_a_linear_that_would_be_repacked_in_eval_mode_is_refused() -> None:
    """Fails if the forward runs: bitsandbytes would then have rounded the scales for good."""
    model = build("packed")
    base: Any = model[1][0].base
    base.weight.quant_state, base.support_avx512bf16_for_cpu = SimpleNamespace(absmax=torch.ones(3)), True
    shard(model)
    model(torch.ones(2, WIDTH))
    model.eval()
    with torch.no_grad(), pytest.raises(ChangedParameterError, match="support_avx512bf16_for_cpu = False"):
        model(torch.ones(2, WIDTH))
    base.support_avx512bf16_for_cpu = False
    same_outputs(model, build("packed"))
