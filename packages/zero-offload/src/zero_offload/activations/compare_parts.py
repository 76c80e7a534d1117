"""Compares a part of a real batch with its halves, at the first call of each kind of a module that takes parts.

Owns that comparison, and which outputs have a row for each row. Not here: which modules may take parts (in
known_modules.py), and how a batch is cut (in split_batch.py).

[Note: a part and its halves]
The first rows and the last, as many as a part has, are computed at once and then in two halves. Outputs have to agree,
and so do gradients of the inputs for the same gradient of the outputs: the distance of two tokens' vectors is at most
`_TOLERANCE` of their norm, which rounding explains. A module that draws random numbers, as dropout does, is compared in
eval mode. The list of known modules decides the cases that this cannot see, see [Note: known modules].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core import ZeroError, hidden_from_hooks
from ..errors import OffloadError
from .spill import ActivationError
from .split_batch import Cut, not_joined, other_structure, same, unchanged_arguments, way_out

_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004}  # four units in the last place
_EXACT_TOLERANCE = 1e-4  # fp32 and more: reordered sums differ by less, mixed rows by far more


@dataclass(frozen=True)
class Comparison:
    """One call of a module. Some of its rows, or tokens, are computed to be compared, which leaves no trace."""

    of: Any  # a `Recomputed`
    leaves: Sequence[Any]
    structure: Any
    cut: Cut

    def rows_of_outputs(self) -> tuple[bool, ...]:
        """For each leaf of the output, and then for each attribute that the module sets, whether it has a row for each
        row of the input (or a token for each token, as `cut` says); else it is the same for all.

        Raises ActivationError if values differ, if an output is neither, or if an argument is changed in place.
        """
        unit, cut = self.of.name, self.cut
        count = min(max(2, cut.size), cut.length)
        first, last = range(-(-count // 2)), range(cut.length - count // 2, cut.length)
        pieces = [[*first, *last], [*first], [*last]]
        device = next(self.leaves[k].device for k in cut.where)
        with _naming_failures(unit, count, cut), hidden_from_hooks(), torch.enable_grad(), _replayed(device) as drawn:
            found = [self._compute(places) for places in pieces]
            if drawn():
                with _eval_mode(self.of.module):
                    found = [self._compute(places) for places in pieces]
            if len({len(outputs) for outputs, _ in found}) > 1:
                raise other_structure(unit, cut.option)
            sizes = [len(places) for places in pieces]
            together = zip(*(outputs for outputs, _ in found), strict=True)
            joined = tuple(self._has_rows(values, sizes) for values in together)
            for whole, *halves in zip(*(gradients for _, gradients in found), strict=True):
                self._refuse_unequal("gradients of its inputs", whole, halves, max(2 * _tolerance(whole), 1e-3))
        return joined

    def _compute(self, places: Sequence[int]) -> tuple[list[Any], list[Tensor]]:
        """Returns leaves of the output and of set attributes, and the inputs' gradients. places: the rows' indices."""
        cut, unit = self.cut, self.of.name
        index = torch.tensor(places, device=next(self.leaves[k].device for k in cut.where))
        given = [
            leaf.detach().index_select(cut.dim, index) if k in cut.where else _detached(leaf)
            for k, leaf in enumerate(self.leaves)
        ]
        floats = [k for k in sorted(cut.where) if given[k].is_floating_point()]
        inputs = {k: given[k].requires_grad_() for k in floats if self.leaves[k].requires_grad or k == floats[0]}
        handed = [
            leaf.clone() if k in inputs else leaf for k, leaf in enumerate(given)
        ]  # torch lets no leaf be written
        args, kwargs = pytree.tree_unflatten(handed, self.structure)
        changes: dict[Any, Any] = {}
        with unchanged_arguments(unit, args, kwargs, cut.option), self.of.buffers.part(changes, cut.option):
            output = self.of.forward(*args, **kwargs)
        memory = {handed[k].untyped_storage().data_ptr() for k in cut.where if cut.option == "tokens"}
        returned = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        if any(leaf.untyped_storage().data_ptr() in memory for leaf in returned):
            raise ActivationError(
                f"unit {unit} returns one of its inputs, or a view of one, which outputs joined from parts would not "
                f"be: return a copy, {way_out(cut.option)}"
            )
        outputs = pytree.tree_leaves((output, changes))
        return outputs, _gradients(outputs, [*inputs.values()])

    def _has_rows(self, values: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Whether an output has a row for each row. values, sizes: it and its number of rows, at once and in halves."""
        dim = self.cut.dim
        if all(
            isinstance(v, Tensor) and v.dim() > dim and v.shape[dim] == n for v, n in zip(values, sizes, strict=True)
        ):
            self._refuse_unequal("outputs", values[0], values[1:], _tolerance(values[0]))
            return True
        if all(same(values[0], value) for value in values[1:]):
            return False
        raise not_joined(self.of.name, self.cut.option, values[0])

    def _refuse_unequal(self, what: str, whole: Tensor, halves: Sequence[Tensor], tolerance: float) -> None:
        option, dim = self.cut.option, self.cut.dim
        found = _distance(whole, torch.cat(list(halves), dim))
        if not found <= tolerance:
            raise ActivationError(
                f"unit {self.of.name} mixes the {option} of its input: {whole.shape[dim]} {option} at once and "
                f"{halves[0].shape[dim]} at a time give {what} that differ by {found:.1e} of their size, where "
                f"rounding explains {tolerance:.0e}: {way_out(option)}"
            )


def _gradients(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the inputs' gradients. A row's gradient of the output is the same whatever rows are computed with it."""
    asked = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
    if not asked or not inputs:
        return []
    given = [value.detach().nan_to_num(0.0, 0.0, 0.0).cos() for value in asked]
    found = torch.autograd.grad(asked, inputs, given, allow_unused=True)
    return [torch.zeros_like(x) if gradient is None else gradient for gradient, x in zip(found, inputs, strict=True)]


def _tolerance(tensor: Tensor) -> float:
    """Returns the largest relative distance of two vectors that rounding explains."""
    kind, dtype = tensor.device.type, tensor.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return _TOLERANCE.get(dtype, _EXACT_TOLERANCE)


def _distance(whole: Tensor, halves: Tensor) -> float:
    """Returns the largest distance of two vectors of the last dimension, relative to their norm; 0 if all are equal."""
    if not whole.is_floating_point():
        return 0.0 if torch.equal(whole, halves) else float("inf")
    if not whole.numel():
        return 0.0
    if not torch.equal(whole.isfinite(), halves.isfinite()):
        return float("inf")
    left, right = (t.detach().double().nan_to_num(0.0, 0.0, 0.0) for t in (whole, halves))
    if left.dim() == 1:
        left, right = left[:, None], right[:, None]
    norms = left.norm(dim=-1)
    scale = norms + 0.01 * norms.mean()
    return float(((left - right).norm(dim=-1) / scale.clamp_min(1e-300)).max())


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else leaf


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
    except Exception as error:  # whatever a unit raises for a number of rows that it does not expect
        if isinstance(error, (ZeroError, OffloadError, torch.OutOfMemoryError)):
            raise
        shared = (
            ". If an argument is shared by all rows, name it in shared=[...]; else " if cut.option == "rows" else ": "
        )
        raise ActivationError(
            f"unit {unit} fails on {count} of its {cut.length} {cut.option}, or on fewer ({type(error).__name__}: "
            f"{error}), so it cannot be computed by {cut.option}{shared}{way_out(cut.option)}"
        ) from error


@contextmanager
def _replayed(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restores the random states on leaving. Yields a function that returns whether any number was drawn inside."""
    devices = [] if device.type == "cpu" else [device]
    kind = device.type if devices else "cuda"  # torch wants a kind, also where no device is named

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.get_device_module(each).get_rng_state(each) for each in devices)]

    with torch.random.fork_rng(devices, device_type=kind):
        before = states()
        yield lambda: not all(map(torch.equal, before, states()))
