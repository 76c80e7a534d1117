"""Quantises weights to bitsandbytes' 4 bits as they are read: linears at once, stacks of experts in `shard`.

Owns the tensor class of a quantised stack of experts, and the source of its bytes. bitsandbytes quantises the values.
zero-core cuts a stack into groups, and chooses the bytes that a rank reads.

[Note: experts in 4 bits]
bitsandbytes quantises the weights of linear layers, and leaves experts that are stacked in one parameter as they are.
Here such a parameter keeps its name and shape, and consists of two parts: packed bytes, and a scale for each 64 values.
Blocks of 64 values are independent, and an expert consists of whole blocks. So the bytes of consecutive experts are one
range of the stack's bytes, and dequantise to the same bits as in the whole stack. Every operation on a `FourBit`
dequantises its operands and frees them. Autograd keeps the bytes, which are dequantised once more in backward.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map, tree_map_only
from transformers import PreTrainedModel
from transformers.quantizers import AutoHfQuantizer
from transformers.quantizers.quantizers_utils import should_convert_module

from zero_core.model.deferred_init import continue_recording, recording_of
from zero_core.model.init_replay import Source
from zero_core.model.initial_values import become
from zero_core.moe.expert_groups import find_stacks

from .config import ConfigError

BLOCK = 64
"""Values that share a scale."""

_TILE_NUMEL = 1 << 20  # values quantised at a time, a multiple of BLOCK: bitsandbytes needs some 16 bytes of each


class FourBit(Tensor):
    """A frozen tensor of floats, each in 4 bits: see [Note: experts in 4 bits].

    packed: (rows, bytes), uint8, two values a byte. absmax: (rows, blocks), fp32. A row is an expert. kind: "nf4" or
    "fp4". The tensor shows `size`, `stride` and `offset` of the values of these rows: views of it share the bytes.
    """

    packed: Tensor
    absmax: Tensor
    quant_type: str
    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(
        cls,
        packed: Tensor,
        absmax: Tensor,
        kind: str,
        dtype: torch.dtype,
        size: Sequence[int],
        stride: Sequence[int] | None = None,
        offset: int = 0,
    ) -> FourBit:
        strides = stride if stride is not None else torch.empty(size, device="meta").stride()
        device = "cpu" if packed.is_meta else packed.device  # values that shard() reads from files are to be somewhere
        make: Any = Tensor._make_wrapper_subclass
        made: Any = make(cls, size, strides=strides, storage_offset=offset, dtype=dtype, device=device)
        made.packed, made.absmax, made.quant_type = packed, absmax, kind
        return made

    @classmethod
    def empty(cls, size: Sequence[int], dtype: torch.dtype, kind: str = "nf4") -> FourBit:
        """Returns a tensor of this size, without memory."""
        width = math.prod(size[1:])
        packed = torch.empty(size[0], width // 2, dtype=torch.uint8, device="meta")
        return cls(packed, torch.empty(size[0], width // BLOCK, dtype=torch.float32, device="meta"), kind, dtype, size)

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        found = self.packed.device
        return torch.device("cpu") if found.type == "meta" else found

    def __tensor_flatten__(self) -> tuple[list[str], tuple[str, torch.dtype, int]]:
        return ["packed", "absmax"], (self.quant_type, self.dtype, int(self.storage_offset()))

    @classmethod
    def __tensor_unflatten__(
        cls, inner: Mapping[str, Tensor], context: tuple[str, torch.dtype, int], size: Any, stride: Any
    ) -> FourBit:
        kind, dtype, offset = context
        return cls(inner["packed"], inner["absmax"], kind, dtype, size, stride, offset)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FourBit({self.quant_type}, {tuple(self.shape)}, {self.dtype})"

    def dequantised(self) -> Tensor:
        """The values, in memory of their own."""
        from bitsandbytes.functional import QuantState, dequantize_4bit

        shape = torch.Size((self.packed.shape[0], 2 * self.packed.shape[1]))
        state = QuantState(self.absmax.reshape(-1), shape, None, BLOCK, self.quant_type, self.dtype)
        values = dequantize_4bit(self.packed.reshape(-1, 1), state)
        return values.view(-1).as_strided(self.size(), self.stride(), self.storage_offset())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _MOVES and isinstance(first, FourBit):
            return first._moved(func, args[1:], kwargs)
        if func is torch.ops.aten.index.Tensor and isinstance(first, FourBit) and first._is_whole(args[1]):
            return first._rows(args[1][0])
        if func.is_view and isinstance(first, FourBit):
            return first._viewed(func, args[1:], kwargs)
        written = [a for a, of in zip(args, func._schema.arguments, strict=False) if of.alias_info and of.is_write]
        if any(isinstance(each, FourBit) for each in tree_flatten((written, kwargs.get("out")))[0]):
            raise RuntimeError(f"{func}: a weight in 4 bits is frozen, and nothing can be written into it")
        return func(*tree_map_only(FourBit, cls.dequantised, args), **tree_map_only(FourBit, cls.dequantised, kwargs))

    def _moved(self, func: Any, args: Any, kwargs: dict[str, Any]) -> FourBit:
        """Cloned, or on another device or in another dtype of the values."""
        dtype = kwargs.pop("dtype", None) or self.dtype
        kwargs.pop("memory_format", None)
        packed, absmax = (func(part, *args, **kwargs) for part in (self.packed, self.absmax))
        return FourBit(packed, absmax, self.quant_type, dtype, self.size(), self.stride(), int(self.storage_offset()))

    def _is_whole(self, indices: Sequence[Tensor | None]) -> bool:
        """Whether these indices choose experts of a whole stack."""
        chosen = indices[0] if len(indices) == 1 else None
        whole = self.is_contiguous() and self.storage_offset() == 0 and self.shape[0] == self.packed.shape[0]
        return chosen is not None and chosen.dtype in (torch.int32, torch.int64) and whole

    def _rows(self, chosen: Tensor) -> FourBit:
        packed, absmax = (part[chosen].reshape(-1, part.shape[1]) for part in (self.packed, self.absmax))
        return FourBit(packed, absmax, self.quant_type, self.dtype, (*chosen.shape, *self.shape[1:]))

    def _viewed(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Applies a view operation to size, stride and offset, and keeps the rows of bytes that the view covers."""
        width = 2 * self.packed.shape[1]
        values = torch.empty(self.packed.shape[0] * width, device="meta")
        shown = func(values.as_strided(self.size(), self.stride(), self.storage_offset()), *args, **kwargs)

        def over(view: Tensor) -> FourBit:
            offset = int(view.storage_offset())
            first = min(offset // width, self.packed.shape[0] - 1)
            last = offset + sum((n - 1) * s for n, s in zip(view.shape, view.stride(), strict=True) if n)
            packed, absmax = (part[first : last // width + 1] for part in (self.packed, self.absmax))
            size, stride = view.shape, view.stride()
            return FourBit(packed, absmax, self.quant_type, self.dtype, size, stride, offset - first * width)

        return tree_map(over, shown)


_MOVES = (torch.ops.aten.clone.default, torch.ops.aten._to_copy.default)


@dataclass
class _Blocks:
    """A parameter's values, quantised as they are read. `absmax` right after `packed` of the same blocks reads none."""

    values: Source
    dtype: torch.dtype  # that they are quantised from
    kind: str
    _scales: tuple[int, Tensor] = field(default_factory=lambda: (0, torch.empty(0)))  # of the last bytes: first block

    def packed(self, first: int, last: int) -> Tensor:
        """The bytes of blocks [first, last)."""
        found = list(self._quantised(first, last))
        self._scales = first, torch.cat([scales for _, scales in found])
        return torch.cat([packed for packed, _ in found])

    def absmax(self, first: int, last: int) -> Tensor:
        """The scales of blocks [first, last)."""
        at, known = self._scales
        self._scales = 0, torch.empty(0)
        low, high = max(first, at), min(last, at + known.numel())
        if low >= high:
            low = high = last
        before = [scales for _, scales in self._quantised(first, low)]
        after = [scales for _, scales in self._quantised(high, last)]
        return torch.cat([*before, known[low - at : high - at], *after])

    def _quantised(self, first: int, last: int) -> Iterator[tuple[Tensor, Tensor]]:
        from bitsandbytes.functional import quantize_4bit

        for start in range(first * BLOCK, last * BLOCK, _TILE_NUMEL):
            values = self.values.read(start, min(start + _TILE_NUMEL, last * BLOCK)).to(self.dtype)
            packed, state = quantize_4bit(values, blocksize=BLOCK, quant_type=self.kind)
            yield packed.view(-1), state.absmax


@dataclass(frozen=True)
class _Part:
    """Bytes, 32 a block, or scales, one a block. Fills zero-core's `init_replay.Source`."""

    blocks: _Blocks
    name: str
    each: int

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the part."""
        first, last = start // self.each, -(-stop // self.each)
        skipped = start - first * self.each
        return getattr(self.blocks, self.name)(first, last)[skipped : skipped + stop - start]


def pack_experts(
    model: nn.Module, kind: str = "nf4", skip: Sequence[str] = (), known: Container[str] | None = None
) -> list[str]:
    """Replaces every stack of experts, except in modules `skip`, by bytes and scales, without memory.

    known: names of the parameters that have values; None: all. Returns the names of the packed parameters. Parameters
    with fewer than three dimensions, such as biases, stay as they are. So does, with a warning, a parameter whose
    experts have a number of values that is not a multiple of 64.
    """
    packed = []
    for path, stack in find_stacks(model).items():
        for name, parameter in stack.parameters.items() if should_convert_module(path, list(skip)) else ():
            full, each = f"{path}.{name}", math.prod(parameter.shape[1:])
            if parameter.ndim < 3 or (known is not None and full not in known):
                continue
            if each % BLOCK:
                warnings.warn(
                    f"{full} stays in {parameter.dtype}: an expert has {each:,} values, and 4 bits take a multiple of "
                    f"{BLOCK}",
                    stacklevel=5,
                )
                continue
            with continue_recording(stack.module) if recording_of(stack.module) else nullcontext():
                made = FourBit.empty(parameter.shape, parameter.dtype, kind)
            setattr(stack.module, name, nn.Parameter(made, requires_grad=False))
            packed.append(full)
    return packed


class Quantiser:
    """transformers' quantiser of bitsandbytes' 4 bits, for a model that is built without memory.

    Raises ConfigError for another quantisation, and where bitsandbytes is missing.
    """

    def __init__(self, given: Any) -> None:
        self.quantiser = AutoHfQuantizer.from_config(given, pre_quantized=False)
        self.how = self.quantiser.quantization_config
        if not getattr(self.how, "load_in_4bit", False):
            raise ConfigError(
                f"a quantization_config of class {type(self.how).__name__}: weights are quantised as they are read to "
                "bitsandbytes' 4 bits alone (load_in_4bit); for others, load a quantised model with transformers, then "
                "shard it"
            )
        try:
            self.quantiser.validate_environment()
        except ImportError as error:
            raise ConfigError(f"a quantization_config of class {type(self.how).__name__}: {error}") from error

    def replace_linears(self, model: PreTrainedModel, dtype: torch.dtype) -> None:
        """Replaces linear layers by 4-bit ones. dtype: of the values before quantisation and after dequantisation."""
        self.dtype = dtype
        self.quantiser.preprocess_model(model, dtype=dtype, device_map=None)

    def fill(self, model: PreTrainedModel, values: dict[str, Any]) -> None:
        """Quantises linears now, one by one, reads all else but experts, beside which PEFT may put adapters, and lets
        `values` name the parts of experts, which `shard` reads.
        """
        from bitsandbytes.nn import Linear4bit, Params4bit

        for path, module in model.named_modules():
            if not isinstance(module, Linear4bit):
                continue
            module.support_avx512bf16_for_cpu = False  # an evaluation would repack the weight, which rounds its scales
            for name, parameter in list(module._parameters.items()):
                if parameter is None:
                    continue
                source = values.pop(f"{path}.{name}", None)
                if source is None:
                    raise ConfigError(
                        f"{path}.{name} is not in the files, and a new value cannot be quantised: leave the layer "
                        "unquantised: name it in llm_int8_skip_modules of quantization_config"
                    )
                whole = source.read(0, parameter.numel()).to(self.dtype).view(parameter.shape)
                made: Any = nn.Parameter(whole, requires_grad=False)
                if isinstance(parameter, Params4bit):
                    made = Params4bit(whole.contiguous(), requires_grad=False, **parameter.__dict__).to("cpu")
                setattr(module, name, made)
        self._fill_experts(model, values)
        for name, parameter in model.named_parameters():
            source = values.pop(name, None)
            if source is not None:
                become(parameter, source.read(0, parameter.numel()).to(parameter.dtype).view(parameter.shape))

    def _fill_experts(self, model: PreTrainedModel, values: dict[str, Any]) -> None:
        dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
        kind = self.how.bnb_4bit_quant_type
        for name in pack_experts(model, kind, self.quantiser.modules_to_not_convert, values):
            blocks = _Blocks(values.pop(name), dtypes[name], kind)
            values[f"{name}.packed"] = _Part(blocks, "packed", BLOCK // 2)
            values[f"{name}.absmax"] = _Part(blocks, "absmax", 1)

    def finish(self, model: PreTrainedModel) -> None:
        """Sets the attributes by which transformers and PEFT recognise a quantised model."""
        model.hf_quantizer = self.quantiser
        self.quantiser.postprocess_model(model)
