"""Counts the bytes of one element: of each kind of value that is kept, and the accelerator traffic of an update.

The estimates, the stores and the planner of zero_offload count with these. No model, no stage.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..precision import round_traffic

FP32_BYTES = 4  # of a master, a state and a sum of gradients


@dataclass(frozen=True)
class ElementBytes:
    """Bytes of one element of each kind of value."""

    parameter_dtype: torch.dtype
    reduce_dtype: torch.dtype
    states: int = 0  # fp32 values that the optimizer keeps besides the master
    trained: bool = True

    @property
    def master(self) -> int:
        """Bytes of the master: 0 for an fp32 parameter, which is its own master, and for a frozen one."""
        return FP32_BYTES if self.trained and self.parameter_dtype != torch.float32 else 0

    @property
    def optimizer(self) -> int:
        """Bytes of the master and of the optimizer's states, in fp32."""
        return self.master + FP32_BYTES * self.states

    def gradient(self, arriving: int | None) -> int:
        """Bytes that are kept if `arriving` gradients are added up before a step; None: their number is not known.

        A single gradient stays in the reduce dtype. A sum is in fp32.
        """
        return self.reduce_dtype.itemsize if arriving == 1 else FP32_BYTES

    @property
    def widened(self) -> int:
        """Bytes that the update needs to widen a gradient that was reduced in 16 bits."""
        return FP32_BYTES if self.trained and self.reduce_dtype != torch.float32 else 0


def step_traffic(element: ElementBytes, kept: int) -> int:
    """Returns bytes of accelerator memory that norm, clipping, update and rounding read and write for one element.

    kept: bytes of its gradient when the step begins. The norm is clipped, and the optimizer reads and writes each value
    once, as torch's fused ones do. A planner counts with this, and a test counts the bytes of each pass: change both if
    you add a pass.
    """
    values = FP32_BYTES * (1 + element.states)  # the master, or the parameter that is its own, and the states
    norm, clipped, updated = kept, kept + FP32_BYTES, 2 * values + FP32_BYTES  # of 16 bits, widened and clipped in one
    return norm + clipped + updated + (round_traffic(element.parameter_dtype) if element.master else 0)
