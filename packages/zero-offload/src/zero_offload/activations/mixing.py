"""Finds out, at the first call of each unit, whether it computes its rows apart from each other.

Owns that comparison, and what a unit returns for each row. What is cut, and how, is `cutting`'s.

[Note: a slice against its halves]
Twice `rows` rows are computed at once, then `rows` at a time, without gradients and from the same random state. The two
differ by rounding only if no row depends on another, and by more if a BatchNorm, a router with a limited capacity or a
contrastive loss has mixed them. Dropout is off meanwhile, as it has no seed per row. A unit that still draws random
numbers is compared in eval mode. Two tokens' vectors agree if they are within `_TOLERANCE` of the vector's norm. What
mixes rows less than that, or only in rows that the first slice does not have, is not found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zero_core import ZeroError

from ..errors import OffloadError
from .buffers import Buffers
from .cutting import Cut, leaves_of, same, unchanged_arguments
from .spill import ActivationError

__all__ = ["refuse_batch_norm", "rows_of_outputs"]

_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004}  # four units in the last place
_EXACT_TOLERANCE = 1e-4  # fp32 and more: what sums in another order leave, and far below what mixing does
_WHOLE = {"rows": "a batch", "tokens": "a row"}
_DROPOUTS = {
    *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout),
    *(torch.dropout, torch.dropout_, torch.feature_dropout, torch.alpha_dropout, torch.feature_alpha_dropout),
}


def refuse_batch_norm(unit: str, module: nn.Module) -> None:
    """Raise ActivationError if the unit normalises over its batch."""
    for path, each in module.named_modules():
        if isinstance(each, nn.modules.batchnorm._BatchNorm) and (each.training or each.running_mean is None):
            raise ActivationError(
                f"unit {unit} contains {path or 'itself'}, a {type(each).__name__} whose statistics are over all rows "
                f"of a batch, and rows= would compute them over a few: {_way_out('rows')}, or use GroupNorm or "
                "LayerNorm"
            )


def rows_of_outputs(
    unit: str,
    module: nn.Module,
    buffers: Buffers,
    forward: Callable[..., Any],
    leaves: Sequence[Any],
    structure: Any,
    cut: Cut,
) -> tuple[bool, ...]:
    """For each leaf of the unit's output, and then for each attribute that it changes, whether it has a row for each
    row of the input (or a token for each token, as `cut` says); else it is the same for all.

    Raises ActivationError if rows depend on each other, or an output is neither.
    """
    count = min(2 * cut.size, cut.length)
    pieces = [(0, count), (0, cut.size), (cut.size, count - cut.size)]
    device = next(leaf.device for k, leaf in enumerate(leaves) if k in cut.where)

    def compute(start: int, size: int) -> tuple[list[Any], int, bool]:
        """The output's leaves and then those of attributes, the number of the former, and whether random numbers were
        drawn."""
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_with_random_numbers(device)):
            before = _random_state(device)
            args, kwargs = pytree.tree_unflatten(cut.rows_of(leaves, start, size), structure)
            changes: dict[Any, Any] = {}
            with unchanged_arguments(unit, args, kwargs, cut.option), buffers.part(changes, cut.option):
                output = forward(*args, **kwargs)
            found, count = leaves_of((output, changes))[0], len(leaves_of(output)[0])
            return found, count, not all(map(torch.equal, before, _random_state(device)))

    with torch.no_grad(), _naming_failures(unit, count, cut):
        with _WithoutDropout():
            found = [compute(*piece) for piece in pieces]
        if any(drawn for *_, drawn in found):
            with _eval_mode(module):
                found = [compute(*piece) for piece in pieces]
    whole, *halves = (leaves for leaves, *_ in found)
    if len({len(each) for each in (whole, *halves)}) > 1:
        raise ActivationError(
            f"unit {unit} returns outputs of another structure for other {cut.option}: {_way_out(cut.option)}"
        )
    sizes = [size for _, size in pieces]
    outputs = found[0][1]
    return tuple(
        _has_rows(unit, "returns an output" if k < outputs else "keeps in an attribute a value", values, sizes, cut)
        for k, values in enumerate(zip(whole, *halves, strict=True))
    )


def _has_rows(unit: str, what: str, values: Sequence[Any], sizes: Sequence[int], cut: Cut) -> bool:
    dim, option, each = cut.dim, cut.option, cut.option.removesuffix("s")
    if all(isinstance(v, Tensor) and v.dim() > dim and v.shape[dim] == n for v, n in zip(values, sizes, strict=True)):
        whole, halves = values[0], torch.cat(list(values[1:]), dim)
        tolerance = _TOLERANCE.get(whole.dtype, _EXACT_TOLERANCE)
        found = _distance(whole, halves)
        if not found <= tolerance:
            raise ActivationError(
                f"unit {unit} mixes the {option} of {_WHOLE[option]}: {sizes[0]} {option} at once and {sizes[1]} at a "
                f"time give outputs that differ by {found:.1e} of their size, where rounding explains {tolerance:.0e}: "
                f"{_way_out(option)}"
            )
        return True
    if all(same(values[0], value) for value in values[1:]):
        return False
    form = f"shape {tuple(values[0].shape)}" if isinstance(values[0], Tensor) else f"class {type(values[0]).__name__}"
    raise ActivationError(
        f"unit {unit} {what} of {form} that has no {each} for each {each} of its input and differs between {option}, "
        f"such as a loss over its batch: {_way_out(option)}"
    )


def _distance(whole: Tensor, halves: Tensor) -> float:
    """The largest distance between two vectors of the last dimension, relative to their norm; 0 if all are equal."""
    if not whole.is_floating_point():
        return 0.0 if torch.equal(whole, halves) else float("inf")
    if not whole.numel():
        return 0.0
    if not torch.equal(whole.isfinite(), halves.isfinite()):
        return float("inf")
    left, right = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (whole, halves))
    if left.dim() == 1:
        left, right = left[:, None], right[:, None]
    norms = left.norm(dim=-1)
    scale = norms + 0.01 * norms.mean()
    return float(((left - right).norm(dim=-1) / scale.clamp_min(1e-300)).max())


class _WithoutDropout(TorchFunctionMode):
    """Dropout returns its input, also inside attention."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is F.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            elif "dropout_p" in kwargs:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _way_out(option: str) -> str:
    return f"give it the policy 'keep', or leave {option}= out"


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    before = [(each, each.training) for each in module.modules()]
    try:
        for each, _ in before:
            each.training = False
        yield
    finally:
        for each, training in before:
            each.training = training


@contextmanager
def _naming_failures(unit: str, count: int, cut: Cut) -> Iterator[None]:
    try:
        yield
    except (RuntimeError, IndexError, ValueError) as error:
        if isinstance(error, (ZeroError, OffloadError, torch.OutOfMemoryError)):
            raise
        shared = "If an argument is shared by all rows, name it in shared=[...]; else " if cut.option == "rows" else ""
        raise ActivationError(
            f"unit {unit} fails on {count} of its {cut.length} {cut.option}, or on {cut.size} of these ({error}), so "
            f"it cannot be computed by {cut.option}. {shared}{_way_out(cut.option)}"
        ) from error


def _with_random_numbers(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # torch.random wants one, which an empty list leaves alone


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
