"""Cuts what a unit is given into parts of the batch, and joins what the unit returned for each part.

Owns which tensors are cut and which are passed whole. Not here: which units allow it (in known.py).

[Note: which tensors are cut]
The batch is the first dimension of the unit's hidden states: its first floating-point tensor of two or more dimensions,
of those that require a gradient if there are any. Tensors are found in tuples, lists, dicts and dataclasses.

    first dimension    what a part gets
    the batch          its rows
    anything else      the whole tensor: position tables (1, T, d), masks (1, 1, T, T) or (T, T), numbers, parameters

Where the hidden states have another dimension of the batch's size, a tensor that begins with this size may be either,
so the user has to name the arguments that all rows share. A tensor that all rows share gets its gradient from every
part; these are added in fp32, as autograd would add them in the tensor's dtype.

[Note: memory between parts]
What one part leaves for the time when all are done must not lie between the memory of two parts, or the heap grows with
their number. So each part's output is copied into one tensor for all rows, and so is the gradient of each part's input.
What stands for the two in the graph meanwhile has their shape and one element.
On the CPU, the small objects of the graph lie between the freed tensors of a part, and glibc cannot use these holes for
the tensors of the next part. So freed memory is returned to the kernel between parts: not always, as each page costs a
fault when it is used again, but when the process has grown by what two parts leave (`zero_core.heap.FreedMemory`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from zero_core.runtime.outputs import tensors_of

from .spill import ActivationError

__all__ = [
    "Cut",
    "Joined",
    "argument_names",
    "as_found",
    "find_cut",
    "flatten",
    "leaves_of",
    "pieces_of",
    "same",
    "unchanged_arguments",
    "way_out",
]

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
    """`length` rows of a batch, or tokens of a row, in parts of `size`, of which the last may be smaller.

    where: the leaves that are cut, along the dimension `dim`. option: what asked for parts, "rows" or "tokens".
    """

    length: int
    size: int
    where: frozenset[int]
    dim: int = 0
    option: str = "rows"

    @property
    def parts(self) -> int:
        return -(-self.length // self.size)

    @property
    def sizes(self) -> list[int]:
        return [min(self.size, self.length - start) for start in range(0, self.length, self.size)]

    def rows_of(self, leaves: Sequence[Any], start: int, size: int) -> list[Any]:
        """The leaves with only these rows: views, but for some tokens of several rows."""
        return [
            _as_whole(leaf, leaf.narrow(self.dim, start, size)) if k in self.where else leaf
            for k, leaf in enumerate(leaves)
        ]

    def part(self, leaves: Sequence[Any], k: int) -> list[Any]:
        return self.rows_of(leaves, k * self.size, self.sizes[k])

    def parts_of(self, leaves: Sequence[Any]) -> Callable[[int], list[Any]]:
        """A function that returns the leaves of part k, with their graph. Call it when the part is computed."""
        columns = [self._over_parts(k, leaf) for k, leaf in enumerate(leaves)]
        return lambda k: [column(k) for column in columns]

    def _over_parts(self, k: int, leaf: Any) -> Callable[[int], Any]:
        if k in self.where:
            return pieces_of(leaf, self.size, self.dim)
        if isinstance(leaf, Tensor) and leaf.requires_grad and leaf.dtype.itemsize == 2:
            wide = leaf.float()
            return lambda part: wide.to(leaf.dtype)
        return lambda part: leaf


def pieces_of(tensor: Tensor, size: int, dim: int = 0) -> Callable[[int], Tensor]:
    """A function that returns piece k, of `size` along `dim`. Backward writes the gradients of the pieces into one
    tensor as they come, see [Note: memory between parts]."""
    if not tensor.requires_grad:
        return lambda k: _as_whole(tensor, tensor.split(size, dim)[k])
    gradient = _GradientOfPieces(tensor.shape, size, dim)
    pieces = _Pieces.apply(tensor, size, dim, gradient)
    return lambda k: _as_whole(tensor, _Piece.apply(pieces[k], k, gradient))


def _as_whole(tensor: Tensor, piece: Tensor) -> Tensor:
    """The piece, contiguous if the tensor is: what computes on one may view it in another shape."""
    return piece.contiguous() if tensor.is_contiguous() else piece


class _GradientOfPieces:
    """The gradient of a tensor that was cut. A piece that got none has zeros."""

    def __init__(self, shape: Sequence[int], size: int, dim: int) -> None:
        self._shape, self._size, self._dim = shape, size, dim
        self._task, self._values, self._missing = -1, None, set()  # type: int, Tensor | None, set[int]

    def put(self, k: int, gradient: Tensor) -> None:
        task = torch._C._current_graph_task_id()
        if self._values is None or task != self._task:  # of a backward that failed
            self._values, self._task = gradient.new_empty(self._shape), task
            self._missing = set(range(-(-self._shape[self._dim] // self._size)))
        self._values.narrow(self._dim, k * self._size, gradient.shape[self._dim]).copy_(gradient)
        self._missing.discard(k)

    def take(self) -> Tensor:
        values, self._values = self._values, None
        assert values is not None
        for k in self._missing:
            values.split(self._size, self._dim)[k].zero_()
        return values


class _Pieces(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, size: int, dim: int, gradient: _GradientOfPieces) -> tuple[Tensor, ...]:
        ctx.gradient = gradient
        ctx.set_materialize_grads(False)
        return tensor.split(size, dim)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        return ctx.gradient.take(), None, None, None


class _Piece(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, piece: Tensor, k: int, gradient: _GradientOfPieces) -> Tensor:
        ctx.k, ctx.gradient = k, gradient
        return piece.view_as(piece)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.gradient.put(ctx.k, gradients[0])
        return _stub(gradients[0]), None, None


class _Put(torch.autograd.Function):
    """Writes a part of an output to its place. What it returns has the part's shape and graph, and no memory."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, place: Tensor) -> Tensor:
        place.copy_(part)
        return _stub(part)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], None


class _Whole(torch.autograd.Function):
    """The tensor in `values`, into which all parts were put."""

    @staticmethod
    def forward(ctx: Any, values: list[Tensor], sizes: list[int], dim: int, *stubs: Tensor) -> Tensor:
        ctx.sizes, ctx.dim = sizes, dim
        return values.pop()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, None, None, *gradients[0].split(ctx.sizes, ctx.dim)


def _stub(of: Tensor) -> Tensor:
    """The shape and dtype, and one element of memory."""
    return of.new_zeros(()).expand(of.shape)


def find_cut(
    unit: str, leaves: Sequence[Any], names: Sequence[str], rows: int, shared: Sequence[str] | None
) -> Cut | None:
    """How a unit's arguments are cut into parts of `rows` rows; None if they are one part.

    names: for each leaf, its argument. shared: arguments that all rows share; None: the user has named none.
    Raises ActivationError where a batch cannot be cut, or only by a guess.
    """
    given = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim()]
    tensors = [(k, tensor) for k, tensor in given if not isinstance(tensor, nn.Parameter)]
    hidden = [(k, t) for k, t in tensors if t.is_floating_point() and t.dim() > 1 and names[k] not in (shared or ())]
    if not tensors:
        return None
    first, lead = next((pair for pair in hidden if pair[1].requires_grad), (hidden or tensors)[0])
    batch = lead.shape[0]
    if batch <= rows:
        return None
    for k, tensor in tensors:
        _refuse_packed(unit, names[k], tensor, batch, rows)
    for name, leaf in zip(names, leaves, strict=True):
        if not isinstance(leaf, Tensor) and any(t.dim() and t.shape[0] == batch for t in tensors_of(leaf)):
            raise ActivationError(
                f"unit {unit} is given {name} of class {type(leaf).__name__}, which holds tensors of {batch} rows and "
                "is neither a tuple, list, dict nor dataclass, so it cannot be cut: give it the policy 'keep', or "
                "leave rows= out"
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


def _refuse_packed(unit: str, name: str, tensor: Tensor, batch: int, rows: int) -> None:
    """Refuse offsets of sequences over all rows. What restarts inside of a row, as position_ids do, is cut with it."""
    if name in _PACKED and not (tensor.dim() > 1 and tensor.shape[0] == batch):
        raise ActivationError(
            f"unit {unit} computes sequences that are packed over {batch} rows (it is given {name} of shape "
            f"{tuple(tensor.shape)}), and rows={rows} would cut them: pack each row of a batch by itself with "
            "position_ids, pack all into one row and use tokens=, or leave rows= out"
        )


def argument_names(function: Callable[..., Any]) -> list[str]:
    """The names of a function's positional arguments."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]


def flatten(args: Sequence[Any], kwargs: dict[str, Any], positional: Sequence[str]) -> tuple[list[Any], Any, list[str]]:
    """The leaves of a call's arguments, their structure, and for each leaf the name of its argument."""
    leaves, structure = leaves_of((tuple(args), kwargs))
    named = [*positional[: len(args)], *(f"argument {k}" for k in range(len(positional), len(args))), *kwargs]
    counts = [len(leaves_of(value)[0]) for value in (*args, *kwargs.values())]
    return leaves, structure, [name for name, count in zip(named, counts, strict=True) for _ in range(count)]


def leaves_of(value: Any) -> tuple[list[Any], Any]:
    return pytree.tree_flatten(_opened(value))


@contextmanager
def unchanged_arguments(unit: str, args: Any, kwargs: Any, option: str) -> Iterator[None]:
    """The forward of a part runs inside of this. Raises ActivationError if it changes which tensors are in a list, a
    dict or an object that it is given: what comes after it would find those of one part there."""
    values = (*args, *kwargs.values())
    given = list(tensors_of(values))
    yield
    now = list(tensors_of(values))
    if len(now) != len(given) or any(left is not right for left, right in zip(now, given, strict=True)):
        raise ActivationError(
            f"unit {unit} puts tensors into a list, a dict or an object that it is given, which {option}= would make "
            f"it do for each part: {way_out(option)}"
        )


def as_found(leaf: Any) -> Any:
    """An argument to compute with again: of an object, a copy of one level, as a forward may change what it holds."""
    if isinstance(leaf, (Tensor, nn.Module)) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return leaf
    try:
        return copy.copy(leaf)
    except TypeError:  # such as a handle of a library: it holds nothing that a forward changes
        return leaf


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


class Joined:
    """One output of a unit from those of its parts. rows: for each leaf, whether it has rows; else all are the same."""

    def __init__(self, unit: str, cut: Cut, rows: Sequence[bool]) -> None:
        self._unit, self._cut, self._rows = unit, cut, rows
        self._structure: Any = None
        self._values: list[Any] = []  # leaf by leaf: memory for all rows, or what the first part returned
        self._stubs: list[list[Tensor | None]] = [[None] * cut.parts for _ in rows]

    def add(self, k: int, output: Any) -> None:
        """Takes what part k returned; its memory is not needed any more."""
        leaves, structure = leaves_of(output)
        if self._structure is None:
            self._structure = structure
            self._values = [
                leaf.new_empty(self._form(leaf, self._cut.length)) if rows and isinstance(leaf, Tensor) else leaf
                for leaf, rows in zip(leaves, self._rows, strict=False)
            ]
        if structure != self._structure or len(leaves) != len(self._rows):
            raise ActivationError(
                f"unit {self._unit} returned outputs of another structure for other {self._cut.option}, which cannot "
                f"be joined: {way_out(self._cut.option)}"
            )
        for place, leaf in enumerate(leaves):
            if self._rows[place]:
                self._put(place, k, leaf)
            elif not same(self._values[place], leaf):
                self._refuse(leaf)

    def _put(self, place: int, k: int, leaf: Any) -> None:
        into, size = self._values[place], self._cut.sizes[k]
        form = self._form(into, size) if isinstance(into, Tensor) else None
        if not isinstance(leaf, Tensor) or tuple(leaf.shape) != form or leaf.dtype != into.dtype:
            self._refuse(leaf)
        self._stubs[place][k] = _Put.apply(leaf, into.detach().narrow(self._cut.dim, k * self._cut.size, size))

    def _form(self, leaf: Tensor, size: int) -> tuple[int, ...]:
        return (*leaf.shape[: self._cut.dim], size, *leaf.shape[self._cut.dim + 1 :])

    def _refuse(self, leaf: Any) -> None:
        form = f"a tensor of shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"a {type(leaf).__name__}"
        option, one = self._cut.option, f"one {self._cut.option.removesuffix('s')}"
        raise ActivationError(
            f"unit {self._unit} returned {form}, which is neither {one} for each of its input nor the same for "
            f"all {option}, such as a loss over its batch: {way_out(option)}"
        )

    def whole(self) -> Any:
        values = [
            _Whole.apply([value], self._cut.sizes, self._cut.dim, *stubs) if rows else value
            for value, stubs, rows in zip(self._values, self._stubs, self._rows, strict=True)
        ]
        return pytree.tree_unflatten(values, self._structure)


def same(left: Any, right: Any) -> bool:
    """Whether two outputs are equal, bit for bit where they are tensors."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left.detach(), right.detach())
    return type(left) is type(right) and bool(left == right)


def way_out(option: str) -> str:
    """tokens= cuts modules inside of a unit, which have no policy of their own."""
    return f"give {'it' if option == 'rows' else 'its unit'} the policy 'keep', or leave {option}= out"
