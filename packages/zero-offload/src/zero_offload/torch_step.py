"""Updates tiles by one torch operation after another, as the slow reference UpdateStep.

Owns arithmetic only. Every operation is a single correctly rounded one (no fused multiply-add, no `lerp`, no `alpha=`):
torch's vectorised loops and their scalar tails then agree, so the bits do not depend on threads or on where tiles end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .core import CHUNK_NUMEL
from .protocols import Field, TileView, UpdateSegment

_STATES = {"AdamW": ("exp_avg", "exp_avg_sq"), "Adam": ("exp_avg", "exp_avg_sq"), "SGD": ("momentum_buffer",)}
_REFUSED = ("amsgrad", "differentiable")
PIECE_NUMEL = 1 << 16  # elements of a master that are joined, or split, at a time on the CPU, whose caches hold them
_LOWER = int(sys.byteorder == "big")  # which of the two int16 of an int32 in memory is its lower half


def split_master(master: Tensor, parameter: Tensor, remainder: Tensor | None, *, spare: bool = False) -> None:
    """fp32 (n,) into bf16 (n,), rounded to nearest, ties away, and the int16 (n,) remainder that rebuilds it exactly.

    On the bits, rounding half away from zero is adding half a unit and keeping the upper half. The remainder, in
    [-2**15, 2**15), is the lower half as it was. NaN stays NaN, with remainder 0. All are contiguous. spare: the
    master's values are not needed any more, so its memory is reused. On a device this takes a few launches, and n bytes
    more.
    """
    bits, nan = master.view(torch.int32), master.isnan()
    if remainder is not None:
        remainder.copy_(bits.view(torch.int16)[_LOWER::2])
    high = bits.add_(0x8000) if spare else bits + 0x8000
    parameter.view(torch.int16).copy_(high.view(torch.int16)[1 - _LOWER :: 2])
    if master.device.type != "cpu" or bool(nan.any()):  # any() on a device would make the host wait
        parameter.masked_fill_(nan, torch.nan)
        if remainder is not None:
            remainder.masked_fill_(nan, 0)


def join_master(parameter: Tensor, remainder: Tensor, out: Tensor) -> Tensor:
    """The inverse of `split_master`: fp32 (n,) in `out`, which is returned."""
    bits = out.view(torch.int32)
    bits.copy_(parameter.view(torch.int16)).bitwise_left_shift_(16).add_(remainder)
    return out


def master_fields(numel: int, dtype: torch.dtype, *, split: bool = True) -> Sequence[Field]:
    """The fields of a tile that rebuild the master from its parameter. split: see `TorchStep`."""
    if dtype == torch.float32:
        return ()
    if dtype == torch.bfloat16 and split:
        return (Field("remainder", torch.int16, numel),)
    if dtype in (torch.bfloat16, torch.float16):
        return (Field("master", torch.float32, numel),)
    raise TypeError(f"parameters of {dtype}; float32, bfloat16 and float16 are known")


def pieces_of(tile: TileView) -> Iterator[slice]:
    """Slices of the tile's elements. On a device there is one, because each piece costs a few launches."""
    numel = tile.parameter.numel()
    size = PIECE_NUMEL if tile.parameter.device.type == "cpu" else max(1, numel)
    return (slice(start, min(start + size, numel)) for start in range(0, numel, size))


class TorchStep:
    """AdamW, Adam and SGD of torch.optim on tiles of any device.

    `layout`: with bf16 parameters "split" keeps a 16-bit remainder, "fp32" the whole master; fp16 parameters always
    have the master, fp32 parameters are it.
    """

    def __init__(self, layout: str = "split") -> None:
        if layout not in ("split", "fp32"):
            raise ValueError(f'layout {layout!r} is none of "split", "fp32"')
        self.layout_name = layout
        self._kind: str | None = None
        self._states: tuple[str, ...] = ()

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        kind = type(optimizer).__name__
        home = type(optimizer).__module__.partition(".")[0]
        if kind not in _STATES or home not in ("torch", "zero_optim_cpu"):
            raise TypeError(
                f"TorchStep does not know {type(optimizer).__module__}.{kind}; it runs "
                f"torch.optim.{', '.join(sorted(_STATES))}. Where its step looks at one parameter at a time, say so by "
                'shard(optimizer_contract="by itself"); else pass step= an UpdateStep that supports it'
            )
        for number, group in enumerate(optimizer.param_groups):
            for option in _REFUSED:
                if group.get(option):
                    raise ValueError(f"TorchStep cannot do {option}={group[option]} (group {number}); leave it off")
        self._kind = kind
        has_state = kind != "SGD" or any(group["momentum"] != 0 for group in optimizer.param_groups)
        self._states = _STATES[kind] if has_state else ()

    def layout(self, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        self._bound()
        moments = (Field(name, torch.float32, numel) for name in self._states)
        return (*master_fields(numel, parameter_dtype, split=self.layout_name == "split"), *moments)

    def state_names(self) -> tuple[str, ...]:
        self._bound()
        return self._states

    def initialise(self, tile: TileView, master: Tensor) -> None:
        self._store_master(tile, master.to(torch.float32))
        for name in self._states:
            tile.states[name].zero_()

    def update(self, tile: TileView, segments: Sequence[UpdateSegment], scale: float) -> None:
        kind = self._bound()
        master = self.master(tile)
        for segment in segments:
            part = slice(segment.start, segment.stop)
            sign = -scale if segment.options.get("maximize") else scale
            gradient = tile.gradient[part].to(torch.float32) * _f32(sign)
            states = [tile.states[name][part] for name in self._states]
            advance = _sgd if kind == "SGD" else _adam
            advance(master[part], gradient, states, segment.options, segment.step, decoupled=kind == "AdamW")
            if tile.parameter.dtype != torch.float32:
                self.store_part(tile, master, part)

    def read(self, tile: TileView, name: str) -> Tensor:
        if name == "master":
            return self.master(tile).clone()
        return self._state(tile, name).to(torch.float32, copy=True)

    def write(self, tile: TileView, name: str, values: Tensor) -> None:
        if name == "master":
            self._store_master(tile, values.to(torch.float32))
        else:
            self._state(tile, name).copy_(values)

    def accumulate(self, into: Tensor, values: Tensor) -> None:
        into.add_(values.to(torch.float32))

    def chunk_norms_squared(self, values: Tensor) -> list[float]:
        chunks = (values[start : start + CHUNK_NUMEL] for start in range(0, values.numel(), CHUNK_NUMEL))
        return [_tree_sum(chunk.to(torch.float64).square()) for chunk in chunks]

    # -- the three layouts --------------------------------------------------------------------------------------

    def _bound(self) -> str:
        if self._kind is None:
            raise RuntimeError("TorchStep.bind(optimizer) comes first")
        return self._kind

    def _state(self, tile: TileView, name: str) -> Tensor:
        if name not in self._states:
            raise KeyError(f"state {name!r}; known: master, {', '.join(self._states)}")
        return tile.states[name]

    @staticmethod
    def master(tile: TileView) -> Tensor:
        """fp32 (numel,): a view for the fp32 layouts, rebuilt for the split one."""
        if tile.parameter.dtype == torch.float32:
            return tile.parameter
        if "master" in tile.states:
            return tile.states["master"]
        made = torch.empty_like(tile.parameter, dtype=torch.float32)
        for piece in pieces_of(tile):
            join_master(tile.parameter[piece], tile.states["remainder"][piece], made[piece])
        return made

    def _store_master(self, tile: TileView, master: Tensor) -> None:
        if tile.parameter.dtype == torch.float32:
            tile.parameter.copy_(master)
            return
        if "master" in tile.states:
            tile.states["master"].copy_(master)
        self.store_part(tile, master, slice(0, master.numel()))

    @staticmethod
    def store_part(tile: TileView, master: Tensor, part: slice, *, spare: bool = False) -> None:
        """Rounds `part` of the master into the parameter, and into the remainder where there is one. spare: see
        `split_master`."""
        if tile.parameter.dtype == torch.float16:
            tile.parameter[part].copy_(master[part])
            return
        remainder = tile.states["remainder"][part] if "remainder" in tile.states else None
        split_master(master[part], tile.parameter[part], remainder, spare=spare)


def _f32(value: float) -> float:
    """`value` rounded to fp32 once, so that a float32 kernel given the same scalar multiplies by the same number."""
    return float(torch.tensor(value, dtype=torch.float32, device="cpu"))


def _tree_sum(values: Tensor) -> float:
    """Sum in a fixed order: halves are added to halves, so that no thread count changes it. (n,) float64."""
    count = values.numel()
    if count == 0:
        return 0.0
    width = 1 << (count - 1).bit_length()
    values = torch.nn.functional.pad(values, (0, width - count))
    while width > 1:
        width //= 2
        values = values[:width] + values[width:]
    return float(values)


def _adam(
    master: Tensor, gradient: Tensor, states: list[Tensor], options: Mapping[str, Any], step: int, *, decoupled: bool
) -> None:
    """Adam (Kingma & Ba 2015), AdamW (Loshchilov & Hutter 2019); scalars in double, rounded once."""
    exp_avg, exp_avg_sq = states
    learning_rate, decay = float(options["lr"]), float(options["weight_decay"])
    beta1, beta2 = (float(beta) for beta in options["betas"])
    if decay and options.get("decoupled_weight_decay", decoupled):
        master.mul_(_f32(1 - learning_rate * decay))
    elif decay:
        gradient = gradient + master * _f32(decay)
    exp_avg.mul_(_f32(beta1)).add_(gradient * _f32(1 - beta1))
    exp_avg_sq.mul_(_f32(beta2)).add_(gradient * gradient * _f32(1 - beta2))
    denominator = (exp_avg_sq.sqrt() / _f32(math.sqrt(1 - beta2**step))).add_(_f32(float(options["eps"])))
    master.sub_(exp_avg / denominator * _f32(learning_rate / (1 - beta1**step)))


def _sgd(
    master: Tensor, gradient: Tensor, states: list[Tensor], options: Mapping[str, Any], step: int, *, decoupled: bool
) -> None:
    """SGD with momentum as torch has it: the first step's buffer is the gradient itself."""
    momentum, decay = float(options["momentum"]), float(options["weight_decay"])
    if decay:
        gradient = gradient + master * _f32(decay)
    if momentum and states:
        buffer = states[0]
        if step == 1:
            buffer.copy_(gradient)
        else:
            buffer.mul_(_f32(momentum)).add_(gradient * _f32(1 - float(options["dampening"])))
        gradient = gradient + buffer * _f32(momentum) if options["nesterov"] else buffer
    master.sub_(gradient * _f32(float(options["lr"])))
