"""Checks tensors before their addresses are passed to native code. Computes nothing."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPE_CODES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def dtype_code(name: str, dtype: torch.dtype) -> int:
    """Returns the native code of a floating-point dtype. Raises TypeError, with ``name``, for others."""
    code = DTYPE_CODES.get(dtype)
    if code is None:
        raise TypeError(f"{name} is {dtype}; the kernels take float32, bfloat16 and float16: cast it")
    return code


def check(name: str, tensor: Tensor, *, numel: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Returns ``tensor`` if it is a dense, contiguous CPU tensor of this size and dtype.

    Raises:
        TypeError: it is not a tensor, or its dtype is not ``dtype``.
        ValueError: its device, layout, strides or size are wrong. The text names the tensor and says what to do.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}, not a tensor")
    if tensor.layout != torch.strided:
        raise ValueError(f"{name} is {tensor.layout}; only dense tensors are updated here: use to_dense()")
    if tensor.is_meta:
        raise ValueError(
            f"{name} is on the meta device and has no values, as in deferred_init: give it values first, or make "
            "torch.optim's optimizer over it, which a CpuStep runs as well"
        )
    if tensor.device.type != "cpu":
        raise ValueError(f"{name} is on {tensor.device}; these kernels run on the CPU: move it with .cpu()")
    if dtype is not None and tensor.dtype != dtype:
        raise TypeError(f"{name} is {tensor.dtype}, wanted {dtype}")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, wanted {numel}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name} of shape {tuple(tensor.shape)} has strides {tensor.stride()}: use .contiguous()")
    return tensor
