"""A probe of an `UpdateStep` on throw-away tiles: does it go on as the optimizer does when an option changes.

Owns these tiles and what is compared. No step of the training runs here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_core.errors import UnsupportedOptimizerError
from zero_core.optim.elementwise import drawn, trial_shape
from zero_core.optim.joint import kind_of
from zero_core.optim.segments import options_of, over_segments
from zero_core.store import Segment

from .protocols import RunsUncut, SegmentStep, UpdateStep
from .tiles.tile import View, record_of

__all__ = ["check_change"]

_CHANGED = 64  # elements of a parameter whose options change
_Options = Mapping[str, Any]


def check_change(
    step: UpdateStep, optimizer: torch.optim.Optimizer, group: int, before: Sequence[_Options], what: str
) -> None:
    """Step a tile and a parameter of the optimizer's, with each of the options `before` and then with the group's own.

    Raises UnsupportedOptimizerError where they come apart by the change, or where the optimizer keeps another state.
    """
    after, kind, name = options_of(optimizer.param_groups[group]), kind_of(optimizer), type(step).__name__
    shape = trial_shape(optimizer, group, _CHANGED)
    uncut = Segment(0, _CHANGED, group, "a throw-away parameter", shape, uncut=True) if len(shape) > 1 else None
    plain = [each for each in before for _ in range(2)]
    changed = [*plain, after, after]
    theirs, state = _run_theirs(optimizer, group, changed)
    known = {*step.state_names(), *(step.state_shapes(group, shape) if isinstance(step, RunsUncut) else ())}
    new = [n for n, v in state.items() if isinstance(v, Tensor) and v.dim() and n not in known]
    if new:
        raise UnsupportedOptimizerError(
            f"{what}: {kind} then keeps {', '.join(new)}, for which the store has no memory. Give the optimizer "
            "the new value before zero_core.shard; after that you can set the old one until the new one shall apply"
        )
    try:
        error = _distance(theirs, _run(step, *_drawn(len(changed)), changed, uncut))
        usual = _distance(
            _run_theirs(optimizer, group, plain)[0],
            _run(step, *_drawn(len(plain)), plain, uncut),
        )
    except Exception as refusal:
        raise UnsupportedOptimizerError(f"{what}, and {name} cannot do that: {refusal}") from refusal
    # Without the change a step may be a little off, as one with quantised states is; with it, no more than that.
    if not error <= 1e-3 + 4 * usual:
        raise UnsupportedOptimizerError(
            f"{what}, and {name} does not go on as {kind} does: after two steps it is off by {error:.2g} of what an "
            "element moves. Set it back; to train with the new value, give it to the optimizer before zero_core.shard"
        )


def _drawn(steps: int) -> tuple[Tensor, list[Tensor]]:
    values, gradients = drawn(_CHANGED, torch.device("cpu"))
    return values, [gradients] * steps


def _distance(ones: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    """The largest difference of an element after a step, by how far any element has moved at most."""
    start, _ = _drawn(0)
    moved = max(float((one - start).abs().max()) for one in ones)
    return max(float((one - other).abs().max()) for one, other in zip(ones, others, strict=True)) / (moved or 1.0)


def _run_theirs(
    optimizer: torch.optim.Optimizer, group: int, options: Sequence[_Options]
) -> tuple[list[Tensor], Mapping[str, Any]]:
    """Values of a parameter of the optimizer's after a step with each of the options, and its state in the end."""
    values, gradients = _drawn(len(options))
    shape = trial_shape(optimizer, group, _CHANGED)
    probe, found = nn.Parameter(values.clone().view(shape)), []
    trial = over_segments(optimizer, [probe], [group])
    for each, gradient in zip(options, gradients, strict=True):
        trial.param_groups[0].update(each)
        probe.grad = gradient.clone().view(shape)
        trial.step()
        found.append(probe.detach().clone().view(-1))
    return found, trial.state[probe]


def _run(
    step: UpdateStep,
    values: Tensor,
    gradients: Sequence[Tensor],
    options: Sequence[_Options],
    uncut: Segment | None = None,
) -> list[Tensor]:
    """fp32 masters of a parameter with these `values`, after each step. uncut: as of a tile."""
    fields = record_of(step, values.numel(), torch.float32, 1, uncut).fields
    states = {field.name: torch.zeros(field.numel, dtype=field.dtype) for field in fields}
    tile = View(states, torch.zeros(values.numel()), torch.zeros(values.numel()), uncut)
    found = []
    with torch.no_grad():
        step.initialise(tile, values.clone())
        for count, (gradient, each) in enumerate(zip(gradients, options, strict=True), 1):
            tile.gradient.copy_(gradient)
            step.update(tile, [SegmentStep(0, values.numel(), each, count, tuple(values.shape), 0)], 1.0)
            found.append(step.read(tile, "master").clone())
    return found
