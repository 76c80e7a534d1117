"""Lists the plain tensors that form a parameter. Changes nothing.

[Note: the parts of a parameter]
Most parameters are one tensor. A wrapper subclass (torchao's quantised weights) has no memory of its own: its parts are
the tensors that `__tensor_flatten__` names. A bitsandbytes weight is a tensor of packed bytes, with scales in objects
beside it. Every part is a slot of a unit, named `weight.qdata` or `weight.quant_state.absmax`, and keeps its own dtype.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from ..errors import ShardedParameterError, ZeroError

_PARTS = "_zero_parts"
_SCALES = ("quant_state.absmax", "quant_state.offset", "quant_state.state2.absmax", "SCB")  # of bitsandbytes


def wraps(kind: type[Tensor]) -> bool:
    """Whether this is a wrapper subclass, whose memory is in other tensors."""
    dispatch: Any = kind.__torch_dispatch__
    return dispatch is not Tensor.__torch_dispatch__


def parts_of(parameter: Tensor, module: nn.Module | None = None) -> dict[str, Tensor]:
    """Returns suffix of the name -> tensor; {"": parameter} for most. module: the one that holds it."""
    if (kept := parameter.__dict__.get(_PARTS)) is not None:
        return kept
    if wraps(type(parameter)):
        flatten: Any = getattr(parameter, "__tensor_flatten__", None)
        return {"": parameter} if flatten is None else {f".{name}": getattr(parameter, name) for name in flatten()[0]}
    found = {"": parameter}
    for path in _SCALES:
        holders = (parameter, getattr(module, "state", None)) if path == "SCB" else (parameter,)
        for holder in holders:
            scale = _reach(holder, path)
            if type(scale) is Tensor:
                found.setdefault(f".{path}", scale)
    return found


def keep_parts(parameter: nn.Parameter, module: nn.Module) -> None:
    """Makes `parts_of` return the same tensors from now on, wherever the library moves them."""
    parameter.__dict__[_PARTS] = parts_of(parameter, module)


def forget_parts(parameter: Tensor) -> None:
    parameter.__dict__.pop(_PARTS, None)


def _reach(holder: Any, path: str) -> Any:
    for name in path.split("."):
        holder = getattr(holder, "__dict__", {}).get(name)
    return holder


class NamedPart(NamedTuple):
    """One part of a parameter, and the module that holds it. quantised: no value may change, whatever its dtype."""

    name: str
    tensor: Tensor
    parameter: nn.Parameter
    module: nn.Module
    quantised: bool


def named_parts(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[NamedPart]:
    """Yields every part of every parameter, in the order of `model.named_parameters()`."""
    seen: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        for key, parameter in module._parameters.items():
            if parameter is None or (remove_duplicate and id(parameter) in seen):
                continue
            seen.add(id(parameter))
            name = f"{prefix}.{key}" if prefix else key
            parts = parts_of(parameter, module)
            quantised = len(parts) > 1 or "" not in parts
            for suffix, part in parts.items():
                yield NamedPart(name + suffix, part, parameter, module, quantised)


def check_initialised(model: nn.Module) -> None:
    """Raises ZeroError for a parameter of a lazy module that has run no forward."""
    for name, parameter in model.named_parameters():
        if isinstance(parameter, UninitializedParameter):
            raise ZeroError(f"{name} has no shape yet: run the model once on a sample before zero_core.shard")


def check_parts(name: str, parameter: nn.Parameter) -> None:
    """Raises ZeroError for a parameter whose parts cannot be cut into shards."""
    kind = type(parameter).__qualname__
    if getattr(parameter, "bnb_quantized", None) is False or (
        getattr(parameter, "has_fp16_weights", None) is False and parameter.is_floating_point()
    ):
        raise ZeroError(
            f"{name}, of class {kind}, is not quantised yet, and cannot be quantised once it is sharded: call "
            'model.to("cpu"), or model.to(device), before zero_core.shard'
        )
    if getattr(getattr(parameter, "quant_state", None), "packing_format_for_cpu", False):
        raise ZeroError(
            f"{name} was repacked by bitsandbytes, and its scales rounded, in a forward in eval mode on a processor "
            "with avx512_bf16: load the model again, and call zero_core.shard before any forward in eval mode"
        )
    if not wraps(type(parameter)):
        return
    check_frozen(name, parameter)
    inner = parts_of(parameter)
    plain = {n: type(t) is Tensor and t.layout is torch.strided and t.is_contiguous() for n, t in inner.items()}
    if odd := [n[1:] for n, is_plain in plain.items() if not is_plain]:
        raise ShardedParameterError(
            f"parameter {name!r}, a {kind}, cannot be sharded: the tensor {odd[0]!r} inside of it is no plain, "
            f"contiguous tensor. Replace {name!r} by a plain nn.Parameter before zero_core.shard"
        )


def check_frozen(name: str, parameter: nn.Parameter) -> None:
    """Raises ShardedParameterError for a wrapper subclass that requires a gradient."""
    if wraps(type(parameter)) and parameter.requires_grad:
        kind = type(parameter).__qualname__
        raise ShardedParameterError(
            f"{name}, of class {kind}, requires a gradient. Its values are in tensors inside of it, which shards keep "
            "and do not train: call requires_grad_(False) on it, or convert it to a plain parameter, before shard()"
        )


def repacks_in_eval(module: nn.Module) -> bool:
    """Whether a forward in eval mode replaces the weight's bytes and rounds its scales: bitsandbytes' 4-bit linears."""
    if isinstance(module, torch.jit.ScriptModule):  # its dicts are torch's own, without get()
        return False
    state = getattr(module._parameters.get("weight"), "quant_state", None)
    return state is not None and bool(getattr(module, "support_avx512bf16_for_cpu", False))
