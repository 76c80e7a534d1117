"""Makes the modules of a unit that act on each token alone take a row's tokens in parts, for `tokens=`.

Owns the forward of these modules. Not here: which they are (in known_modules.py), how a forward is cut and run again
(in recompute.py and split_batch.py).

[Note: a row in parts]
A unit's forward runs on whole rows, and so does its attention. A module inside of it that is known to act on each token
alone, an MLP or a norm, or that the user names, computes `tokens` tokens of each row at once. Of such modules that lie
in each other, the outermost does. A unit in which none has a matrix is refused, as nothing in it would be bounded.

    forward     norm: parts; attention: whole; norm: parts; MLP: part 2, part 1, part 0
    backward    norm, attention and norm again, up to the MLP's input
                MLP: part 0: forward again, backward; part 1: the same; part 2: the same
                attention: backward, whole; norm: part 0: forward again, backward; ...

The unit is one checkpoint, and each part is one inside of it. A part is computed again from the module's input, which
is handed to the unit's checkpoint as a tensor that autograd has saved: so it does not live between forward and
backward, but is recomputed. torch ends a recomputation at the last value that was saved. The parts' own checkpoints
are hidden from the unit's, so an MLP at the end of a block is not computed a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import wraps
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core import Hooks, Observer, SavedAround, hidden_from_hooks, hooks_around
from .known_modules import stranger
from .recompute import Recomputed, replaced
from .spill import STAYS, ActivationError, ChangedInputError, Spilled
from .split_batch import Cut


class ByTokens:
    """Computes rows of more than `tokens` tokens in parts, in modules inside of units. named: by the user."""

    def __init__(
        self, tokens: int, named: Container[nn.Module], counts: dict[str, int], observer: Observer, undone: ExitStack
    ) -> None:
        """undone: takes the functions that restore the modules' own forward."""
        self._tokens, self._named, self._undone = tokens, named, undone
        self._counts, self._observer = counts, observer
        self._length = 0  # tokens of a row of the unit that runs; 0: none runs, or a part of a row does
        self._hooks: Hooks | None = None  # saved-tensor hooks of the checkpoint of the unit that runs

    def knows(self, module: nn.Module) -> bool:
        """Whether the module takes parts itself."""
        return not stranger(module, "tokens", self._named)

    def entered(self, unit: str, module: nn.Module) -> Callable[..., Any]:
        """The unit's forward, in which the unit or modules inside of it take rows in parts.

        That forward raises ActivationError for a long row if no module with a matrix takes parts.
        """
        run, bounded = module.forward, self.knows(module)
        if bounded:
            run = self._in_parts(unit, module)
        for path, each in [] if bounded else [*self._outermost("", module)]:
            bounded = bounded or any(parameter.dim() > 1 for parameter in each.parameters())
            self._undone.callback(replaced(each, self._in_parts(f"{unit}.{path}", each)))

        def forward(*args: Any, **kwargs: Any) -> Any:
            length = _row_length(unit, pytree.tree_leaves((args, kwargs)))
            if length <= self._tokens:
                return run(*args, **kwargs)
            if not bounded:
                raise ActivationError(
                    f"tokens={self._tokens} has no effect in unit {unit}, a {type(module).__name__}: none of its "
                    "modules is known to act on each token separately. If one does, such as an MLP, name it with "
                    "token_modules=['*.mlp']; else give the unit the policy 'keep', or leave tokens= out"
                )
            with self._of_rows(length):
                return run(*args, **kwargs)

        return forward

    def _outermost(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules inside that take parts. A single matrix does not, as it saves only its input."""
        for name, child in module.named_children():
            at = f"{path}.{name}".lstrip(".")
            if self.knows(child):
                yield at, child
            else:
                yield from self._outermost(at, child)

    @contextmanager
    def _of_rows(self, length: int) -> Iterator[None]:
        before, self._length = (self._length, self._hooks), length
        self._hooks = hooks_around()
        try:
            yield
        finally:
            self._length, self._hooks = before

    def _in_parts(self, name: str, module: nn.Module) -> Callable[..., Any]:
        """The forward of a module that takes long rows in parts."""
        original = module.forward
        recomputed = Recomputed(name, module, original, self._counts, self._observer)

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._length:
                return original(*args, **kwargs)
            leaves, structure = pytree.tree_flatten((args, kwargs))
            cut, around = _cut_of(leaves, self._length, self._tokens), hooks_around()
            if cut is None or around != self._hooks:  # a checkpoint of the unit's own, say, computes the module again
                self._counts["delegated"] += cut is not None
                return original(*args, **kwargs)

            def pack(value: Tensor, own: bool) -> Spilled:
                if around is None:
                    return STAYS.pack(value, name)
                return SavedAround(value, around, ChangedInputError(name))

            with self._of_rows(0), nullcontext() if around is None else hidden_from_hooks():
                return recomputed.call(args, kwargs, leaves, structure, cut, pack)

        return forward


def _hidden(leaves: Sequence[Any]) -> Tensor | None:
    """The hidden states: the first floating-point tensor of 2 or more dimensions, with a gradient if any has one."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
    found = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1]
    return next((tensor for tensor in found if tensor.requires_grad), found[0] if found else None)


def _row_length(unit: str, leaves: Sequence[Any]) -> int:
    """Tokens of a row of the hidden states (rows, tokens, width) or (tokens, width). 0: there are none."""
    lead = _hidden(leaves)
    if lead is not None and lead.dim() > 3:
        raise ActivationError(
            f"unit {unit} is given hidden states of shape {tuple(lead.shape)}, where tokens= needs (rows, tokens, "
            "width): give it the policy 'keep', or leave tokens= out"
        )
    return 0 if lead is None else lead.shape[-2]


def _cut_of(leaves: Sequence[Any], length: int, tokens: int) -> Cut | None:
    """How a module's arguments are cut into parts of `tokens` tokens; None: they are not `length` tokens."""
    lead = _hidden(leaves)
    sizes = () if lead is None else lead.shape
    # Not the last one, the width, and of two only the first: rows and tokens may be one.
    dims = range(1, len(sizes) - 1) if len(sizes) > 2 else range(len(sizes) > 1)
    dim = next((k for k in dims if sizes[k] == length), None)
    if dim is None:
        return None
    tensors = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > dim]
    where = {k for k, tensor in tensors if tensor.shape[dim] == length and not isinstance(tensor, nn.Parameter)}
    return Cut(length, tokens, frozenset(where), dim, "tokens")
