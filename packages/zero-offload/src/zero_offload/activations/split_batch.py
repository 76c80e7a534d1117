"""Cuts a unit's arguments into parts of the batch, and joins the parts' outputs.

Owns which tensors are cut and which are passed whole. Not here: which units allow it (in known_modules.py).

[Note: which tensors are cut]
The batch is the first dimension of the unit's hidden states: its first floating-point tensor of two or more dimensions,
of those that require a gradient if there are any. Tensors are found in structures that torch's pytree knows: tuples,
lists, dicts, outputs of transformers, and dataclasses registered by `torch.export.register_dataclass`.

    first dimension    a part gets
    the batch          its rows
    anything else      the whole tensor: position tables (1, T, d), masks (1, 1, T, T) or (T, T), numbers, parameters

Where the hidden states have another dimension of the batch's size, a tensor that begins with this size may be either,
so the user has to name the arguments that all rows share. A tensor that all rows share gets its gradient from every
part; these are added in fp32, as autograd would add them in the tensor's dtype.

[Note: memory between parts]
On the CPU, the values that a part leaves until all parts are done, its output and the small objects of the graph, are
between the freed tensors of the part, and glibc cannot use these holes for the tensors of the next part. So freed
memory is returned to the kernel between parts: not always, as each page costs a fault when it is used again, but when
the process has grown by the memory that two parts leave (`zero_core.util.freed_memory.FreedMemory`).
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core import FreedMemory, tensors_of
from .spill import ActivationError, keep

_PACKED = set("cu_seqlens cu_seqlens_q cu_seqlens_k cu_seq_lens_q cu_seq_lens_k cu_window_seqlens seq_idx".split())
_FREED = FreedMemory()  # of the process, as its heap is


def begin_part(device: torch.device) -> None:
    """Called before each part is computed: see [Note: memory between parts]."""
    if device.type == "cpu":
        _FREED.begin()


@dataclass(frozen=True)
class Cut:
    """`length` rows of a batch, or tokens of a row, in parts of `size`. The last part may be smaller.

    where: the leaves that are cut, along the dimension `dim`. option: the option that asked for parts, "rows" or
    "tokens".
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

    def part(self, leaves: Sequence[Any], part: int) -> list[Any]:
        """The leaves with only the rows of this part: views; copies for some tokens of several rows."""
        return [
            _as_whole(leaf, leaf.narrow(self.dim, part * self.size, self.sizes[part])) if k in self.where else leaf
            for k, leaf in enumerate(leaves)
        ]

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
    """A function that returns piece k, of `size` along `dim`."""
    pieces = tensor.split(size, dim)
    return lambda k: _as_whole(tensor, pieces[k])


def _as_whole(tensor: Tensor, piece: Tensor) -> Tensor:
    """The piece, made contiguous if the tensor is, because modules may view it in another shape."""
    return piece.contiguous() if tensor.is_contiguous() else piece


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
                f"argument {name!r} of unit {unit} is of class {type(leaf).__name__} with tensors of {batch} rows, "
                f"but rows= can only cut tuples, lists and dicts. If class {type(leaf).__name__} is a dataclass, call "
                f"torch.export.register_dataclass({type(leaf).__name__}). Else {way_out('rows', unit)}"
            )
    where = {k for k, tensor in tensors if tensor.shape[0] == batch and names[k] not in (shared or ())}
    unclear = sorted({names[k] for k in where if k != first})
    if shared is None and unclear and batch in lead.shape[1:]:
        raise ActivationError(
            f"argument {names[first]!r} of unit {unit} has shape {tuple(lead.shape)}. rows= cannot tell whether the "
            f"first dimension of {', '.join(map(repr, unclear))}, also {batch}, is the batch. If so, pass shared=[] to "
            f"offload_activations. If all rows share the argument whole, pass shared={unclear}"
        )
    return Cut(batch, rows, frozenset(where))


def _refuse_packed(unit: str, name: str, tensor: Tensor, batch: int, rows: int) -> None:
    """Refuses offsets of sequences over all rows. Tensors that restart in each row, as position_ids, may be cut."""
    if name in _PACKED and not (tensor.dim() > 1 and tensor.shape[0] == batch):
        raise ActivationError(
            f"unit {unit} computes sequences that are packed over {batch} rows (argument {name!r} has shape "
            f"{tuple(tensor.shape)}), and rows={rows} would cut them: pack each row of a batch by itself with "
            "position_ids. Or pack all into one row and use tokens=. Or leave rows= out"
        )


def names_of_leaves(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> list[str]:
    """For each leaf of a call's arguments, the name of its argument."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    positional = [name for name, each in inspect.signature(function).parameters.items() if each.kind in kinds]
    named = [*positional[: len(args)], *(f"argument {k}" for k in range(len(positional), len(args))), *kwargs]
    counts = [len(pytree.tree_leaves(value)) for value in (*args, *kwargs.values())]
    return [name for name, count in zip(named, counts, strict=True) for _ in range(count)]


@contextmanager
def unchanged_arguments(unit: str, args: Any, kwargs: Any, option: str) -> Iterator[None]:
    """A context for the forward of a part.

    Raises ActivationError if the forward writes into an argument, which may be a copy, or changes which tensors a list,
    a dict or an object has: later code would find one part's tensors there.
    """
    given = [(tensor, tensor._version) for tensor in tensors_of((*args, *kwargs.values()))]
    yield
    now = list(tensors_of((*args, *kwargs.values())))
    for tensor, version in given:
        if tensor._version != version and not isinstance(tensor, nn.Parameter):
            raise ActivationError(
                f"module {unit} changes one of its inputs in place, a tensor of shape {tuple(tensor.shape)}. With "
                f"{option}= it may change only a copy: compute out of place. Or {way_out(option, unit)}"
            )
    if [*map(id, now)] != [id(tensor) for tensor, _ in given]:
        raise ActivationError(
            f"module {unit} adds, replaces or removes tensors in an argument (a list, a dict or an object), "
            f"and {option}= would repeat that for each part of a batch: {way_out(option, unit)}"
        )


def is_state(value: Any) -> bool:
    """Whether it is a random generator, of torch, numpy or Python, or an array of numpy."""
    return isinstance(value, torch.Generator) or type(value).__module__.partition(".")[0] in ("numpy", "random")


def as_found(leaf: Any) -> Any:
    """An argument to compute with again: objects are copied one level deep, because a forward may change them."""
    if is_state(leaf):
        return leaf.clone_state() if isinstance(leaf, torch.Generator) else copy.deepcopy(leaf)
    if isinstance(leaf, (Tensor, nn.Module)) or callable(leaf) or not hasattr(leaf, "__dict__"):
        return leaf
    try:
        return copy.copy(leaf)
    except TypeError:  # such as a handle of a library: it holds nothing that a forward changes
        return leaf


class Joined:
    """A unit's output, joined from its parts'. rows: for each leaf, whether it has rows; else all parts' are equal."""

    def __init__(self, unit: str, cut: Cut, rows: Sequence[bool]) -> None:
        self._unit, self._cut, self._rows = unit, cut, rows
        self._structure: Any = None
        self._found: list[list[Any]] = []  # per leaf: its parts, from the last to the first; or the one for all parts

    def add(self, k: int, output: Any) -> None:
        """Adds the output of part k. The last part comes first."""
        leaves, structure = pytree.tree_flatten(output)
        if self._structure is None:
            self._structure, self._found = structure, [[] for _ in leaves]
        if structure != self._structure or len(leaves) != len(self._rows):
            raise other_structure(self._unit, self._cut.option)
        for leaf, found, rows in zip(leaves, self._found, self._rows, strict=True):
            first = found[0] if found else leaf
            if not (self._fits(leaf, first, k) if rows else same(first, leaf)):
                raise not_joined(self._unit, self._cut.option, leaf)
            if rows or not found:
                found.append(leaf)

    def _fits(self, leaf: Any, other: Any, k: int) -> bool:
        """Whether a leaf has a row for each row of part k, and otherwise the shape and dtype of another part's leaf."""
        if not isinstance(leaf, Tensor) or not isinstance(other, Tensor) or leaf.dim() <= self._cut.dim:
            return False
        form = list(other.shape)
        form[self._cut.dim] = self._cut.sizes[k]
        return list(leaf.shape) == form and leaf.dtype == other.dtype

    def whole(self) -> Any:
        leaves, self._found = zip(self._found, self._rows, strict=True), []
        values = [torch.cat(found[::-1], self._cut.dim) if rows else found[0] for found, rows in leaves]
        return pytree.tree_unflatten(values, self._structure)


def other_structure(unit: str, option: str) -> ActivationError:
    return ActivationError(
        f"module {unit} returns outputs whose structure differs between {option}, so {option}= cannot join "
        f"them: {way_out(option, unit)}"
    )


def not_joined(unit: str, option: str, leaf: Any) -> ActivationError:
    form = f"shape {tuple(leaf.shape)}" if isinstance(leaf, Tensor) else f"class {type(leaf).__name__}"
    return ActivationError(
        f"module {unit} returns, or stores in an attribute, a value of {form}, such as a loss over all {option}. "
        f"With {option}= each part gives another value, and they cannot be joined into one: {way_out(option, unit)}"
    )


def same(left: Any, right: Any) -> bool:
    """Whether two outputs are equal, bit for bit where they are tensors. Objects that hold tensors never are."""
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return left.shape == right.shape and left.dtype == right.dtype and torch.equal(left.detach(), right.detach())
    return type(left) is type(right) and next(tensors_of(left), None) is None and bool(left == right)


def way_out(option: str, name: str) -> str:
    """The advice of an error. With tokens= modules inside of a unit are cut, and have no policy of their own."""
    named = "" if option == "rows" else f"if token_modules= names {name}, leave it out there. Or "
    return f"{named}{keep(name, unit=option == 'rows')}. Or leave {option}= out"
