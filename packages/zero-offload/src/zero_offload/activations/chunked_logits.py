"""Computes a language model's logits when they are used, and their loss by rows: see [Note: logits by rows].

Owns the head's forward, and its output `Logits`, while blocks compute their batches by rows.

[Note: logits by rows]
The logits of a large batch are its largest activation. A head that is called with hidden states (rows, tokens, width)
therefore returns `Logits`: a tensor with the shape and the dtype of all logits, and without memory.

    cross_entropy(logits, labels)    computes logits and loss of `rows` rows, then of the next, and again in backward
    .float() .to(dtype) .view(-1, V) the same: they return `Logits`
    anything else                    computes all logits, once, with the graph to the weights: plain torch's values

A model's own `loss` is thus computed by rows, also where the model flattens the logits or makes them fp32 first. An
operation on the logits before the loss (a soft cap, a scale, a slice) needs all of them, and so do losses with class
weights, label smoothing or probabilities as labels. Their results are right, and take the memory of all logits. Logits
that are used after a step has changed the head are refused, because plain torch would use the old weights. A gradient
of `Logits` themselves, as a torch.autograd.Function returns it, is refused too: it would reach no weight.

    forward    head(hidden): nothing is computed; the head stays gathered until the model's forward ends
               cross_entropy: head(part 2), loss; head(part 1), loss; head(part 0), loss
    backward   part 0: head, loss again, backward; part 1; part 2; then one gradient of the head
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn, overrides
from torch.utils._device import DeviceContext
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from ..core import METADATA, Engine, Stamp, hooks_around, not_traced
from .recompute import Original
from .spill import ActivationError, ChangedInputError
from .split_batch import begin_part, pieces_of

# Views and casts that return `Logits` when they are given `Logits`.
_WAITING: set[Any] = {
    *(Tensor.view, Tensor.reshape, Tensor.flatten, torch.flatten, torch.reshape, Tensor.contiguous),
    *(Tensor.to, Tensor.float, Tensor.type),
}
_UNSEEN: set[Any] = {Tensor.register_hook, Tensor.retain_grad, Tensor.register_post_accumulate_grad_hook}
_KNOWN = (METADATA - _UNSEEN) | {Tensor.__hash__, cast(Any, Tensor).is_cpu.__get__}


class Head:
    """The head of a model, whose forward returns `Logits` where it builds a graph. undo: restores the model's own."""

    def __init__(
        self, engine: Engine, model: nn.Module, head: nn.Linear, units: tuple[int, ...], at_once: tuple[int | None, ...]
    ) -> None:
        self.engine, self.module, self.units = engine, head, units
        self._rows, self._tokens = at_once
        self._inside = self._held = False
        self._original = Original(head)
        self.undo = [
            self._original.replaced(head, self._forward),
            model.register_forward_pre_hook(self._enter).remove,
            model.register_forward_hook(self._leave, always_call=True).remove,
        ]

    @staticmethod
    def of(engine: Engine, model: nn.Module, rows: int | None, tokens: int | None) -> Head | None:
        """The model's head, if it is a plain linear layer that opens units of its own; else None."""
        head = getattr(model, "get_output_embeddings", lambda: None)()
        units = next((node.units for node in engine.nodes if node.module is head), None)
        if type(head) is not nn.Linear or units is None or "forward" in head.__dict__:
            return None
        return Head(engine, model, head, units, (rows, tokens))

    def _enter(self, model: nn.Module, args: Any) -> None:
        self._inside = True

    def _leave(self, model: nn.Module, args: Any, output: Any) -> None:
        self._inside = False
        if self._held:
            self._held = False
            self.engine.uses.release(self.units)

    def _forward(self, given: Any) -> Any:
        if isinstance(given, _Asked):
            return given(self._original)
        weight = self.module.weight
        several = isinstance(given, Tensor) and given.dim() > 2  # whatever the rows, so that all ranks do the same
        graph = torch.is_grad_enabled() and (given.requires_grad or weight.requires_grad)
        watched = len(self.module._forward_hooks) + len(self.module._forward_pre_hooks) > 2  # ours are one of each
        replaced = not isinstance(weight, nn.Parameter)  # by torch.func.functional_call, for this call alone
        modes = (type(mode) for mode in overrides._get_current_function_mode_stack())
        around = hooks_around() is not None or any(mode is not DeviceContext for mode in modes)
        if not several or not graph or watched or replaced or around or torch._C._are_functorch_transforms_active():
            return self._original(given)
        if self._inside and not self._held:
            self.engine.uses.hold(self.units)
            self._held = True
        return Logits.of(_Later(self, given), torch.Size((*given.shape[:-1], self.module.out_features)))

    def at_once(self, hidden: Tensor) -> int:
        """Tokens of a part: those of `rows` rows, or `tokens` of each row. hidden: (rows, tokens, width)."""
        count, length = len(hidden), hidden[0, ..., 0].numel()
        return min(self._rows or count, count) * min(self._tokens or length, length)


class _Later:
    """The inputs of logits that are computed later. `all`: the logits, once something needed all of them."""

    def __init__(self, head: Head, hidden: Tensor) -> None:
        self.head, self.hidden = head, hidden
        self._stamp = Stamp(version for u in head.units for version in head.engine.units[u].versions)
        self._version = hidden._version
        self._narrow = _autocast(hidden.device.type)
        self.dtype = self._own_dtype = hidden.dtype if self._narrow is None else self._narrow
        self.all: Tensor | None = None

    def cast(self, dtype: torch.dtype) -> _Later | None:
        """Logits of memory of their own, as a cast makes. None: these are cast already, and two casts round twice."""
        if self.dtype != self._own_dtype:
            return None
        other = copy.copy(self)
        vars(other).update(dtype=dtype)
        return other

    def whole(self) -> Tensor:
        """All logits, with their graph. A write into them is seen by every view."""
        if self.all is None:
            with torch._C._InferenceMode(False), torch.enable_grad():
                self.all = self._ask(partial(self._computed, self.hidden))
        return self.all

    def loss(self, labels: Tensor, ignore_index: int, reduction: str) -> Tensor:
        """The cross entropy () of the logits. labels: (number of tokens,) int64."""
        total = self._ask(partial(self._loss, labels, ignore_index))
        loss = total if reduction == "sum" else total / (labels != ignore_index).sum()
        return loss if _autocast(labels.device.type) is not None else loss.to(self.dtype)  # as torch's

    def _ask(self, compute: Callable[..., Tensor]) -> Tensor:
        if not self._stamp.current():
            raise ActivationError(
                "a step or a write has changed the head since the forward, and with rows= or tokens= the head computes "
                "logits only when they are used: use the logits before step(). Or take logits.clone() before step()"
            )
        if self.hidden._version != self._version:
            raise ChangedInputError("head", head=True)
        return cast(Tensor, self.head.module(_Asked(compute)))

    def _computed(self, hidden: Tensor, forward: Callable[[Tensor], Tensor]) -> Tensor:
        kind = hidden.device.type
        if not torch.amp.is_autocast_available(kind):
            return forward(hidden).to(self.dtype)
        with torch.autocast(kind, self._narrow, enabled=self._narrow is not None, cache_enabled=False):
            return forward(hidden).to(self.dtype)

    def _loss(self, labels: Tensor, ignore_index: int, forward: Callable[..., Tensor]) -> Tensor:
        def of_part(hidden: Tensor, wanted: Tensor) -> Tensor:
            begin_part(labels.device)
            logits = self._computed(hidden, forward)
            losses = F.cross_entropy(logits, wanted, ignore_index=ignore_index, reduction="none")
            # A sum in 16 bits would be rounded once a part.
            return losses.sum(dtype=torch.promote_types(losses.dtype, torch.float32))

        size = self.head.at_once(self.hidden)
        piece, wanted = pieces_of(self.hidden.flatten(0, -2), size), labels.split(size)
        of = partial(checkpoint, of_part, use_reentrant=False, preserve_rng_state=False)
        losses = [of(piece(k), wanted[k]) for k in reversed(range(len(wanted)))]
        return torch.stack(losses[::-1]).sum()


def _autocast(kind: str) -> torch.dtype | None:
    """The dtype of the autocast that is in force on a type of device; None if there is none."""
    available = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.get_autocast_dtype(kind) if available else None


class _Asked(partial[Tensor]):
    """The argument with which the head's module is called to compute, so that its hooks gather the weights."""


class Logits(Tensor):
    """All logits of a batch, without memory, in the shape that the head gave them, or with fewer dimensions."""

    later: _Later

    @classmethod
    def of(cls, later: _Later, shape: torch.Size) -> Logits:
        made: Logits = cls._make_wrapper_subclass(
            cls, shape, dtype=later.dtype, device=later.hidden.device, requires_grad=True
        )
        made.later = later
        with torch._C.DisableTorchFunctionSubclass():
            made.register_hook(_refuse_gradient)
        return made

    def _whole(self) -> Tensor:
        """All logits in this shape."""
        with torch.enable_grad():
            return self.later.whole().view(self.shape)

    def _waits(self, func: Any, args: Any, kwargs: Any) -> Logits | None:
        """The result of a view or a cast, if it can be `Logits` too; else None."""
        if func is Tensor.to and args == (self.device,):
            return self
        given = torch.empty(self.shape, dtype=self.dtype, device="meta")
        try:
            found = func(given, *args, **kwargs)
        except NotImplementedError:  # of a meta tensor: it goes to another device
            return None
        if not isinstance(found, Tensor) or found.shape[-1:] != self.shape[-1:] or not found.is_floating_point():
            return None
        later = self.later if cast(Any, torch._C)._is_alias_of(found, given) else self.later.cast(found.dtype)
        return None if later is None else Logits.of(later, found.shape)

    @classmethod
    @not_traced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if func in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        inputs = args[1:2] if func is torch.autograd.grad else None
        wanted = tree_leaves((inputs, kwargs.get("inputs")))  # by which autograd differentiates
        if func in _UNSEEN or any(isinstance(each, Logits) for each in wanted):
            raise ActivationError(
                f"{func.__name__} on logits: rows= and tokens= compute logits and loss in parts, so a gradient of all "
                "logits never exists. Leave rows= and tokens= out"
            )
        if isinstance(first, Logits) and first.later.all is None:
            found: Tensor | None = None
            if func in _WAITING:
                found = first._waits(func, args[1:], kwargs)
            elif func is F.cross_entropy:
                found = first._cross_entropy(*args[1:], **kwargs)
            if found is not None:
                return found
        args, kwargs = tree_map_only(Logits, Logits._whole, (args, kwargs))
        return func(*args, **kwargs)

    def _cross_entropy(
        self,
        target: Any,
        weight: Any = None,
        size_average: Any = None,
        ignore_index: int = -100,
        reduce: Any = None,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
    ) -> Tensor | None:
        """As torch.nn.functional's, by rows. None: it needs all logits."""
        plain = weight is None and size_average is None and reduce is None and not label_smoothing
        fits = self.dim() == 2 and tuple(target.shape) == tuple(self.shape[:1]) and target.dtype == torch.int64
        if not plain or not fits or reduction not in ("mean", "sum"):
            return None
        return self.later.loss(target, ignore_index, reduction)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise ActivationError(
            f"{func} needs the memory of logits that rows= or tokens= has not computed yet: use logits.clone() there, "
            "or leave rows= and tokens= out"
        )


def _refuse_gradient(gradient: Tensor) -> None:
    """Raises: torch's functions compute with `Logits._whole`, so a gradient of `Logits` would reach no weight."""
    raise ActivationError(
        "a gradient of logits that rows= or tokens= computes later came from a function that they cannot follow, such "
        "as a torch.autograd.Function or a reentrant checkpoint, and would be lost: use logits.clone() there, or leave "
        "rows= and tokens= out"
    )
