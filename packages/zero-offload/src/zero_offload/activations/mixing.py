"""Finds out, at the first call of each unit, whether it computes its rows apart from each other.

Owns that comparison, and what a unit returns for each row. What is cut, and how, is `cutting`'s.

[Note: a slice against its halves]
Twice `rows` rows are computed at once, then `rows` at a time, without gradients and from the same random state. The two
differ by rounding only if no row depends on another, and by more if a BatchNorm, a router with a limited capacity or a
contrastive loss has mixed them. Dropout is off meanwhile, as it has no seed per row. A unit that still draws random
numbers is compared in eval mode. Two tokens' vectors agree if they are within `taint.tolerance_of` of the vector's
norm. This is done with the first rows and with the last. What it cannot see is sought in three more ways, see `taint`:
by operations that carry values, by a row of NaN, and by gradients. A new kind of call is tried again, see `Trial.kind`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from zero_core import ZeroError

from ..errors import OffloadError
from .buffers import Buffers
from .cutting import Cut, leaves_of, same, unchanged_arguments, way_out
from .spill import ActivationError
from .taint import Carriers, NotSavedByUnit, distance, refuse_gradients, refuse_tainted, tolerance_of

__all__ = ["ReturnsItsInput", "SharedInputChanged", "Trial", "refuse_batch_norm"]

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
                f"of a batch, and rows= would compute them over a few: {way_out('rows')}, or use GroupNorm or "
                "LayerNorm"
            )


class ReturnsItsInput(ActivationError):
    """An output lies in the memory of an input, which outputs of parts that are joined cannot."""


class SharedInputChanged(ActivationError):
    """The trial itself changed an argument that all parts share, so that nothing can be computed on it any more."""


def _is_plain(leaf: Any) -> bool:
    return isinstance(leaf, (bool, int, float, str))


@dataclass
class _Found:
    """outputs: the leaves of the output, and then of the attributes that were changed. returned: how many are of the
    output. inputs: the copies that were computed on. drawn: random numbers were. carried: by `Carriers`."""

    outputs: list[Any]
    returned: int
    inputs: list[Tensor]
    drawn: bool
    carried: list[tuple[str, tuple[int, ...]]]


@dataclass
class Trial:
    """One call of a unit, of which some rows are computed to find out whether it may be cut. It leaves no trace."""

    unit: str
    module: nn.Module
    buffers: Buffers
    forward: Callable[..., Any]
    leaves: Sequence[Any]
    structure: Any
    cut: Cut

    @property
    def kind(self) -> Any:
        """What calls have to have in common for the trial of one to hold for the other."""
        values = tuple(
            (leaf.dtype, leaf.dim()) if isinstance(leaf, Tensor) else (type(leaf), leaf if _is_plain(leaf) else None)
            for leaf in self.leaves
        )
        inside = [each for each in self.module.modules() if each is not self.module]
        hooks = tuple((*each._forward_hooks, *each._forward_pre_hooks) for each in inside)
        training, cut = (self.module.training, *(each.training for each in inside)), self.cut
        return training, hooks, str(self.structure), cut.where, cut.dim, min(2 * cut.size, cut.length), values

    def rows_of_outputs(self) -> tuple[bool, ...]:
        """For each leaf of the unit's output, and then for each attribute that it changes, whether it has a row for
        each row of the input (or a token for each token, as `cut` says); else it is the same for all.

        Raises ActivationError if rows depend on each other, if an output is neither, or if an argument is changed in
        place.
        """
        unit, cut = self.unit, self.cut
        count = min(2 * cut.size, cut.length)
        with _naming_failures(unit, count, cut), NotSavedByUnit():
            joined, first = self.compare(0, count)
            if cut.length > count and self.compare(cut.length - count, count)[0] != joined:
                raise ActivationError(
                    f"unit {unit} returns other outputs for the last {cut.option} than for the first: "
                    f"{way_out(cut.option)}"
                )
            with torch.no_grad(), _WithoutDropout():
                for at in sorted({0, count // 2, count - 1}):
                    found = self.compute(0, count, at)
                    refuse_tainted(unit, cut, "forward", found.outputs, first, at, joined)
            few = min(max(2, cut.size), cut.length)  # of which the graph takes no more memory than that of a part
            refuse_gradients(unit, cut, self, few, joined)
        return joined

    @property
    def _device(self) -> torch.device:
        return next(leaf.device for k, leaf in enumerate(self.leaves) if k in self.cut.where)

    @property
    def _differentiable(self) -> list[int]:
        floats = [k for k in sorted(self.cut.where) if self.leaves[k].is_floating_point()]
        return [k for k in floats if self.leaves[k].requires_grad] or floats[:1]

    def compute(self, start: int, size: int, tainted: int | None = None) -> _Found:
        """tainted: the row, of these, whose values are NaN."""
        cut, device = self.cut, self._device
        given = [
            leaf.detach().clone() if k in cut.where else _detached(leaf)
            for k, leaf in enumerate(cut.rows_of(self.leaves, start, size))
        ]
        for k in cut.where:
            if tainted is not None and given[k].is_floating_point():
                given[k].select(cut.dim, tainted).fill_(float("nan"))
        for k in self._differentiable:
            given[k].requires_grad_(torch.is_grad_enabled() or self.leaves[k].requires_grad)
        inputs, handed = [given[k] for k in self._differentiable], list(given)
        for k in self._differentiable if torch.is_grad_enabled() else ():
            handed[k] = given[k].view_as(given[k])  # as a leaf may not be written, which would be torch's word for it
        versions = [leaf._version if isinstance(leaf, Tensor) else 0 for leaf in handed]
        with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=_with_random_numbers(device)):
            before = _random_state(device)
            args, kwargs = pytree.tree_unflatten(handed, self.structure)
            changes: dict[Any, Any] = {}
            carriers = Carriers(self.module)
            with unchanged_arguments(self.unit, args, kwargs, cut.option), self.buffers.part(changes, cut.option):
                with carriers:
                    output = self.forward(*args, **kwargs)
            drawn = not all(map(torch.equal, before, _random_state(device)))
        self._refuse_changed(handed, versions)
        returned = leaves_of(output)[0]
        if cut.option == "tokens":
            self._refuse_returned(returned, [handed[k] for k in cut.where])
        return _Found(leaves_of((output, changes))[0], len(returned), inputs, drawn, carriers.seen)

    def _refuse_changed(self, given: Sequence[Any], versions: Sequence[int]) -> None:
        option = self.cut.option
        for k, (leaf, version) in enumerate(zip(given, versions, strict=True)):
            if isinstance(leaf, Tensor) and leaf._version != version:
                kind = ActivationError if k in self.cut.where else SharedInputChanged
                raise kind(
                    f"unit {self.unit} changes a tensor of shape {tuple(leaf.shape)} in place that it is given, and "
                    f"{option}= would hand it copies: compute out of place, {way_out(option)}"
                )

    def _refuse_returned(self, outputs: Sequence[Any], given: Sequence[Tensor]) -> None:
        places = {tensor.untyped_storage().data_ptr() for tensor in given}
        if any(isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in places for leaf in outputs):
            raise ReturnsItsInput(
                f"unit {self.unit} returns a tensor that it is given, or a view of it, which joined outputs are not"
            )

    without_dropout = staticmethod(lambda: _WithoutDropout())

    def alone(self, compute: Callable[[], list[_Found]]) -> list[_Found]:
        """What is computed without random numbers: in eval mode if the unit draws more than dropout does."""
        with _WithoutDropout():
            found = compute()
            if any(each.drawn for each in found):
                with _eval_mode(self.module):
                    found = compute()
        return found

    def compare(self, start: int, count: int) -> tuple[tuple[bool, ...], list[Any]]:
        """Which outputs have rows, and the outputs for `count` rows at once."""
        unit, cut = self.unit, self.cut
        pieces = [(start, count), (start, cut.size), (start + cut.size, count - cut.size)]
        carried: list[_Found] = []

        def compute() -> list[_Found]:
            found = [self.compute(*piece) for piece in pieces]
            carried.extend(found[:2])
            return found

        with torch.no_grad():
            found = self.alone(compute)
        whole, *halves = (each.outputs for each in found)
        if len({len(each) for each in (whole, *halves)}) > 1:
            raise ActivationError(
                f"unit {unit} returns outputs of another structure for other {cut.option}: {way_out(cut.option)}"
            )
        sizes, outputs = [size for _, size in pieces], found[0].returned
        joined = tuple(
            _has_rows(unit, "returns an output" if k < outputs else "keeps in an attribute a value", values, sizes, cut)
            for k, values in enumerate(zip(whole, *halves, strict=True))
        )
        for left, right in zip(carried[::2], carried[1::2], strict=True):
            Carriers.refuse(unit, cut, left.carried, right.carried)
        return joined, whole


def _has_rows(unit: str, what: str, values: Sequence[Any], sizes: Sequence[int], cut: Cut) -> bool:
    dim, option, each = cut.dim, cut.option, cut.option.removesuffix("s")
    if all(isinstance(v, Tensor) and v.dim() > dim and v.shape[dim] == n for v, n in zip(values, sizes, strict=True)):
        whole, halves = values[0], torch.cat(list(values[1:]), dim)
        tolerance = tolerance_of(whole.dtype)
        found = distance(whole, halves)
        if not found <= tolerance:
            raise ActivationError(
                f"unit {unit} mixes the {option} of {_WHOLE[option]}: {sizes[0]} {option} at once and {sizes[1]} at a "
                f"time give outputs that differ by {found:.1e} of their size, where rounding explains {tolerance:.0e}: "
                f"{way_out(option)}"
            )
        return True
    if all(same(values[0], value) for value in values[1:]):
        return False
    form = f"shape {tuple(values[0].shape)}" if isinstance(values[0], Tensor) else f"class {type(values[0]).__name__}"
    raise ActivationError(
        f"unit {unit} {what} of {form} that has no {each} for each {each} of its input and differs between {option}, "
        f"such as a loss over its batch: {way_out(option)}"
    )


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
        shared = "If an argument is shared by all rows, name it in shared=[...]; else " if cut.option == "rows" else ""
        raise ActivationError(
            f"unit {unit} fails on {count} of its {cut.length} {cut.option}, or on some of these "
            f"({type(error).__name__}: {error}), so it cannot be computed by {cut.option}. {shared}"
            f"{way_out(cut.option)}"
        ) from error


def _with_random_numbers(device: torch.device) -> str:
    return "cuda" if device.type == "cpu" else device.type  # torch.random wants one, which an empty list leaves alone


def _random_state(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states
