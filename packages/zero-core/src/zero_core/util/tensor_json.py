"""Packs plain values into bytes and back: numbers, texts, lists, dicts and tensors. No pickle: reading runs no code.

[Note: the bytes]
    length of the text, 8 bytes | text in JSON | the bytes of all tensors, one after another

In the text a dict is {"dict": [[key, value], ...]}, so that keys need not be texts, a tuple {"tuple": [...]}, bytes
{"bytes": "hex"}, a tensor {"tensor": [dtype, shape, where its bytes begin]}. Numbers keep all their bits, nan and inf.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..errors import ZeroError

LENGTH = struct.Struct("<Q")


def packed(value: Any, what: str) -> bytes:
    """Returns the bytes of a plain value. Raises ZeroError naming a part that is not plain; `what` names the whole."""
    tensors: list[bytes] = []
    text = json.dumps(_told(value, what, tensors)).encode()
    return b"".join([LENGTH.pack(len(text)), text, *tensors])


def unpacked(data: bytes) -> Any:
    """Returns the value of these bytes; tensors are on the CPU."""
    (length,) = LENGTH.unpack(data[: LENGTH.size])
    start = LENGTH.size + length
    return _value(json.loads(data[LENGTH.size : start]), bytearray(data), start)


def without_functions(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's options without functions and classes, such as adan-pytorch's restart_cond, which each process
    has of its own."""
    return {name: value for name, value in options.items() if not any(map(callable, tree_leaves(value)))}


def _told(value: Any, what: str, tensors: list[bytes]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, Tensor):
        at = sum(map(len, tensors))
        plain = value.detach().cpu().contiguous()
        tensors.append(plain.reshape(-1).view(torch.uint8).numpy().tobytes() if plain.numel() else b"")
        return {"tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), at]}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, dict):
        found = [(_told(k, f"a key of {what}", tensors), _told(v, f"{what}[{k!r}]", tensors)) for k, v in value.items()]
        return {"dict": found}
    if type(value) in (list, tuple):
        listed = [_told(each, f"{what}[{i}]", tensors) for i, each in enumerate(value)]
        return listed if type(value) is list else {"tuple": listed}
    for kind in (bool, int, float, str):  # of numpy and enum
        if isinstance(value, kind):
            return kind(value)
    raise ZeroError(
        f"{what} is of type {type(value).__name__}. Only numbers, strings, bytes, lists, tuples, dicts and tensors can "
        "be saved with a step: give the object's contents, such as its state_dict()"
    )


def _value(told: Any, data: bytearray, start: int) -> Any:
    if isinstance(told, list):
        return [_value(each, data, start) for each in told]
    if not isinstance(told, dict):
        return told
    ((kind, inside),) = told.items()
    if kind == "bytes":
        return bytes.fromhex(inside)
    if kind == "dict":
        return {_value(k, data, start): _value(v, data, start) for k, v in inside}
    if kind == "tuple":
        return tuple(_value(each, data, start) for each in inside)
    dtype, shape, at = getattr(torch, inside[0]), inside[1], inside[2]
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(data, dtype=dtype, count=math.prod(shape), offset=start + at).clone().view(shape)
