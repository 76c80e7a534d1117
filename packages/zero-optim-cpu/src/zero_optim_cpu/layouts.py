"""How the values of a tile lie in memory: the master and the moments. Names, dtypes and sizes; no arithmetic.

| layout          | bf16 parameter            | moments                                | bytes swapped (Adam) |
|-----------------|---------------------------|----------------------------------------|----------------------|
| fp32            | fp32 master beside it     | fp32                                   | 12                   |
| split           | int16 remainder beside it | fp32                                   | 10                   |
| split_bf16m     | int16 remainder beside it | exp_avg bf16, exp_avg_sq fp32          | 8                    |
| split_8bit      | int16 remainder beside it | 8-bit codes, an fp32 scale per 256     | 4                    |
| bf16_stochastic | alone, rounded by counter | fp32                                   | 8                    |

An fp32 parameter is its own master in every layout; an fp16 one has an fp32 master beside it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_optim_cpu.rules import Rule

FULL, SPLIT, STOCHASTIC = 0, 1, 2  # native Master
FP32, BF16, BYTE8 = 0, 1, 2  # native Moments
BLOCK_NUMEL = 256


@dataclass(frozen=True)
class Field:
    """One array of a tile's state."""

    name: str
    dtype: torch.dtype
    numel: int

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True)
class Layout:
    """A row of the table above. ``master`` is what a bf16 parameter has."""

    name: str
    master: int
    moments: int

    def master_of(self, parameter_dtype: torch.dtype) -> int:
        """The native Master for parameters of this dtype."""
        return self.master if parameter_dtype == torch.bfloat16 else FULL

    def fields(self, rule: Rule, numel: int, parameter_dtype: torch.dtype) -> tuple[Field, ...]:
        """The arrays beside a parameter of ``numel`` elements, in the order of a tile."""
        fields: list[Field] = []
        master = self.master_of(parameter_dtype)
        if master == SPLIT:
            fields.append(Field("remainder", torch.int16, numel))
        elif master == STOCHASTIC:
            fields.append(Field("counter", torch.int64, 1))
        elif parameter_dtype != torch.float32:
            fields.append(Field("master", torch.float32, numel))
        blocks = -(-numel // BLOCK_NUMEL)
        for name, slot in rule.states:
            fields.append(Field(name, self.moment_dtype(slot), numel))
            if self.moments == BYTE8:
                fields.append(Field(f"{name}_scale", torch.float32, blocks))
        return tuple(fields)

    def moment_dtype(self, slot: int) -> torch.dtype:
        """Stored dtype of a moment: slot 0 holds signed ones, slot 1 unsigned ones."""
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
        Layout("bf16_stochastic", STOCHASTIC, FP32),
    )
}


def layout_named(name: str) -> Layout:
    """ValueError with the names there are."""
    if name not in LAYOUTS:
        raise ValueError(f"layout={name!r} is unknown; there are {', '.join(LAYOUTS)}")
    return LAYOUTS[name]
