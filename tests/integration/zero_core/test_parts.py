"""Parameters that are more than one tensor, or whose memory other tensors show, as in quantised models.

The classes below do in a few lines what bitsandbytes' and torchao's do. Each test fails if a forward reads another
memory than the unit's: with a wrong output, or, as most such reads are of no bytes at all, by ending the process.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
from tests.integration.zero_core import toys
from zero_core.errors import ChangedParameterError, ShardedParameterError, StoreError, ZeroError

pytestmark = pytest.mark.promise("parts")

SIZES = pytest.mark.parametrize("size", [1, 2])
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
            self.base.weight = Scaled.of(self.base.weight)  # type: ignore[assignment]
        self.base.requires_grad_(False)
        self.adapter = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + self.adapter(x))


def build(kind: str) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ModuleList(Adapted(kind) for _ in range(2)))
    model.forward = lambda x: model[1][1](model[1][0](model[0](x)))  # type: ignore[method-assign,index]
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


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def inner(values: Tensor) -> list[Tensor]:
    return [values.codes, values.scale] if isinstance(values, Scaled) else [values.as_subclass(Tensor)]


def check_run(kind: str, stage: int, folder: str) -> None:
    dense = build(kind)
    expected = run(dense, torch.optim.SGD(trained(dense), lr=0.1))
    model = build(kind)
    optimizer = zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1), stage=stage)
    held = sum(unit.flat.untyped_storage().nbytes() for unit in zero_core.units(model))
    assert held == 0
    for ours, theirs in zip(run(model, optimizer), expected, strict=True):
        assert torch.equal(ours, theirs)
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, WIDTH)), dense(torch.ones(2, WIDTH)))
    used = model[1][0].base(torch.ones(2, WIDTH))  # type: ignore[index]  # outside its unit: gathers
    assert torch.equal(used, dense[1][0].base(torch.ones(2, WIDTH)))  # type: ignore[index]
    state = model.to("cpu").state_dict()
    for name, values in dense.state_dict().items():
        for ours, theirs in zip(inner(state[name]), inner(values), strict=True):
            assert torch.equal(ours, theirs), name
    zero_core.checkpoint.save(folder, model)
    other = build(kind)
    for parameter in other.parameters():
        for part in inner(parameter):
            part.data.zero_()
    zero_core.shard(other, torch.optim.SGD(trained(other), lr=0.1))
    zero_core.checkpoint.load(folder, other)
    x = torch.ones(2, WIDTH)
    assert torch.equal(other(x), model(x)) and other(x).abs().sum() > 0


@SIZES
@pytest.mark.parametrize("kind", ["wrapper", "packed"])
def test_a_parameter_of_several_parts_gives_the_same_bits(ranks, tmp_path, size: int, kind: str) -> None:
    ranks(size).run(check_run, kind, 3 if size == 2 else 2, str(tmp_path))


def check_stages(kind: str) -> None:
    """All adapters, then one; a shard() between them fails. Then a plain model."""
    dense, model = build(kind), build(kind)
    for frozen in (None, 0):
        for each in (dense, model):
            if frozen is not None:
                each[1][frozen].adapter.requires_grad_(False)  # type: ignore[index]
        expected = run(dense, torch.optim.SGD(trained(dense), lr=0.1))
        if frozen is not None and not torch.distributed.is_initialized():
            with pytest.raises(StoreError, match="the model is in its earlier shards, with all values"):
                zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1), store=toys.Refusing())
        for ours, theirs in zip(
            run(model, zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1))), expected, strict=True
        ):
            assert torch.equal(ours, theirs)
    zero_core.unshard(model)
    assert torch.equal(model(torch.ones(2, WIDTH)), dense(torch.ones(2, WIDTH)))
    for name, values in dense.state_dict().items():
        for ours, theirs in zip(inner(model.state_dict()[name]), inner(values), strict=True):
            assert torch.equal(ours, theirs), name


@pytest.mark.promise("second-stage")
@SIZES
@pytest.mark.parametrize("kind", ["wrapper", "packed"])
def test_a_second_stage_and_a_plain_model_have_the_same_parts(ranks, size: int, kind: str) -> None:
    ranks(size).run(check_stages, kind)


@pytest.mark.promise("removed-parameter")
@pytest.mark.parametrize("kind", ["wrapper", "packed"])
def test_the_parts_of_a_weight_that_was_removed_are_not_usable(kind: str) -> None:
    model = build(kind)
    zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1))
    base: Any = model[1][1].base  # type: ignore[index]
    model[1][1].base = nn.Linear(WIDTH, WIDTH)  # type: ignore[index]
    zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1))
    for use in (lambda: base.weight + 0, lambda: base.weight.detach(), lambda: base(torch.ones(2, WIDTH))):
        with pytest.raises(ShardedParameterError, match="has no values any more"):
            use()
    if kind == "packed":
        with pytest.raises(ShardedParameterError, match="has no values any more"):
            base.weight.SCB.sum()


def test_parts_are_shards_of_their_own_dtype() -> None:
    """Fails if a scale is cast to the dtype that the model is computed in, or stays in memory."""
    for kind, names in (("wrapper", ("codes", "scale")), ("packed", ("", "SCB"))):
        model = build(kind)
        zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1), param_dtype=torch.bfloat16)
        dtypes = {slot.name: unit.dtype for unit in zero_core.units(model) for slot in unit.layout.slots}
        weight = "1.0.base.weight"
        assert [dtypes[f"{weight}.{name}".rstrip(".")] for name in names] == [torch.int8, torch.float32]
        assert dtypes["1.0.base.bias"] == torch.bfloat16


def test_values_are_written_with_copy_and_load_state_dict() -> None:
    model, other = build("wrapper"), build("wrapper")
    other[1][0].base.weight.scale.mul_(2)  # type: ignore[index]
    zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1))
    weight: Any = model[1][0].base.weight  # type: ignore[index]
    with pytest.raises(AttributeError, match="the inner tensors of .* have no memory: use zero_core.gathered"):
        weight.__tensor_flatten__()
    with zero_core.gathered(model):
        assert weight.__tensor_flatten__()[0] == ["codes", "scale"]
    model.load_state_dict(other.state_dict())
    assert torch.equal(model(torch.ones(2, WIDTH)), other(torch.ones(2, WIDTH)))
    with pytest.raises(ShardedParameterError, match="would be lost. Read with p.detach"):
        model[1][0].base.weight.data.copy_(other[1][0].base.weight)  # type: ignore[index]
    with zero_core.gathered(model):
        model[1][1].base.weight.copy_(build("wrapper")[1][0].base.weight)  # type: ignore[index]
    other[1][1].base.weight.copy_(build("wrapper")[1][0].base.weight)  # type: ignore[index]
    assert torch.equal(model(torch.ones(2, WIDTH)), other(torch.ones(2, WIDTH)))
    with pytest.raises(ChangedParameterError, match="write values with copy_"):
        model[1][0].base.weight.data = other[1][0].base.weight.data  # type: ignore[index]


def test_other_values_under_a_sharded_wrapper_are_refused() -> None:
    """`model.to(dtype)` replaces a wrapper's inner tensors; the shards would silently be no longer the model's."""
    model = build("wrapper")
    zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1))
    with zero_core.gathered(model):
        model[1][0].base.weight.codes = torch.zeros(WIDTH, WIDTH, dtype=torch.int8)  # type: ignore[index]
    with pytest.raises(ChangedParameterError, match=r"1.0.base.weight has been .*: move, cast and quantise the model"):
        model(torch.ones(2, WIDTH))


@pytest.mark.parametrize("kind", ["wrapper", "packed"])
def test_a_model_that_could_not_be_sharded_is_as_it_was(kind: str) -> None:
    dense, model = build(kind), build(kind)
    with pytest.raises(toys.Refused):
        zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1), store=toys.Refusing())
    assert torch.equal(model(torch.ones(2, WIDTH)), dense(torch.ones(2, WIDTH)))
    if kind == "packed":
        assert model[1][0].base.state.CB.data_ptr() == model[1][0].base.weight.data_ptr()  # type: ignore[index]
    zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1))
    assert torch.equal(model(torch.ones(2, WIDTH)), dense(torch.ones(2, WIDTH)))


def refused(change: Any, error: type[ZeroError], match: str, kind: str = "wrapper", mend: Any = None) -> None:
    """Sharding refuses what `change` made of a layer, and takes it after `mend`."""
    model = build(kind)
    change(model[1][0].base)  # type: ignore[index]
    with pytest.raises(error, match=match):
        zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1))
    if mend is not None:
        mend(model[1][0].base)  # type: ignore[index]
        run(model, zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1)))


def converted(base: Any) -> None:
    base.weight = nn.Parameter(torch.ones(WIDTH, WIDTH), requires_grad=False)


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    def unsigned(base: Any) -> None:
        base.state.other = base.weight.data.view(torch.uint8)

    refused(unsigned, ShardedParameterError, r"1.0.base.state.other .* memory of 1.0.base.weight", "packed")

    def nested(base: Any) -> None:
        base.weight.codes = Scaled.of(torch.ones(WIDTH, WIDTH)).data

    told = "weight.codes is a Scaled whose inner codes is not a plain.*: convert it to a plain parameter before"
    refused(nested, ShardedParameterError, told, mend=converted)

    def asks(base: Any) -> None:
        base.weight.requires_grad_(True)

    told = r"Scaled that requires a gradient.*: call requires_grad_\(False\) on it, or convert it to a plain parameter"
    for mend in (converted, lambda base: base.weight.requires_grad_(False)):
        refused(asks, ShardedParameterError, told, mend=mend)

    def unquantised(base: Any) -> None:
        base.weight.bnb_quantized = False

    refused(unquantised, ZeroError, "1.0.base.weight is a Packed that is not quantised yet", "packed")

    def repacked(base: Any) -> None:
        base.weight.quant_state = SimpleNamespace(packing_format_for_cpu=True)

    refused(repacked, ZeroError, "was repacked by bitsandbytes.*: shard a model that was not evaluated", "packed")


@pytest.mark.advice("Before the forward, set support_avx512bf16_for_cpu")
@pytest.mark.promise("quantised")
def test_a_linear_that_would_be_repacked_in_eval_mode_is_refused() -> None:
    """Fails if the forward runs: bitsandbytes would then have rounded the scales for good."""
    model = build("packed")
    base: Any = model[1][0].base  # type: ignore[index]
    base.weight.quant_state, base.support_avx512bf16_for_cpu = SimpleNamespace(absmax=torch.ones(3)), True
    zero_core.shard(model, torch.optim.SGD(trained(model), lr=0.1))
    model(torch.ones(2, WIDTH))
    model.eval()
    with torch.no_grad(), pytest.raises(ChangedParameterError, match="support_avx512bf16_for_cpu = False"):
        model(torch.ones(2, WIDTH))
    base.support_avx512bf16_for_cpu = False
    with torch.no_grad():
        assert torch.equal(model(torch.ones(2, WIDTH)), build("packed")(torch.ones(2, WIDTH)))
