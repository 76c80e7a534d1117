"""Tensors set aside between forward and backward: the seam, how a tensor lies in memory, and leaving it where it is.

Owns `Spill`, `Spilled` and `Form`. The ways elsewhere are `host_spill`'s and `nvme_spill`'s; what is set aside, and
when, is for `activations`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..errors import OffloadError

__all__ = ["ChangedInputError", "DeviceSpill", "Form", "Spill", "Spilled"]


class ChangedInputError(OffloadError, RuntimeError):
    """A tensor that backward needs was changed in place."""

    def __init__(self, unit: str) -> None:
        super().__init__(
            f"an input of unit {unit} was changed in place after its forward, so backward cannot compute on it again; "
            "make that operation out of place, or keep this unit's activations"
        )


class Spilled(Protocol):
    """A tensor that was set aside."""

    def load(self) -> Tensor:
        """A tensor of the same values, shape, strides and device. May be asked for more than once."""


class Spill(Protocol):
    """Where tensors are set aside."""

    def pack(self, tensor: Tensor, what: str) -> Spilled: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Form:
    """How a tensor lies in memory. `core`: its sizes with expanded dimensions (stride 0) taken as 1."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    core: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Form:
        size, stride = tuple(tensor.size()), tuple(tensor.stride())
        core = tuple(1 if step == 0 else count for count, step in zip(size, stride, strict=True))
        return cls(size, stride, core, tensor.dtype, tensor.device)

    def flatten(self, tensor: Tensor) -> Tensor:
        """The values once each, as bytes (uint8) in row-major order; a copy only where they do not lie so."""
        for dimension, (count, whole) in enumerate(zip(self.core, self.size, strict=True)):
            if count != whole:
                tensor = tensor.narrow(dimension, 0, 1)
        return tensor.detach().contiguous().view(-1).view(torch.uint8)

    def empty(self) -> Tensor:
        """Contiguous memory for the values, on the CPU."""
        return torch.empty(self.core, dtype=self.dtype)

    def restore(self, values: Tensor) -> Tensor:
        """The tensor, from contiguous values of shape `core`."""
        if self.core == self.size and values.stride() == self.stride and values.device == self.device:
            return values
        base = torch.empty_strided(self.core, self.stride, dtype=self.dtype, device=self.device)
        return base.copy_(values).expand(self.size)


class DeviceSpill:
    """Nowhere else: the tensor only stays alive."""

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        return _Alive(tensor, what)

    def close(self) -> None:
        """Nothing is held here."""


class _Alive:
    def __init__(self, tensor: Tensor, what: str) -> None:
        self._tensor, self._what, self._version = tensor.detach(), what, tensor._version

    def load(self) -> Tensor:
        if self._tensor._version != self._version:
            raise ChangedInputError(self._what)
        return self._tensor.detach()
