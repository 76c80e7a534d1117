"""Scales the loss for fp16: multiplies the gradient where a backward begins, and adapts the factor.

Owns the scale, and knows whether a backward of a scaled loss runs. Not here: skipping a step (in optim/optimizer.py).
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GradientError, ZeroError


@dataclasses.dataclass(eq=False)
class LossScale:
    """The scale of a loss. Dynamic: halves when a norm is not finite, doubles after `window` finite ones in a row.

    first_window: number of finite norms to double from the start, and after a norm that is not finite; None: `window`.
    hysteresis: number of norms that are not finite to halve; each of them skips its step. It is counted again from zero
    when the scale doubles or, with consecutive_hysteresis, at each finite norm. minimum: the lowest scale. There, a
    norm that is not finite raises GradientError with fails_at_minimum, and skips its step without it. DeepSpeed's scale
    is LossScale(2.0**16, window=1000, first_window=1001, hysteresis=2, fails_at_minimum=True).
    """

    value: float = 2.0**16
    _: dataclasses.KW_ONLY
    dynamic: bool = True
    window: int = 2000
    first_window: int | None = None
    hysteresis: int = 1
    consecutive_hysteresis: bool = False
    minimum: float = 1.0
    fails_at_minimum: bool = False

    def __post_init__(self) -> None:
        if not 0 < self.value < math.inf:
            raise ValueError(f"loss_scale={self.value} must be positive and finite")
        if not 0 < self.minimum < math.inf or self.hysteresis < 1:
            raise ValueError(f"minimum={self.minimum}, hysteresis={self.hysteresis}: a positive number, and at least 1")
        self.value, self.minimum = float(self.value), float(self.minimum)
        self._start = 0 if self.first_window is None else self.window - self.first_window
        self.finite_steps, self._left = self._start, self.hysteresis
        # Callbacks of backwards of scaled losses under way, which autograd drops at their end, also where they raise.
        self.running: weakref.WeakSet[Callable[[], Any]] = weakref.WeakSet()
        self.scaled_model: Callable[[], nn.Module | None] = lambda: None

    @classmethod
    def of(cls, wanted: float | str | LossScale | None, model: nn.Module) -> LossScale | None:
        """Returns the scale of the model's loss for an argument of `shard`: None, "dynamic", a number, or a LossScale.

        Raises ZeroError for a LossScale of another model: a step of one would change it between the other's backward
        and step.
        """
        if wanted is None:
            return None
        if isinstance(wanted, str):
            if wanted != "dynamic":
                raise ValueError(f'loss_scale={wanted!r}: it is a number, "dynamic", or None')
            wanted = cls()
        scale = wanted if isinstance(wanted, LossScale) else cls(wanted, dynamic=False)
        if (other := scale.scaled_model()) not in (None, model):
            raise ZeroError(
                f"the LossScale is used with a {type(other).__name__}, whose step() changes it. "
                f"Give the {type(model).__name__} a LossScale of its own"
            )
        scale.scaled_model = weakref.ref(model)
        return scale

    def overflowed(self) -> None:
        """Counts a step whose gradients were not finite, and halves the scale after `hysteresis` of them.

        Raises GradientError at `minimum`, if `fails_at_minimum`.
        """
        self.finite_steps = self._start
        if self._left > 1:
            self._left -= 1
            return
        if self.fails_at_minimum and self.value == self.minimum:
            raise GradientError(
                f"gradients overflow with loss_scale={self.value:g}, its minimum: nothing was updated. Lower the "
                "learning rate, look for the loss that is not finite, or train in bf16"
            )
        self.value = max(self.value / 2, self.minimum)

    def succeeded(self) -> None:
        """Counts a step whose gradients were finite, and raises the scale after `window` of them."""
        if not self.dynamic:
            return
        self.finite_steps += 1
        grows = self.finite_steps >= self.window  # more than, where a checkpoint was saved with a longer window
        if grows:
            self.value, self.finite_steps = self.value * 2, 0
        if grows or self.consecutive_hysteresis:
            self._left = self.hysteresis

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for `load_state_dict`, to go on with the same scale."""
        return {"value": self.value, "finite_steps": self.finite_steps, "hysteresis_left": self._left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores a dynamic scale; a constant one keeps the user's value."""
        if not self.dynamic:
            return
        self.value, self.finite_steps = float(state["value"]), int(state["finite_steps"])
        self._left = min(self.hysteresis, int(state.get("hysteresis_left", self.hysteresis)))  # older states have none


class Scaled(torch.autograd.Function):
    """The identity; its gradient is multiplied by the scale as it is when backward runs."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, scale: LossScale) -> Tensor:
        ctx.scale = scale
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        end: Any = partial(int)
        ctx.scale.running.add(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        return gradients[0] * ctx.scale.value, None
