"""Splits a linear layer too large to gather into small ones, each a unit of its own (memory-centric tiling).

Owns the layer and the replacement of layers in a model. Knows no shards: `ModuleList` children are units by default,
which is all it takes. After Rajbhandari et al., "ZeRO-Infinity", 2021, section 5.1.3.
"""

from __future__ import annotations

import math
from collections import Counter
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ZeroError
from .deferred_init import as_made, continue_recording


def _cuts(total: int, splits: int, what: str) -> list[tuple[int, int]]:
    """Returns `splits` ranges that cover `total`, with sizes that differ by at most one."""
    if not 1 <= splits <= total:
        raise ValueError(f"{what}={splits} must be from 1 to the {total} features it splits")
    return list(pairwise(total * i // splits for i in range(splits + 1)))


class _Tile(nn.Linear):
    """One tile: an `nn.Linear` that is initialised as the whole layer is, with its fan-in `whole_fan_in`."""

    def __init__(self, in_features: int, out_features: int, bias: bool, whole_fan_in: int, **kind: object) -> None:
        self.whole_fan_in = whole_fan_in
        super().__init__(in_features, out_features, bias=bias, **kind)

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.whole_fan_in)  # the bound of nn.Linear's kaiming_uniform_(a=sqrt(5))
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)


class TiledLinear(nn.Module):
    """`nn.Linear` as `out_splits` x `in_splits` tiles, gathered one after another.

    Tile (o, i) holds rows o and columns i of the weight, `tiles[o * in_splits + i]`; the tiles of i = 0 hold the bias.
    Forward: (..., in_features) -> (..., out_features), equal to `nn.Linear` up to the order of additions.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        out_splits: int = 1,
        in_splits: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.rows = _cuts(out_features, out_splits, "out_splits")
        self.columns = _cuts(in_features, in_splits, "in_splits")
        self.tiles = nn.ModuleList(
            _Tile(stop - start, high - low, bias and start == 0, whole_fan_in=in_features, device=device, dtype=dtype)
            for low, high in self.rows
            for start, stop in self.columns
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, out_splits: int = 1, in_splits: int = 1) -> TiledLinear:
        """Returns the layer in tiles, with its values and hooks. The tiles of a deferred layer are deferred too."""
        if linear.weight.is_meta:
            with continue_recording(linear):
                return cls.from_linear(linear, out_splits=out_splits, in_splits=in_splits)
        weight, bias = linear.weight, linear.bias
        with torch.random.fork_rng([weight.device] if weight.is_cuda else []):  # first values, which are not used
            tiled = cls(
                linear.in_features, linear.out_features, bias is not None,
                out_splits=out_splits, in_splits=in_splits, device=weight.device, dtype=weight.dtype,
            )  # fmt: skip
        tiled.__dict__.update((key, hooks) for key, hooks in linear.__dict__.items() if "_hooks" in key)
        with torch.no_grad():
            for tile, (low, high), (start, stop) in tiled.placed():
                tile.weight.requires_grad_(weight.requires_grad).copy_(as_made(linear, weight)[low:high, start:stop])
                if tile.bias is not None:
                    tile.bias.requires_grad_(bias.requires_grad).copy_(as_made(linear, bias)[low:high])
        return tiled.train(linear.training)

    def placed(self) -> list[tuple[_Tile, tuple[int, int], tuple[int, int]]]:
        """Returns each tile with its rows [low, high) and columns [start, stop) of the whole weight."""
        tiles = iter(self.tiles)
        return [(next(tiles), rows, columns) for rows in self.rows for columns in self.columns]  # type: ignore[misc]

    def forward(self, x: Tensor) -> Tensor:  # x: (..., in_features)
        outputs: list[Tensor] = []
        for tile, _, (start, stop) in self.placed():
            part = tile(x if len(self.columns) == 1 else x[..., start:stop])
            if start == 0:
                outputs.append(part)
            else:
                outputs[-1] = outputs[-1] + part
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)

    def extra_repr(self) -> str:
        splits = f"out_splits={len(self.rows)}, in_splits={len(self.columns)}"
        return f"in_features={self.in_features}, out_features={self.out_features}, {splits}"


def tile_linear(model: nn.Module, threshold: int) -> tuple[str, ...]:
    """Replaces, in place, every `nn.Linear` whose weight has more than `threshold` elements; returns their names.

    Rows are split, so that a tile has at most `threshold` elements where one row does. Call it before the optimizer is
    made. A layer whose weight is tied to another's, that is a subclass of `nn.Linear`, or whose `forward` was replaced
    is left whole: `ZeroError` only if the model itself is such a layer, which cannot be replaced in place.
    """
    if threshold < 1:
        raise ValueError(f"threshold={threshold} elements must be at least 1")
    if isinstance(model, nn.Linear):
        raise ZeroError("tile_linear() cannot replace model itself: use TiledLinear.from_linear(model, out_splits=...)")
    uses = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    linears: Any = ((name, m) for name, m in model.named_modules() if type(m) is nn.Linear and "forward" not in vars(m))
    chosen = [(n, m) for n, m in linears if m.weight.numel() > threshold and uses[id(m.weight)] == 1]
    for name, linear in chosen:
        parent, _, attribute = name.rpartition(".")
        splits = min(linear.out_features, -(-linear.out_features // max(1, threshold // linear.in_features)))
        setattr(model.get_submodule(parent), attribute, TiledLinear.from_linear(linear, out_splits=splits))
    return tuple(name for name, _ in chosen)
