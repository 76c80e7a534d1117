"""Describes how a tile's master and moments are stored: the names, dtypes and sizes of its arrays. No arithmetic.

| layout      | a bf16 parameter comes with | moments                            | bytes per parameter (Adam) |
|-------------|-----------------------------|------------------------------------|----------------------------|
| fp32        | an fp32 master              | fp32                               | 12                         |
| split       | an int16 remainder          | fp32                               | 10                         |
| split_bf16m | an int16 remainder          | exp_avg bf16, exp_avg_sq fp32      | 8                          |
| split_8bit  | an int16 remainder          | 8-bit codes, an fp32 scale per 256 | 4                          |

In every layout, an fp32 parameter is its own master and an fp16 parameter comes with an fp32 master.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_optim_cpu.rules import Rule

FULL, SPLIT = 0, 1  # native Master
FP32, BF16, BYTE8 = 0, 1, 2  # native Moments
BLOCK_NUMEL = 256


@dataclass(frozen=True)
class Field:
    """One array of a tile's states."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """How states are kept, by the names in LAYOUTS. ``master`` is the kind of master that a bf16 parameter has."""

    name: str
    master: int
    moments: int

    def master_of(self, parameter_dtype: torch.dtype) -> int:
        """Returns the native Master for parameters of this dtype."""
        return self.master if parameter_dtype == torch.bfloat16 else FULL

    def fields(self, rule: Rule, numel: int, parameter_dtype: torch.dtype) -> tuple[Field, ...]:
        """Returns the arrays that come with a parameter of ``numel`` elements, in the order of a tile."""
        fields: list[Field] = []
        if self.master_of(parameter_dtype) == SPLIT:
            fields.append(Field("remainder", torch.int16, numel))
        elif parameter_dtype != torch.float32:
            fields.append(Field("master", torch.float32, numel))
        blocks = -(-numel // BLOCK_NUMEL)
        for name, slot in rule.states:
            fields.append(Field(name, self.moment_dtype(slot), numel))
            if self.moments == BYTE8:
                fields.append(Field(f"{name}_scale", torch.float32, blocks))
        return tuple(fields)

    def moment_dtype(self, slot: int) -> torch.dtype:
        """Returns the dtype that a moment is stored in. Slot 0 holds signed moments, slot 1 unsigned ones."""
        if self.moments == BYTE8:
            return torch.uint8
        return torch.bfloat16 if self.moments == BF16 and slot == 0 else torch.float32


LAYOUTS = {
    layout.name: layout
    for layout in (
        Layout("fp32", FULL, FP32),
        Layout("split", SPLIT, FP32),
        Layout("split_bf16m", SPLIT, BF16),
        Layout("split_8bit", SPLIT, BYTE8),
    )
}


def layout_named(name: str) -> Layout:
    """Returns the layout of this name. Raises ValueError, which lists the names, if there is none."""
    if name == "bf16_stochastic":
        raise ValueError("layout='bf16_stochastic' was withdrawn in 0.2; split_bf16m takes the same memory")
    if name not in LAYOUTS:
        raise ValueError(f"layout={name!r} is unknown; there are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
