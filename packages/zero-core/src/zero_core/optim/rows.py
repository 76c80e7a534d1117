"""Rows of parameters that an optimizer needs whole, as groups of stacked experts have them: which may be stepped apart.

Owns what `shard` refuses of them, and the trial of an optimizer which says that rows are enough for it.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ..errors import UnsupportedOptimizerError
from ..layout import Rows
from .elementwise import drawn, first_apart, trial_steps
from .joint import kind_of, member_of
from .uncut import steps_rows

__all__ = ["check_rows"]


def check_rows(optimizer: torch.optim.Optimizer, found: Iterable[tuple[Rows, int]], device: torch.device) -> None:
    """Raise UnsupportedOptimizerError where the optimizer cannot step these rows of parameters apart from each other.

    found: rows that are in a unit without the others, of parameters that the optimizer needs whole, and the number of
    the parameter's group. Draws no random number.
    """
    tried: set[tuple[int, tuple[int, ...]]] = set()
    for rows, group in found:
        if not steps_rows(optimizer, group, rows.shape):
            raise UnsupportedOptimizerError(
                f"{rows.name} of {kind_of(optimizer)} is needed whole, and its experts are cut into groups: give "
                "shard(expert_bytes=None), which leaves them in their block's unit"
            )
        small = (3, *(min(n, most) for most, n in enumerate(rows.shape[1:], 4)))
        shape = small if steps_rows(optimizer, group, small) else (3, *rows.shape[1:])
        if (group, shape) not in tried:
            tried.add((group, shape))
            with torch.random.fork_rng(devices=[]):
                _try(optimizer, group, shape, torch.device("cpu") if device.type == "meta" else device)


def _try(optimizer: torch.optim.Optimizer, group: int, shape: tuple[int, ...], device: torch.device) -> None:
    """Raise where steps of a throw-away parameter of `shape` are not those of its rows."""
    values, gradients = (each.view(shape) for each in drawn(torch.Size(shape).numel(), device))
    whole, state = trial_steps(optimizer, group, [values], [gradients])
    runs = [trial_steps(optimizer, group, [values[part]], [gradients[part]]) for part in (slice(1), slice(1, None))]
    apart = first_apart(whole, [torch.cat(parts) for parts in zip(*(run for run, _ in runs), strict=True)])
    for name, value in state.items():
        others = [own.get(name) for _, own in runs]
        if apart is None and not _joins(value, others, shape):
            apart = f"{name} is not that of its rows, joined,"
    if apart is not None:
        kind = type(member_of(optimizer, group)[0]).__name__
        raise UnsupportedOptimizerError(
            f"{kind}.steps_rows() says that rows are stepped by themselves, and of a parameter of shape {shape}, "
            f"{apart} with its rows apart: let it return False, or give shard(expert_bytes=None), which leaves experts "
            "in their block's unit"
        )


def _joins(value: object, others: list[object], shape: tuple[int, ...]) -> bool:
    """Whether a state of the whole is that of its rows: joined, or a number that is the same of all."""
    if isinstance(value, Tensor) and tuple(value.shape) == shape:
        parts = [each.reshape(-1) for each in others if isinstance(each, Tensor)]
        return len(parts) == len(others) and first_apart([value.reshape(-1)], [torch.cat(parts)]) is None
    plain = [float(each) if isinstance(each, Tensor) and each.dim() == 0 else each for each in (value, *others)]
    return all(isinstance(each, (int, float, type(None))) and each == plain[0] for each in plain)
