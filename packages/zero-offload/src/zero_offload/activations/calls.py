"""One forward that is run again in backward, whole or part by part: its arguments, random numbers and buffers.

Owns what a second run finds. Where arguments lie meanwhile, and what is cut, its callers say.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from zero_core.store import Observer

from .buffers import Buffers, Found
from .cutting import Cut, Joined, as_found, unchanged_arguments
from .host_random import HostRandom
from .spill import Spilled

__all__ = ["Call", "worthwhile"]

SMALL_BYTES = 64 << 10  # a tensor below this is not worth a request


def worthwhile(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.nbytes >= SMALL_BYTES


class Call:
    """One forward of one unit, or of a module inside, to be run again, part by part if it is cut.

    Holds its inputs, or where they were set aside. pack: sets one aside, which is the forward's own, or shared.
    """

    def __init__(
        self,
        counts: dict[str, int],
        observer: Observer,
        name: str,
        original: Callable[..., Any],
        buffers: Buffers,
        pack: Callable[[Tensor, bool], Spilled],
        given: tuple[Any, Any],
        leaves: list[Any],
        structure: Any,
        cut: Cut | None = None,
        begin_part: Callable[[torch.device], None] = lambda device: None,
    ) -> None:
        self._begin_part = begin_part
        self._counts, self._observer, self._name, self._original = counts, observer, name, original
        self._structure, self._cut, self._buffers = structure, cut, buffers
        self._random = HostRandom()
        self._found: Found = {}  # what the first run found in the unit's buffers
        # Arguments of the first runs: a unit that is not cut is called with what it was given.
        self._live: Callable[[int], tuple[Any, Any]] | None = lambda k: given
        if cut is not None:
            parts_of = cut.parts_of(leaves)
            self._live = lambda k: pytree.tree_unflatten(parts_of(k), structure)
        self._parts = 1 if cut is None else cut.parts
        self._kept: list[Any] = [as_found(leaf) for leaf in leaves]
        self._aside: dict[int, tuple[Spilled, bool]] = {}  # by position: where it is, and whether it needs a gradient
        self._loaded: list[Any] = []  # the leaves, while parts of them are computed again
        self._left = 0  # of these parts
        tensors = [(k, value) for k, value in enumerate(leaves) if isinstance(value, Tensor)]
        # Tells the checkpoint which device's random numbers to replay.
        self.anchor = tensors[0][1].detach().new_empty(0) if tensors else torch.empty(0)
        first = next((k for k, value in tensors if worthwhile(value)), None)
        for k, value in tensors:
            if isinstance(value, nn.Parameter):  # of another unit, which gathers it when it is asked for
                continue
            # Masks and position tables are one tensor for all units; the unit's input is its own.
            self._aside[k] = pack(value, value.requires_grad or k == first), value.requires_grad
            self._kept[k] = None

    def run(self, anchor: Tensor, k: int) -> Any:
        """Part k of the forward, the first time on what was given."""
        if self._cut is None:
            return self._compute(k)
        self._begin_part(anchor.device)
        start = k * self._cut.size
        with self._observer.span("part", f"{self._name} {start}:{start + self._cut.sizes[k]}"):
            return self._compute(k)

    def _compute(self, k: int) -> Any:
        if self._live is None:
            self._counts["recomputed"] += 1
            args, kwargs = pytree.tree_unflatten(self._load(k), self._structure)
            with self._buffers.second_run(self._found), self._random.second_run(k):
                output = self._original(*args, **kwargs)
            return output if self._cut is None else (output, {})
        args, kwargs = self._live(k)
        if k == 0:  # the last one
            self._live = None
        if self._cut is None:
            with self._buffers.first_run(self._found), self._random.first_run(k):
                return self._original(*args, **kwargs)
        changes: dict[Any, Any] = {}
        unchanged = unchanged_arguments(self._name, args, kwargs, self._cut.option)
        with unchanged, self._buffers.part(changes, self._cut.option, self._found), self._random.first_run(k):
            output = self._original(*args, **kwargs)
        return output, changes

    def _load(self, k: int) -> list[Any]:
        """The leaves of part k. What was set aside is read once for all parts."""
        if not self._left:
            self._loaded, self._left = [as_found(leaf) for leaf in self._kept], self._parts
            for place, (spilled, _) in self._aside.items():
                self._loaded[place] = spilled.load()
        part = self._loaded if self._cut is None else self._cut.part(self._loaded, k)
        for place, (_, wanted) in self._aside.items():
            part[place] = part[place].detach().requires_grad_(wanted)
        self._left -= 1
        if not self._left:
            self._loaded = []
        return part

    def whole(self) -> Any:
        """What the forward returns, with the graph that computes it again."""
        return checkpoint(self.run, self.anchor, 0, use_reentrant=False)

    def in_parts(self, cut: Cut, joined: tuple[bool, ...]) -> Any:
        """The same, part by part. joined: which leaves of the output, and of attributes, have what is cut."""
        output = Joined(self._name, cut, joined)
        with _no_shared_casts():
            for k in reversed(range(cut.parts)):
                output.add(k, checkpoint(self.run, self.anchor, k, use_reentrant=False))
        value, changes = output.whole()
        self._buffers.leave(changes)
        return value


@contextmanager
def _no_shared_casts() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
