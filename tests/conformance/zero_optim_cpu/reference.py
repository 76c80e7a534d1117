"""Computes the kernels' operations in the same order, one at a time, in torch: their slow twin.

Every operation is rounded to fp32 once, as in the kernels, so that both give the same bits except for NaN payloads.
Read this module to learn the kernels' arithmetic.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zero_optim_cpu.layouts import BF16, BLOCK_NUMEL, BYTE8, SPLIT, layout_named
from zero_optim_cpu.rules import Rule, rule_of
from zero_optim_cpu.step import Segment, Tile

States, Options = dict[str, Tensor], Mapping[str, Any]
_MASK32 = 0xFFFFFFFF
_INFINITE_WORD, _LEAST_EXPONENT = 0x7F80, 40  # of 8-bit codes


def float32(value: float) -> float:
    """Rounds a double to fp32."""
    return torch.tensor(value, dtype=torch.float64).float().item()


def exact_sqrt(x: Tensor) -> Tensor:
    """Returns the correctly rounded fp32 root. torch's own may be 1 ulp off, and computing in double is not."""
    return x.double().sqrt().float()


# ---- rules: (parameter, scaled gradient, states) -> parameter and states, all fp32 -----------------------------------


def adam_rule(p: Tensor, g: Tensor, states: States, options: Options, step: int, name: str) -> Tensor:
    """Adam, or AdamW if weight decay is decoupled. Products of options are computed in double and rounded once."""
    lr, (beta1, beta2) = float(options["lr"]), options["betas"]
    decay, decoupled = float(options["weight_decay"]), bool(options.get("decoupled_weight_decay", name == "AdamW"))
    if decay and not decoupled:
        g = g + float32(decay) * p
    m, v = states["exp_avg"], states["exp_avg_sq"]
    difference = g - m
    if 1 - beta1 < 0.5:
        m = m + float32(1 - beta1) * difference
    else:
        m = g - float32(beta1) * difference
    v = float32(beta2) * v + (float32(1 - beta2) * g) * g
    states["exp_avg"], states["exp_avg_sq"] = m, v
    denominator = exact_sqrt(v) * float32(1 / (1 - beta2**step) ** 0.5) + float32(options["eps"])
    update = (float32(lr / (1 - beta1**step)) * m) / denominator
    if decay and decoupled:
        update = update + float32(lr * decay) * p
    return p - update


def lion_rule(p: Tensor, g: Tensor, states: States, options: Options, step: int, name: str) -> Tensor:
    """Lion. A NaN direction stays NaN."""
    lr, (beta1, beta2), decay = float(options["lr"]), options["betas"], float(options["weight_decay"])
    m = states["exp_avg"]
    direction = float32(beta1) * m + float32(1 - beta1) * g
    rate = torch.full_like(p, float32(lr))
    update = torch.where(direction > 0, rate, torch.where(direction < 0, -rate, direction))
    states["exp_avg"] = float32(beta2) * m + float32(1 - beta2) * g
    if decay:
        update = update + float32(lr * decay) * p
    return p - update


def adagrad_rule(p: Tensor, g: Tensor, states: States, options: Options, step: int, name: str) -> Tensor:
    """Adagrad."""
    if options["weight_decay"]:
        g = g + float32(options["weight_decay"]) * p
    states["sum"] = states["sum"] + g * g
    rate = float32(float(options["lr"]) / (1 + (step - 1) * float(options["lr_decay"])))
    return p - (rate * g) / (exact_sqrt(states["sum"]) + float32(options["eps"]))


def sgd_rule(p: Tensor, g: Tensor, states: States, options: Options, step: int, name: str) -> Tensor:
    """SGD. In the first step the buffer becomes the gradient, without dampening. Without momentum it stays."""
    if options["weight_decay"]:
        g = g + float32(options["weight_decay"]) * p
    momentum = float32(options["momentum"])
    if "momentum_buffer" in states and momentum != 0:
        if step == 1:
            buffer = g
        else:
            buffer = momentum * states["momentum_buffer"] + float32(1 - options["dampening"]) * g
        states["momentum_buffer"] = buffer
        g = g + momentum * buffer if options["nesterov"] else buffer
    return p - float32(float(options["lr"])) * g


RULES = {"Adam": adam_rule, "AdamW": adam_rule, "Lion": lion_rule, "Adagrad": adagrad_rule, "SGD": sgd_rule}


# ---- codecs ----------------------------------------------------------------------------------------------------------


def bits_of(x: Tensor) -> Tensor:
    """fp32 -> its pattern as int64 in [0, 2^32)."""
    return x.contiguous().view(torch.int32).to(torch.int64) & _MASK32


def of_bits(bits: Tensor) -> Tensor:
    """The inverse of ``bits_of``."""
    bits = bits & _MASK32
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).to(torch.int32).view(torch.float32)


def _int16(bits: Tensor) -> Tensor:
    low = bits & 0xFFFF
    return torch.where(low >= 1 << 15, low - (1 << 16), low).to(torch.int16)


def to_bf16(x: Tensor) -> Tensor:
    """Round to nearest, ties away from zero; NaN stays NaN."""
    rounded = torch.where(x.isnan(), torch.full_like(bits_of(x), 0x7FC0), (bits_of(x) + 0x8000) >> 16)
    return _int16(rounded).view(torch.bfloat16)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds fp32 to the nearest bf16, ties away from zero. Returns it and the signed 16-bit remainder of the bits."""
    bits = bits_of(x)
    return _int16((bits + 0x8000) >> 16).view(torch.bfloat16), _int16(bits)


def join(parameter: Tensor, remainder: Tensor) -> Tensor:
    """Inverts ``split``, for every bit pattern."""
    high = parameter.view(torch.int16).to(torch.int64) & 0xFFFF
    return of_bits((high << 16) + remainder.to(torch.int64))


def _mix(x: Tensor) -> Tensor:
    x = x ^ (x >> 16)
    x = (x * 0x85EBCA6B) & _MASK32
    x = x ^ (x >> 13)
    x = (x * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def dither(positions: Tensor, step: int) -> Tensor:
    """Returns the number to add to the 20 bits that an 8-bit code cuts off, by position in the block and step."""
    return ((_mix(positions + 1) + step * 0x9E3779B9) & _MASK32) >> 12


def encode_blocks(x: Tensor, noise: Tensor, *, signed: bool) -> tuple[Tensor, Tensor]:
    """Encodes fp32 (n,) as small floats relative to each block's largest: codes (n,) uint8 and scales (blocks,).

    A code is the upper half of a value's bits plus noise, minus the block's exponent. codes.hpp explains it.
    """
    numel, reach, top = x.numel(), 15 if signed else 31, 127 if signed else 255
    blocks = -(-numel // BLOCK_NUMEL)
    words = torch.zeros(blocks * BLOCK_NUMEL, dtype=torch.int64)
    words[:numel] = ((bits_of(x) + noise) & _MASK32) >> 16
    words = words.view(blocks, BLOCK_NUMEL)
    magnitude = words & 0x7FFF
    finite = magnitude < _INFINITE_WORD
    exponent = torch.where(finite, magnitude, torch.zeros_like(words)).amax(dim=1) >> 7
    exponent = torch.where(exponent == 0, exponent, exponent.clamp(min=_LEAST_EXPONENT))
    exponent = torch.where((exponent == 0) & ~finite.all(dim=1), torch.full_like(exponent, 254), exponent)
    code = ((magnitude - ((exponent[:, None] - reach) << 7)).clamp(min=0) >> 4).clamp(max=top)
    code = torch.where(finite, code, torch.full_like(code, top))
    if signed:
        code |= (words >> 8) & 0x80
    code = torch.where(exponent[:, None] == 0, torch.zeros_like(code), code)
    return code.flatten()[:numel].to(torch.uint8), of_bits(exponent << 23)


def decode_blocks(codes: Tensor, scales: Tensor, *, signed: bool) -> Tensor:
    """Inverts ``encode_blocks``, to within its steps of 12.5 %."""
    code = codes.to(torch.int64)
    exponent = bits_of(scales) >> 23
    offset = torch.where(exponent == 0, exponent, (exponent - (15 if signed else 31)) << 7)
    offset = offset.repeat_interleave(BLOCK_NUMEL)[: codes.numel()]
    if not signed:
        return of_bits(((code << 4) + offset) << 16)
    word = (((code & 127) << 4) + offset) | ((code & 128) << 8)
    return of_bits(torch.where((code & 127) == 0, torch.zeros_like(code), word) << 16)


# ---- the step --------------------------------------------------------------------------------------------------------


class ReferenceStep:
    """``CpuStep`` in plain torch: slow, but easy to check by reading."""

    def __init__(self, layout: str = "split") -> None:
        self._layout = layout_named(layout)
        self._rule: Rule | None = None

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        self._rule = rule_of(optimizer)

    def update(self, tile: Tile, segments: Sequence[Segment], scale: float) -> None:
        """Updates every segment by one step, in place, as ``CpuStep.update`` does."""
        rule = self._bound()
        numel = tile.parameter.numel()
        master = self._read_master(tile)
        states = {name: self._read_moment(tile, name, slot) for name, slot in rule.states}
        noise = torch.full((numel,), 1 << 19)
        touched = torch.zeros(-(-numel // BLOCK_NUMEL), dtype=torch.bool)
        for s in segments:
            part = slice(s.start, s.stop)
            sign = -scale if s.options.get("maximize", False) else scale
            mine = {name: values[part] for name, values in states.items()}
            gradient = tile.gradient[part].float() * float32(sign)
            master[part] = RULES[rule.name](master[part], gradient, mine, s.options, s.step, rule.name)
            for name, values in mine.items():
                states[name][part] = values
            self._write_master(tile, master, s)
            noise[part] = dither(torch.arange(s.start, s.stop) % BLOCK_NUMEL, s.step)
            if s.stop > s.start:
                touched[s.start // BLOCK_NUMEL : -(-s.stop // BLOCK_NUMEL)] = True
        for name, slot in rule.states:
            self._write_moment(tile, name, slot, states[name], noise, touched, segments)

    def _bound(self) -> Rule:
        if self._rule is None:
            raise RuntimeError("call bind(optimizer) first")
        return self._rule

    def _read_master(self, tile: Tile) -> Tensor:
        if "remainder" in tile.states:
            return join(tile.parameter, tile.states["remainder"])
        return tile.states.get("master", tile.parameter).float().clone()

    def _write_master(self, tile: Tile, master: Tensor, s: Segment) -> None:
        part, parameter, states = slice(s.start, s.stop), tile.parameter, tile.states
        values = master[part]
        if self._layout.master_of(parameter.dtype) == SPLIT:
            canonical = torch.where(values.isnan(), torch.full_like(values, float("nan")), values)
            parameter[part], states["remainder"][part] = split(canonical)
        else:
            if "master" in states:
                states["master"][part] = values
            parameter[part] = to_bf16(values) if parameter.dtype == torch.bfloat16 else values

    def _read_moment(self, tile: Tile, name: str, slot: int) -> Tensor:
        stored = tile.states[name]
        if self._layout.moments == BYTE8:
            return decode_blocks(stored, tile.states[f"{name}_scale"], signed=slot == 0)
        return stored.float().clone()

    def _write_moment(
        self,
        tile: Tile,
        name: str,
        slot: int,
        values: Tensor,
        noise: Tensor,
        touched: Tensor,
        segments: Sequence[Segment],
    ) -> None:
        stored = tile.states[name]
        if self._layout.moments == BYTE8:
            codes, scales = encode_blocks(values, noise if slot == 0 else noise ^ 0xFFFFF, signed=slot == 0)
            elements = touched.repeat_interleave(BLOCK_NUMEL)[: stored.numel()]
            stored[elements] = codes[elements]
            tile.states[f"{name}_scale"][touched] = scales[touched]
            return
        for s in segments:
            part = slice(s.start, s.stop)
            stored[part] = to_bf16(values[part]) if self._layout.moments == BF16 and slot == 0 else values[part]
