"""`tokens=`: inside of a unit, the modules that act on each token alone take the tokens of a row in parts.

Owns which modules these are. How a forward is cut and run again is `calls`' and `cutting`'s.

[Note: a row in parts]
A unit's forward runs on whole rows, and so does its attention. A module inside of it (an MLP, a norm) that acts on each
token alone computes `tokens` tokens of each row at once. Which modules do is tried at their first call, outermost
first: twice `tokens` tokens at once, and in halves, see [Note: a slice against its halves]. A module that contains
attention fails, runs whole, and the modules inside of it are tried in turn. One that fails without attention mixes
tokens in a way that nobody has checked (a state space, a convolution), and its unit is refused. A layer that is only a
matrix is not tried, because it keeps nothing but its input.

    forward     norm: parts; attention: whole; norm: parts; MLP: part 2, part 1, part 0
    backward    norm, attention and norm again, up to the MLP's input
                MLP: part 0: forward again, backward; part 1: the same; part 2: the same
                attention: backward, whole; norm: part 0: forward again, backward; ...

The unit is one checkpoint, and each part is one inside of it. What a part is computed again from is the module's input,
which is handed to the unit's checkpoint as something that autograd has saved: so it does not live between forward and
backward, but is recomputed. torch ends a recomputation at the last value that was saved. The parts' own checkpoints
hide from the unit's, so an MLP at the end of a block is not computed a third time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from zero_core.building.again import SavedAround, hidden_from_hooks, hooks_around
from zero_core.store import Observer

from .buffers import Buffers
from .calls import Call
from .cutting import Cut, argument_names, flatten, leaves_of, way_out
from .mixing import ReturnsItsInput, SharedInputChanged, Trial
from .spill import STAYS, ActivationError, ChangedInputError, Spilled

__all__ = ["ByTokens"]


class ByTokens:
    """How the modules inside of units compute rows of more than `tokens` tokens."""

    def __init__(
        self, tokens: int, counts: dict[str, int], observer: Observer, begin_part: Callable[[torch.device], None]
    ) -> None:
        self._tokens, self._told, self._begin_part = tokens, (counts, observer), begin_part
        self._length = 0  # tokens of a row of the unit that runs whole; 0: none does, or a part of one
        self._bounded: dict[str, bool] = {}  # units that had a long row: whether a module with a matrix took parts
        self._hooks: Any = None  # for what autograd saves, of the checkpoint of the unit that runs
        self._undo: list[Callable[[], None]] = []

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()

    def entered(self, unit: str, module: nn.Module, *, optional: bool = False) -> Callable[..., Any]:
        """The unit's forward, in which modules take rows in parts. optional: a norm, which takes parts if it can."""
        run = module.forward
        if optional:
            run = self._tried(unit, unit, module)
        for path, each in [] if optional else module.named_modules():
            if path and _keeps_more_than_its_input(each):
                self._replace(each, self._tried(unit, f"{unit}.{path}", each))

        def forward(*args: Any, **kwargs: Any) -> Any:
            length = _row_length(unit, leaves_of((args, kwargs))[0])
            if length <= self._tokens:
                return run(*args, **kwargs)
            with self._of_rows(length):
                output = run(*args, **kwargs)
            if not optional and not self._bounded.setdefault(unit, False):
                raise ActivationError(
                    f"tokens={self._tokens} bounds nothing in unit {unit}: outside of attention it has no module with "
                    "a matrix that acts on each token alone, as where a block calls the layers of its MLP itself; make "
                    "the MLP a module, give the unit the policy 'keep', or leave tokens= out"
                )
            return output

        return forward

    def _replace(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        before = module.__dict__.get("forward")
        module.forward = forward

        def undo() -> None:
            del module.__dict__["forward"]
            if before is not None:
                module.forward = before

        self._undo.append(undo)

    @contextmanager
    def _of_rows(self, length: int) -> Iterator[None]:
        before, self._length = (self._length, self._hooks), length
        self._hooks = hooks_around()
        try:
            yield
        finally:
            self._length, self._hooks = before

    def _tried(self, unit: str, name: str, module: nn.Module) -> Callable[..., Any]:
        """The forward of a module that takes long rows in parts if it acts on each token alone."""
        original, positional, buffers = module.forward, argument_names(module.forward), Buffers(name, module)
        kinds: dict[Any, tuple[bool, ...] | None] = {}  # of the calls that were tried; None: they run whole
        has_matrix = any(parameter.dim() > 1 for parameter in module.parameters())

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            leaves, structure, _ = flatten(args, kwargs, positional) if self._length else ([], None, [])
            cut = _cut_of(leaves, self._length, self._tokens) if self._length else None
            if cut is None:
                return original(*args, **kwargs)
            self._refuse_checkpoint(unit, name)
            trial = Trial(name, module, buffers, original, leaves, structure, cut)
            kind = trial.kind
            if kind not in kinds:
                try:
                    with self._of_rows(0):
                        kinds[kind] = trial.rows_of_outputs()
                except SharedInputChanged:
                    raise
                except ReturnsItsInput:
                    kinds[kind] = None
                except ActivationError as error:
                    kinds[kind] = None
                    return self._attends(unit, name, module, original, (args, kwargs), error)
            joined = kinds[kind]
            if joined is None:
                return original(*args, **kwargs)
            if has_matrix:
                self._bounded[unit] = True
            unit_saves = hooks_around()

            def pack(value: Tensor, own: bool) -> Spilled:
                if unit_saves is None:
                    return STAYS.pack(value, name)
                return SavedAround(value, unit_saves, ChangedInputError(name))

            told = (*self._told, name, original, buffers, pack)
            call = Call(*told, (args, kwargs), leaves, structure, cut, self._begin_part)
            del args, kwargs, leaves, trial
            with self._of_rows(0), hidden_from_hooks() if unit_saves else nullcontext():
                return call.in_parts(cut, joined)

        forward._torchdynamo_disable = True  # type: ignore[attr-defined]
        return forward

    def _refuse_checkpoint(self, unit: str, name: str) -> None:
        """A checkpoint between a unit and its module would count what the parts save, and find other values again."""
        found = hooks_around()
        if found is not None and found != self._hooks and found.of_checkpoint:
            raise ActivationError(
                f"unit {unit} calls {name} inside of an activation checkpoint of its own, within which tokens= cannot "
                "take parts: leave that checkpoint out (tokens= computes the unit again in backward anyway), give the "
                "unit the policy 'keep', or leave tokens= out"
            )

    def _attends(
        self,
        unit: str,
        name: str,
        module: nn.Module,
        original: Callable[..., Any],
        given: tuple[Any, Any],
        error: ActivationError,
    ) -> Any:
        """The output of a module that mixes tokens. Raises ActivationError if it does so without attention."""
        args, kwargs = given
        with _Attention() as watched:
            output = original(*args, **kwargs)
        if not watched.seen and name != unit:
            reason = str(error).removesuffix(f": {way_out('tokens')}")
            raise ActivationError(
                f"unit {unit} does not act on each token alone outside of attention: {name}, a "
                f"{type(module).__name__}, cannot take the tokens of a row in parts ({reason}). Give the unit the "
                "policy 'keep', or leave tokens= out"
            ) from error
        return output


class _Attention(TorchFunctionMode):
    """Sees whether attention is computed: by a function of that name, or as a softmax over pairs of tokens."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, result = getattr(func, "__name__", ""), func(*args, **(kwargs or {}))
        shape = result.shape if "softmax" in name and isinstance(result, Tensor) else ()
        pairs = len(shape) > 3 or (len(shape) == 3 and shape[1] == shape[2])
        self.seen = self.seen or pairs or "attention" in name or "attn" in name
        return result


def _keeps_more_than_its_input(module: nn.Module) -> bool:
    """A linear layer keeps only its input, whoever made it. An activation function is cut with the MLP around it."""
    if hasattr(module, "in_features") or isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        return False
    if next(module.children(), None) is not None or "norm" in type(module).__name__.lower():
        return True
    dims = {parameter.dim() for parameter in module.parameters()}
    return bool(dims) and 2 not in dims


def _hidden(leaves: Sequence[Any]) -> Tensor | None:
    """The first tensor of two or more dimensions that is computed on, and requires a gradient if one does."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
    found = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1]
    return next((tensor for tensor in found if tensor.requires_grad), found[0] if found else None)


def _row_length(unit: str, leaves: Sequence[Any]) -> int:
    """Tokens of a row: hidden states are (rows, tokens, width), or (tokens, width). 0: there are none."""
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
    # Of two dimensions, only the first may be tokens: rows and tokens may be one, and the width as large as a row.
    dims = range(1, len(sizes)) if len(sizes) > 2 else range(len(sizes) > 1)
    dim = next((k for k in dims if sizes[k] == length), None)
    if dim is None:
        return None
    tensors = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > dim]
    where = {k for k, tensor in tensors if tensor.shape[dim] == length and not isinstance(tensor, nn.Parameter)}
    return Cut(length, tokens, frozenset(where), dim, "tokens")
