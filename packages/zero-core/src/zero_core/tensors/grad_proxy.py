"""Stands in for a gradient that has left for the store: `p.grad` between backward and step, and norms of it.

Owns which torch functions need no memory. The parameter's places answer for the gradient.

[Note: norms of held gradients]
torch.nn.utils.clip_grad_norm_ takes the norm of each gradient, the norm of these norms, and multiplies each gradient.
Norms of single gradients are therefore not computed until somebody reads one: the norm of all of them is the one that
step() needs, which the store has summed already while gradients arrived. Factors are kept for the step, too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..active_calls import not_traced
from ..device import sent
from ..errors import GradientError
from .version_counters import Stamp
from .writeback_views import COPYING, METADATA, REPLACING, FullCopy, call_with_copies, name_of

_T: Any = Tensor


class HeldGradient(Tensor):
    """Stands for a gradient that has left for the store: knows its shape, and answers clipping without it.

    Everything else is computed from a copy of the full gradient, and in-place changes of it are kept. home: where the
    parameter is, a `parameter_access.Place`, or a `stacked_parameter.Stacked` of several places.
    """

    home: Any
    stamp: Stamp

    def __new__(cls, parameter: Tensor, home: Any) -> HeldGradient:
        graph = any(place.unit.gradient.graphs[place.index] for place in home.places)
        self: HeldGradient = _made(cls, parameter.shape, parameter.dtype, parameter.device, graph)
        self.home, self.stamp = home, _stamp(home)
        return self

    def check(self) -> None:
        if not self.stamp.alive():
            raise GradientError(
                f"this {self.home.name}.grad was read before a step() or zero_grad(), which freed the gradient. Read "
                "p.grad again after backward(), or keep a copy, p.grad.clone()"
            )

    @classmethod
    @not_traced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LEAVES and [*args[1:], *kwargs.values(), True][0]:
            raise GradientError(
                f"{args[0].home.name}.grad.requires_grad_(): the gradient is in shards, and no gradient of it would be "
                "computed. Clone it first, p.grad.clone()"
            )
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        for held in (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, HeldGradient)):
            held.check()
            for place in held.home.places:
                if (refusal := place.refuse(name_of(func))) is not None:
                    raise GradientError(f"{name_of(func)} on the gradient of {held.home.name} is refused: {refusal}")
            if torch.is_grad_enabled() and func not in _THE_SAME and held.requires_grad:
                raise GradientError(
                    f"{name_of(func)} on {held.home.name}.grad after backward(create_graph=True): the gradient is in "
                    "shards, which have no graph, so a loss of p.grad would not train the model. For such a loss, take "
                    "gradients from torch.autograd.grad(loss, parameters, create_graph=True). To read values alone, "
                    "write p.grad.detach()"
                )
        if func in _THE_SAME:
            return args[0] if func is Tensor.contiguous else HeldGradient(args[0], args[0].home).requires_grad_(False)
        if (order := _order(func, args, kwargs)) is not None:
            norm = torch.linalg.vector_norm
            norms = [HeldNorm.of(g, order) if isinstance(g, cls) else norm(g, order) for g in _listed(args[0])]
            return norms if isinstance(args[0], (list, tuple)) else norms[0]
        if func in _PRODUCTS and len(args) == 2 and not kwargs and (factor := _factor(func, args[1])) is not None:
            for g in _listed(args[0]):
                for place in g.home.places if isinstance(g, HeldGradient) else ():
                    place.multiply_gradient(factor)
                if not isinstance(g, HeldGradient):
                    g.mul_(factor)
            return args[0] if isinstance(args[0], Tensor) else None
        if func is torch._amp_foreach_non_finite_check_and_unscale_:  # of torch.amp.GradScaler
            norm, (gradients, found_inf, inverse_scale) = torch.linalg.vector_norm, args
            if not math.isfinite(norm(torch.stack([norm(g) for g in gradients]))):
                found_inf.fill_(1.0)
            return torch._foreach_mul_(gradients, inverse_scale)
        if func in _ONE_BY_ONE and len(args) == 2 and not isinstance(args[1], (list, tuple)):
            for gradient in args[0]:  # a copy of one of them at a time
                _ONE_BY_ONE[func](gradient, args[1])
            return None
        return call_with_copies(HeldGradient, GradientCopy, func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise GradientError(
            f"{func} works on the memory of a tensor, and p.grad of a sharded parameter has none: use "
            "zero_core.full_gradient(parameter) instead, a plain tensor"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldGradient({tuple(_T.shape.__get__(self))})"

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)


class HeldNorm(Tensor):
    """Norms of held gradients, () or (n,), fp32, computed when they are read. See [Note: norms of held gradients]."""

    parts: list[tuple[HeldGradient, Stamp] | Tensor]  # a gradient as it was then; or a number that is known
    order: float

    def __new__(cls, parts: Any, order: float, shape: tuple[int, ...], device: torch.device) -> HeldNorm:
        self: HeldNorm = _made(cls, torch.Size(shape), torch.float32, device)
        self.parts, self.order = parts, order
        return self

    @classmethod
    def of(cls, gradient: HeldGradient, order: float) -> HeldNorm:
        return cls([(gradient, _stamp(gradient.home))], order, (), gradient.device)

    @classmethod
    def stacked(cls, norms: Sequence[Tensor]) -> HeldNorm | None:
        """All of them in one tensor; None if their orders differ."""
        first = next(norm for norm in norms if isinstance(norm, HeldNorm))
        with torch._C.DisableTorchFunctionSubclass():
            same = all(norm.dim() == 0 and norm.device == first.device for norm in norms)
        if not same or any(norm.order != first.order for norm in norms if isinstance(norm, HeldNorm)):
            return None
        parts = [part for n in norms for part in (n.parts if isinstance(n, HeldNorm) else [n])]
        return cls(parts, first.order, (len(norms),), first.device)

    def value(self) -> Tensor:
        """The norms themselves."""
        if _T.dim(self) == 0:
            return self.total()
        return torch.stack([p if isinstance(p, Tensor) else _norm(self.order, [p], self.device) for p in self.parts])

    def total(self) -> Tensor:
        """The norm of these norms."""
        return _norm(self.order, self.parts, self.device)

    @classmethod
    @not_traced
    def __torch_function__(cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if func is torch.stack and len(args) == 1 and not kwargs and (made := cls.stacked(args[0])) is not None:
            return made
        if func in _THE_SAME or (func is Tensor.to and _stays(args, kwargs)):
            return args[0]
        if isinstance(args[0], HeldNorm) and _order(func, args, kwargs) == args[0].order:
            return args[0].total()
        args, kwargs = tree_map_only(HeldNorm, HeldNorm.value, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return func(*tree_map_only(HeldNorm, HeldNorm.value, args), **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.value())

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.value().__reduce_ex__(protocol)


def _made(cls: Any, shape: torch.Size, dtype: torch.dtype, device: torch.device, graph: bool = False) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device, requires_grad=graph)


def _norm(order: float, parts: Sequence[Any], device: torch.device) -> Tensor:
    """() fp32: of held gradients and of norms that are known."""
    held = [part for part in parts if not isinstance(part, Tensor)]
    for gradient, stamp in held:
        gradient.check()
        if not stamp.current():
            raise GradientError(
                f"a norm of {gradient.home.name}.grad is read after the gradient has changed. Norms are computed when "
                "they are read: call norm.item() before you change the gradient"
            )
    known = [float(part) for part in parts if isinstance(part, Tensor)]
    places = [place for gradient, _ in held for place in gradient.home.places]
    found = places[0].power_sum(places, order) if held else 0.0
    if math.isinf(order):
        total = math.nan if any(map(math.isnan, [found, *known])) else max([found, *known])
    else:
        total = (found + math.fsum(number**order for number in known)) ** (1.0 / order)
    return sent(torch.tensor(total, dtype=torch.float32, device="cpu"), device)


def _stamp(home: Any) -> Stamp:
    """Of the gradient as it is now."""
    return Stamp(place.gradient_version for place in home.places)


def _listed(given: Any) -> Sequence[Any]:
    return given if isinstance(given, (list, tuple)) else [given]


def _stays(args: Any, kwargs: Any) -> bool:
    """Whether `tensor.to(...)` asks for the device where it is."""
    if len(args) != 2 or kwargs or not isinstance(args[1], (str, torch.device)):
        return False
    with torch._C.DisableTorchFunctionSubclass():
        return torch.device(args[1]) == args[0].device


def _order(func: Any, args: Any, kwargs: Any) -> float | None:
    """The p of a call that asks for the p-norm of each whole tensor; None for all other calls."""
    others = [value for key, value in kwargs.items() if key not in ("ord", "p")]
    if func not in _NORMS or len(args) > 2 or any(value is not None and value is not False for value in others):
        return None
    given = [*args[1:], *(kwargs[key] for key in ("ord", "p") if key in kwargs), 2.0][0]
    if isinstance(given, str) or given is None:
        return 2.0 if given in ("fro", None) else None
    return float(given) if float(given) > 0 else None


def _factor(func: Any, by: Any) -> Tensor | float | None:
    """The factor that `func` multiplies by, if it is one exact number for all elements."""
    divides = func in _QUOTIENTS
    if isinstance(by, Tensor):
        return by if by.numel() == 1 and not divides and not by.is_complex() else None
    if isinstance(by, (bool, complex)) or not isinstance(by, (int, float)):
        return None
    if not divides:
        return float(by)
    exact = by != 0 and abs(math.frexp(by)[0]) == 0.5  # dividing by other numbers rounds otherwise
    return 1.0 / by if exact else None


class GradientCopy(FullCopy):
    """The full values of a held gradient."""

    owner: HeldGradient

    def __init__(self, held: HeldGradient) -> None:
        found = held.home.join(lambda place: place.gradient())
        super().__init__(held, found.to(held.dtype), _stamp(held.home))  # kept gradients are reduced before the stamp

    def check(self) -> None:
        self.owner.check()
        if not self.stamp.current():
            raise GradientError(
                f"a view of {self.owner.home.name}.grad is used after the gradient has changed: it holds the old "
                "values. Take a new view, or call view.clone() before the change"
            )

    def write_back(self) -> None:
        self.check()
        for place, part, _ in self.owner.home.cut(self.values.detach()):
            place.overwrite_gradient(part)
        self.stamp.renew()

    def refuse(self, func: Any) -> None:
        if func is Tensor.__dlpack__:
            raise GradientError(
                f"from_dlpack of {self.owner.home.name}.grad would share memory with a copy, where a write would be "
                "lost. Pass a clone, from_dlpack(p.grad.clone()), and write back with p.grad.copy_()"
            )
        if func in REPLACING:
            raise GradientError(
                f"the memory of {self.owner.home.name}.grad cannot be replaced or shared (p.grad.data = tensor, "
                "share_memory_(), torch.distributed): writes there would be lost. Write p.grad.copy_(tensor), or "
                "zero_core.set_full_gradient(p, tensor)"
            )

    def is_owner(self, func: Any) -> bool:
        return func not in COPYING  # a gradient ends, and the result of such a call does not


_LEAVES: set[Any] = {Tensor.requires_grad_, _T.requires_grad.__set__}
_THE_SAME: set[Any] = {Tensor.detach, _T.data.__get__, Tensor.contiguous}
_NORMS: set[Any] = {torch.linalg.vector_norm, torch.norm, Tensor.norm, torch._foreach_norm}
_QUOTIENTS: set[Any] = {Tensor.div_, Tensor.__itruediv__, torch._foreach_div_}
_PRODUCTS: set[Any] = {Tensor.mul_, Tensor.__imul__, torch._foreach_mul_, *_QUOTIENTS}
_ONE_BY_ONE: dict[Any, Callable[..., Any]] = {
    torch._foreach_div_: Tensor.div_,
    torch._foreach_clamp_min_: Tensor.clamp_min_,
    torch._foreach_clamp_max_: Tensor.clamp_max_,
}
