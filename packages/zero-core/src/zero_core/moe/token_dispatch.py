"""Hands out pairs of a token and one of its experts by groups of experts, and sums the results per token.

Owns the order of the pairs and the two autograd functions that follow it. Knows no experts and no modules.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from ..errors import ZeroError


class Pairs:
    """The pairs of `top_k_index`, (tokens, k) integers, ordered by their expert: pair t * k + j is token t, slot j.

    Pairs of group g are at positions [bounds[g], bounds[g + 1]). An index of `edges[-1][1]` or more names no expert:
    such pairs come last and belong to no group.
    """

    def __init__(self, top_k_index: Tensor, edges: Sequence[tuple[int, int]]) -> None:
        self.tokens, self.k = top_k_index.shape
        flat = top_k_index.reshape(-1)
        self.experts, self.order = torch.sort(flat, stable=True)  # (tokens * k,) each
        self.token = torch.div(self.order, self.k, rounding_mode="floor")  # of each pair in this order
        borders = torch.tensor([*(start for start, _ in edges), edges[-1][1]], device=flat.device, dtype=flat.dtype)
        self.bounds: list[int] = torch.searchsorted(self.experts, borders).tolist()  # the one wait for a device
        if self.bounds[0]:
            raise ZeroError(
                f"top_k_index has negative entries ({self.bounds[0]} of {flat.numel()}), which name no expert: use "
                f"the number of experts, {edges[-1][1]}, for entries to be skipped. Or use any expert, with weight 0"
            )

    def counts(self) -> list[int]:
        """Returns the number of pairs of each group."""
        return [stop - start for start, stop in pairwise(self.bounds)]

    def take(self, hidden: Tensor, weights: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns each group's rows of `hidden`, (tokens, width), and entries of `weights`, (tokens, k), as (n, 1)."""
        flat = _Take.apply(hidden, weights, self)
        return list(zip(flat[::2], flat[1::2], strict=True))

    def put(self, outputs: dict[int, Tensor], idle: Sequence[Tensor], hidden: Tensor) -> Tensor:
        """Sums the groups' `outputs`, (n, width) by index of the group, per token: (tokens, width), as `hidden`.

        idle: outputs of groups without pairs. They add nothing, and their gradients are zeros.
        """
        groups = [g for g, n in enumerate(self.counts()) if n]
        rows = [outputs[g] for g in groups]
        return _Put.apply(self, groups, hidden.shape[-1], hidden.dtype, hidden.device, *rows, *idle)

    def sums(self, rows: Sequence[Tensor]) -> Tensor:
        """`rows`: (n, width) of each group with pairs. Returns (tokens, width): the sum of each token's pairs."""
        used = self.bounds[-1]
        if used < self.order.numel():  # pairs of no group take a row of zeros
            rows = [*rows, rows[0].new_zeros(1, rows[0].shape[-1])]
        places = torch.empty_like(self.order)
        places[self.order] = torch.arange(self.order.numel(), device=self.order.device).clamp_(max=used)
        joined = rows[0] if len(rows) == 1 else torch.cat(list(rows))
        return embedding_bag(places.view(self.tokens, self.k), joined, mode="sum")

    def tokens_of(self, group: int) -> Tensor:
        return self.token[self.bounds[group] : self.bounds[group + 1]]


class _Take(torch.autograd.Function):
    """Copies rows by group. Backward adds up the gradients of a token's copies, in the order of its slots."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weights: Tensor, pairs: Pairs) -> tuple[Tensor, ...]:
        ctx.pairs, ctx.like = pairs, (hidden.new_empty(0), weights.new_empty(0))
        ctx.width = hidden.shape[-1]
        ctx.set_materialize_grads(False)
        sizes = [*pairs.counts(), pairs.order.numel() - pairs.bounds[-1]]
        rows = hidden.index_select(0, pairs.token).split(sizes)
        entries = weights.reshape(-1, 1).index_select(0, pairs.order).split(sizes)
        return tuple(part for g in range(len(sizes) - 1) for part in (rows[g], entries[g]))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        pairs: Pairs = ctx.pairs
        rows, entries = gradients[::2], gradients[1::2]
        hidden, weights = ctx.like
        counts = pairs.counts()
        of_hidden = of_weights = None
        if ctx.needs_input_grad[0]:
            given = [hidden.new_zeros(n, ctx.width) if g is None else g for g, n in zip(rows, counts, strict=True) if n]
            of_hidden = pairs.sums(given) if given else hidden.new_zeros(pairs.tokens, ctx.width)
        if ctx.needs_input_grad[1]:
            flat = weights.new_zeros(pairs.order.numel(), 1)
            for group, gradient in enumerate(entries):
                if gradient is not None and counts[group]:
                    flat[pairs.order[pairs.bounds[group] : pairs.bounds[group + 1]]] = gradient
            of_weights = flat.view(pairs.tokens, pairs.k)
        return of_hidden, of_weights, None


class _Put(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, pairs: Pairs, groups: list[int], width: int, dtype: torch.dtype, device: torch.device, *rows: Tensor
    ) -> Tensor:
        ctx.pairs, ctx.groups = pairs, groups
        ctx.kinds = [(row.shape, row.dtype) for row in rows]
        if not groups:
            return torch.zeros(pairs.tokens, width, dtype=dtype, device=device)
        return pairs.sums(rows[: len(groups)]).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        found: list[Tensor | None] = []
        for at, (shape, dtype) in enumerate(ctx.kinds):
            if not ctx.needs_input_grad[5 + at]:
                found.append(None)
            elif at < len(ctx.groups):
                found.append(gradient.index_select(0, ctx.pairs.tokens_of(ctx.groups[at])).to(dtype))
            else:
                found.append(gradient.new_zeros(shape, dtype=dtype))
        return (None,) * 5 + tuple(found)
