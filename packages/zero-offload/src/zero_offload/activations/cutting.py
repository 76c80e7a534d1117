"""Cuts what a unit is given into parts of the batch, and joins what the unit returned for each part.

Owns which tensors are cut and which are passed whole. Whether the unit computes its rows apart is `mixing`'s to say.

[Note: which tensors are cut]
The batch is the first dimension of the unit's hidden states: its first floating-point tensor of two or more dimensions,
of those that require a gradient if there are any. Tensors are found in tuples, lists, dicts and dataclasses.

    first dimension    what a part gets
    the batch          its rows
    anything else      the whole tensor: position tables (1, T, d), masks (1, 1, T, T) or (T, T), numbers

Where the hidden states have another dimension of the batch's size, a tensor that begins with this size may be either,
so the user has to name the arguments that all rows share. A tensor that all rows share gets its gradient from every
part; these are added in fp32, as autograd would add them in the tensor's dtype.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from zero_core.runtime.outputs import tensors_of

from .spill import ActivationError

__all__ = ["Cut", "argument_names", "find_cut", "flatten", "join"]

_PACKED = (
    "cu_seqlens",
    "cu_seqlens_q",
    "cu_seqlens_k",
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "cu_window_seqlens",
    "seq_idx",
)


@dataclass(frozen=True)
class Cut:
    """`batch` rows in parts of `rows`, of which the last may be smaller. `where`: the leaves that are cut."""

    batch: int
    rows: int
    where: frozenset[int]

    @property
    def parts(self) -> int:
        return -(-self.batch // self.rows)

    @property
    def sizes(self) -> list[int]:
        return [min(self.rows, self.batch - start) for start in range(0, self.batch, self.rows)]

    def rows_of(self, leaves: Sequence[Any], start: int, size: int) -> list[Any]:
        """The leaves with only these rows, which are views."""
        return [leaf.narrow(0, start, size) if k in self.where else leaf for k, leaf in enumerate(leaves)]

    def part(self, leaves: Sequence[Any], k: int) -> list[Any]:
        return self.rows_of(leaves, k * self.rows, self.sizes[k])

    def all_parts(self, leaves: Sequence[Any]) -> list[list[Any]]:
        """The leaves of every part. One node of the graph joins the gradients of a tensor's rows, and no sum does."""
        columns = [self._over_parts(k, leaf) for k, leaf in enumerate(leaves)]
        return [list(part) for part in zip(*columns, strict=True)]

    def _over_parts(self, k: int, leaf: Any) -> Sequence[Any]:
        if k in self.where:
            pieces: Sequence[Any] = leaf.split(self.rows)
            return pieces
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dtype.itemsize == 2:
            wide = leaf.float()
            return [wide.to(leaf.dtype) for _ in range(self.parts)]
        return [leaf] * self.parts


def find_cut(
    unit: str, leaves: Sequence[Any], names: Sequence[str], rows: int, shared: Sequence[str] | None
) -> Cut | None:
    """How a unit's arguments are cut into parts of `rows` rows; None if they are one part.

    names: for each leaf, its argument. shared: arguments that all rows share; None: the user has named none.
    Raises ActivationError where a batch cannot be cut, or only by a guess.
    """
    tensors = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()]
    hidden = [(k, t) for k, t in tensors if t.is_floating_point() and t.dim() > 1 and names[k] not in (shared or ())]
    if not tensors:
        return None
    first, lead = next((pair for pair in hidden if pair[1].requires_grad), (hidden or tensors)[0])
    batch = lead.shape[0]
    for k, tensor in tensors:
        _refuse_packed(unit, names[k], tensor, batch)
    if batch <= rows:
        return None
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, Tensor) and any(t.dim() and t.shape[0] == batch for t in tensors_of(leaf)):
            raise ActivationError(
                f"unit {unit} is given {name} of class {type(leaf).__name__}, which holds tensors of {batch} rows and "
                "is neither a tuple, list, dict nor dataclass, so it cannot be cut: give this unit the policy 'keep', "
                "or leave rows= out"
            )
    where = {k for k, tensor in tensors if tensor.shape[0] == batch and names[k] not in (shared or ())}
    unclear = sorted({names[k] for k in where if k != first})
    if shared is None and unclear and batch in lead.shape[1:]:
        raise ActivationError(
            f"unit {unit} is given {names[first]} of shape {tuple(lead.shape)}, so for {', '.join(unclear)} a first "
            f"dimension of {batch} may be the batch or not: name the arguments that all rows share, "
            "offload_activations(..., shared=[...]), where shared=[] says that there are none"
        )
    return Cut(batch, rows, frozenset(where))


def _refuse_packed(unit: str, name: str, tensor: Tensor, batch: int) -> None:
    restarts = name == "position_ids" and batch == 1 and tensor.dim() == 2 and tensor.shape[1] > 1
    if name in _PACKED or (restarts and bool((tensor[:, 1:] <= tensor[:, :-1]).any())):
        how = f"its {name} restart" if restarts else f"it is given {name}"
        raise ActivationError(
            f"unit {unit} computes sequences that are packed into one row ({how}), which rows= cannot cut: pack each "
            "row of a batch by itself, or pad, or leave rows= out and bound the tokens of a row"
        )


def argument_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]


def flatten(args: Sequence[Any], kwargs: dict[str, Any], positional: Sequence[str]) -> tuple[list[Any], Any, list[str]]:
    """The leaves of a call's arguments, their structure, and for each leaf the name of its argument."""
    leaves, structure = _leaves_of((tuple(args), kwargs))
    named = [*positional[: len(args)], *(f"argument {k}" for k in range(len(positional), len(args))), *kwargs]
    counts = [len(_leaves_of(value)[0]) for value in (*args, *kwargs.values())]
    return leaves, structure, [name for name, count in zip(named, counts, strict=True) for _ in range(count)]


def _leaves_of(value: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(_opened(value))


class _Opened:
    """A dataclass with tensors, which pytree would take for a leaf."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _opened(value: Any) -> Any:
    def open_leaf(leaf: Any) -> Any:
        whole = is_dataclass(leaf) and not isinstance(leaf, type)
        return _Opened(leaf) if whole and next(tensors_of(leaf), None) is not None else leaf

    return pytree.tree_map(open_leaf, value)


def _flatten_fields(opened: _Opened) -> tuple[list[Any], Any]:
    names = tuple(field.name for field in fields(opened.value))
    return [_opened(getattr(opened.value, name)) for name in names], (type(opened.value), names)


def _unflatten_fields(values: Any, context: Any) -> Any:
    kind, names = context
    made = object.__new__(kind)
    for name, value in zip(names, values, strict=True):
        object.__setattr__(made, name, value)
    return made


pytree.register_pytree_node(_Opened, _flatten_fields, _unflatten_fields)


def join(unit: str, outputs: Sequence[Any], sizes: Sequence[int], joined: Sequence[bool]) -> Any:
    """One output from those of the parts. joined: for each leaf, whether it has rows; else all are the same."""
    flat = [_leaves_of(output) for output in outputs]
    structure = flat[0][1]
    if any(other != structure for _, other in flat) or structure.num_leaves != len(joined):
        raise ActivationError(
            f"unit {unit} returned outputs of another structure for other rows, which cannot be joined: give it the "
            "policy 'keep', or leave rows= out"
        )
    columns = zip(*(leaves for leaves, _ in flat), strict=True)
    return pytree.tree_unflatten(
        [_one(unit, c, sizes, rows) for c, rows in zip(columns, joined, strict=True)], structure
    )


def _one(unit: str, values: Sequence[Any], sizes: Sequence[int], joined: bool) -> Any:
    if joined and all(
        isinstance(v, Tensor) and v.dim() and v.shape[0] == n for v, n in zip(values, sizes, strict=True)
    ):
        return torch.cat(list(values))
    if joined or not all(same(values[0], value) for value in values[1:]):
        raise ActivationError(
            f"unit {unit} returned something that is neither one row for each row of its input nor the same for all "
            f"rows ({_form(values[0])}), such as a loss over its batch: give it the policy 'keep', or leave rows= out"
        )
    return values[0]


def same(left: Any, right: Any) -> bool:
    """Whether two outputs are equal, bit for bit where they are tensors."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left.detach(), right.detach())
    return type(left) is type(right) and bool(left == right)


def _form(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
