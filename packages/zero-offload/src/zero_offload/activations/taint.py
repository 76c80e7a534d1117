"""What a comparison of values does not see: how rows of a batch, or tokens of a row, reach each other nevertheless.

Owns three searches, which `mixing` runs on the arguments of a call.

[Note: how mixing shows]
    a row of NaN      No other row may become NaN, in forward and in backward. So a gate of zero hides nothing, nor do
                      rows that are equal, and a small share beside a large residual counts as much as a large one.
    gradients         Those of the inputs have to be the same for a slice and for its halves, with an arbitrary gradient
                      of the outputs and with none, where only a loss that a backward adds by itself is left.
    operations        A sum over all rows before (the place of a token in an expert of limited capacity) shows only once
                      a limit is exceeded, a far neighbour reaches further than a slice is long, and a table of
                      positions may begin with zeros. So operations that carry values along a dimension, and slices of
                      parameters, are refused where the size of these grows with the slice.

NaN and operations are sought in the mode, training or evaluation, that the module is in; dropout is off. What none of
this finds: positions and sums that are read from elsewhere than the arguments, a rank among all tokens by a sort (which
mixtures of experts use harmlessly), kernels that torch does not see, and what changes later without any argument.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from .cutting import Cut, way_out
from .spill import ActivationError

__all__ = ["Carriers", "NotSavedByUnit", "distance", "refuse_gradients", "refuse_tainted", "tolerance_of"]

_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004}  # four units in the last place
_EXACT_TOLERANCE = 1e-4  # fp32 and more: what sums in another order leave, and far below what mixing does
_ALONG = {  # operations, and which argument says along which dimensions they carry values
    **dict.fromkeys(
        ("cumsum", "cumsum_", "cumprod", "cumprod_", "logcumsumexp", "_logcumsumexp", "cummax", "cummin"), 1
    ),
    **dict.fromkeys(("_cummax_helper", "_cummin_helper"), 3),
    **dict.fromkeys(("flip", "unfold", "_fft_c2c", "_fft_r2c", "_fft_c2r"), 1),
    **dict.fromkeys(("roll", "topk"), 2),
}
_WINDOWS = ("conv", "_pool", "upsample")  # parts of names of what carries values along all dimensions but two


class NotSavedByUnit(saved_tensors_hooks):
    """What autograd saves inside of this belongs to the trial, and not to the checkpoint around it."""

    def __init__(self) -> None:
        super().__init__(lambda saved: saved.detach() if saved.requires_grad else saved, lambda saved: saved)


class Carriers(TorchDispatchMode):
    """Notes which operations carry values along a dimension, and how long this is; and slices of parameters. Those of a
    trial inside of this one are not noted."""

    _open: ClassVar[list[Carriers]] = []

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        with torch._C.DisableTorchFunctionSubclass():  # a parameter of another unit need not be gathered
            self._tables = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()} - {0}
        self.seen: list[tuple[str, tuple[int, ...]]] = []

    def __enter__(self) -> Carriers:
        self._open.append(self)
        super().__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._open.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._open[-1] is not self:
            return func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name == "slice":
            result = func(*args, **(kwargs or {}))
            if args[0].untyped_storage().data_ptr() in self._tables:  # such as positions up to the last token
                self.seen.append((name, tuple(result.shape)))
            return result
        if args and isinstance(args[0], Tensor) and "backward" not in name:
            shape = args[0].shape
            if name in _ALONG:
                self.seen.append((name, _sizes(shape, name, args, kwargs or {})))
            elif any(part in name for part in _WINDOWS) and len(shape) > 2:
                self.seen.append((name, tuple(shape[2:])))
        return func(*args, **(kwargs or {}))

    @staticmethod
    def refuse(unit: str, cut: Cut, whole: Sequence[Any], half: Sequence[Any]) -> None:
        """Raise ActivationError if the length of a dimension grows with the number of rows or tokens."""
        differ = [(left, right) for left, right in zip(whole, half, strict=False) if left != right]
        if differ or len(whole) != len(half):
            name = differ[0][0][0] if differ else max(whole, half, key=len)[-1][0]
            raise ActivationError(
                f"unit {unit} mixes the {cut.option}: {name} carries values from one to others, over {cut.option} that "
                f"are not in one part: {way_out(cut.option)}"
            )


def _sizes(shape: Sequence[int], name: str, args: Any, kwargs: Any) -> tuple[int, ...]:
    place = _ALONG[name]
    dims = args[place] if len(args) > place else kwargs.get("dim", kwargs.get("dims", -1))
    if name == "roll" and len(args) <= place and "dims" not in kwargs:
        dims = range(len(shape))
    dims = [dims] if isinstance(dims, int) else list(dims) or range(len(shape))
    return tuple(shape[dim] if shape else 1 for dim in dims)


def refuse_tainted(
    unit: str, cut: Cut, where: str, found: Sequence[Any], clean: Sequence[Any], at: int, rows: Sequence[bool]
) -> None:
    """Raise ActivationError if other rows than `at`, which is NaN, are NaN in `found` and not in `clean`."""
    if len(found) != len(clean):
        raise ActivationError(
            f"unit {unit} returns outputs of another structure where one of its {cut.option} is NaN: "
            f"{way_out(cut.option)}"
        )
    for tensor, before, has_rows in zip(found, clean, rows, strict=True):
        if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
            continue
        new = tensor.isnan() & ~before.isnan()
        if has_rows:
            new.select(cut.dim, at).fill_(False)
        if new.any():
            one = cut.option.removesuffix("s")
            raise ActivationError(
                f"unit {unit} mixes the {cut.option} of its input: NaN in one {one} reaches others in {where}: "
                f"{way_out(cut.option)}"
            )


def refuse_gradients(unit: str, cut: Cut, trial: Any, count: int, rows: Sequence[bool]) -> None:
    """Raise ActivationError if gradients of `count` rows differ from those of their halves, or carry NaN to others."""
    half = count // 2
    pieces = [(0, count), (0, half), (half, count - half)]
    kept: list[list[list[Tensor]]] = []

    def compute() -> list[Any]:
        kept.clear()
        found = []
        for start, size in pieces:
            found.append(trial.compute(start, size))
            kept.append([_gradients(found[-1], rows, cut, (start, size), scale) for scale in (0.0, 1.0)])
            found[-1].outputs.clear()
        return found

    with torch.enable_grad():
        trial.alone(compute)
        for (wholes, lefts, rights), what in zip(zip(*kept, strict=True), ("added in", "of"), strict=True):
            for whole, left, right in zip(wholes, lefts, rights, strict=True):
                found, allowed = distance(whole, torch.cat([left, right], cut.dim)), _allowed(whole)
                if not found <= allowed:
                    raise ActivationError(
                        f"unit {unit} mixes the {cut.option} of its input: gradients {what} backward differ by "
                        f"{found:.1e} of their size between {count} {cut.option} at once and in halves, where rounding "
                        f"explains {allowed:.0e}: {way_out(cut.option)}"
                    )
        clean = kept[0][1]
        for at in sorted({0, half, count - 1}):
            with trial.without_dropout():
                tainted = trial.compute(0, count, at)
            gradients = _gradients(tainted, rows, cut, (0, count), 1.0, at)
            refuse_tainted(unit, cut, "backward", gradients, clean, at, [True] * len(clean))


def _gradients(
    found: Any, rows: Sequence[bool], cut: Cut, piece: tuple[int, int], scale: float, without: int | None = None
) -> list[Tensor]:
    """Of the inputs, for gradients of the outputs that are the same for a row whichever slice it is computed in."""
    outputs, given = [], []
    for value, has_rows in zip(found.outputs, rows, strict=True):
        if has_rows and isinstance(value, Tensor) and value.requires_grad:
            start, size = piece
            width = value.numel() // max(1, size)
            gradient = torch.arange(start * width, (start + size) * width, device=value.device).float().cos() * scale
            gradient = gradient.view(size, *value.shape[: cut.dim], *value.shape[cut.dim + 1 :]).movedim(0, cut.dim)
            gradient = gradient.to(value.dtype)
            if without is not None:
                gradient.select(cut.dim, without).zero_()
            outputs.append(value)
            given.append(gradient)
    if not outputs:
        return [torch.zeros_like(each) for each in found.inputs]
    gradients = torch.autograd.grad(outputs, found.inputs, given, retain_graph=scale == 0.0, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(gradients, found.inputs, strict=True)]


def tolerance_of(dtype: torch.dtype) -> float:
    """How far two vectors may lie apart, relative to their norm, for rounding to explain it."""
    return _TOLERANCE.get(dtype, _EXACT_TOLERANCE)


def _allowed(gradient: Tensor) -> float:
    """The same for gradients, which more sums are in, also of what autocast computed."""
    kind, dtype = gradient.device.type, gradient.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return max(2 * tolerance_of(dtype), 1e-3)


def distance(whole: Tensor, halves: Tensor) -> float:
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
