"""Lists the attributes and functions that need no memory of a tensor: its shape, dtype, device, flags and hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["METADATA", "name_of"]

_T: Any = Tensor  # its attributes are descriptors with __get__ and __set__, which their annotations hide


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}


# By getter, never by the name `__get__`, which all of them share.
METADATA: set[Any] = _getters(
    *("shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "ndim", "layout", "names", "is_cuda"),
    *("is_cpu", "is_sparse", "is_meta", "is_quantized", "is_nested", "is_mkldnn", "is_xpu", "is_mps", "is_sparse_csr"),
    *("_version", "output_nr", "retains_grad", "itemsize", "nbytes", "name", "_backward_hooks", "grad_dtype"),
    *("is_xla", "is_ipu", "is_hpu", "is_mtia", "is_maia", "is_vulkan", "is_ort", "_post_accumulate_grad_hooks"),
) | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size, Tensor.ndimension),
    *(Tensor.is_floating_point, Tensor.is_complex, Tensor.is_contiguous, Tensor.get_device, Tensor.requires_grad_),
    *(Tensor.register_hook, _T.requires_grad.__set__, Tensor.__len__),
    *(Tensor.storage_offset, Tensor.is_signed, Tensor.is_inference, _T._backward_hooks.__set__),
    *(torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size, Tensor.is_same_size),
    *(torch.is_tensor, Tensor.is_shared, Tensor._is_view),
}


def name_of(func: Callable[..., Any]) -> str:
    return torch.overrides.resolve_name(func) or getattr(func, "__name__", str(func))
