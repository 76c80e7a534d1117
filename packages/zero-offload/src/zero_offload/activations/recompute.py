"""Runs a module's forward again in backward, whole or part by part, on the arguments of its first run.

Owns the state of that second run. Not here: which calls are cut, where arguments are kept meanwhile (in
checkpointed_forward.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ..core import Observer
from .buffer_replay import Buffers, Found, drawn_again, random_states
from .compare_parts import Comparison
from .spill import Spilled
from .split_batch import Cut, Joined, as_found, begin_part, unchanged_arguments

SMALL_BYTES = 64 << 10  # a tensor below this is not worth a request
Pack = Callable[[Tensor, bool], Spilled]  # (tensor, own) -> the tensor, set aside; own: no other call shares it


def worthwhile(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.nbytes >= SMALL_BYTES


def replaced(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Gives the module another forward, which torch.compile does not trace. Returns a function that undoes it."""
    before = module.__dict__.get("forward")
    forward._torchdynamo_disable = True  # type: ignore[attr-defined]
    module.forward = forward

    def undo() -> None:
        del module.__dict__["forward"]
        if before is not None:
            module.forward = before

    return undo


class Recomputed:
    """A module whose `forward` is run again in backward, with the state that its calls share."""

    def __init__(
        self, name: str, module: nn.Module, forward: Callable[..., Any], counts: dict[str, int], observer: Observer
    ) -> None:
        self.name, self.module, self.forward = name, module, forward
        self.counts, self.observer, self.buffers = counts, observer, Buffers(name, module)
        self._compared: dict[Any, tuple[bool, ...]] = {}  # by kind of call: which leaves of the output are joined

    def call(self, args: Any, kwargs: Any, leaves: list[Any], structure: Any, cut: Cut | None, pack: Pack) -> Any:
        """The forward's output, with the graph that computes it again.

        Of calls that are cut, the first of each kind is compared. Other numbers among the arguments, or other modes,
        make another kind.
        """
        if cut is None:
            return _Call(self, (args, kwargs), leaves, structure, None, pack).whole()
        plain = tuple(leaf if isinstance(leaf, (bool, int, float, str)) else type(leaf) for leaf in leaves)
        modes = tuple(each.training for each in self.module.modules())
        kind = modes, str(structure), cut.where, cut.dim, plain
        if kind not in self._compared:
            self._compared[kind] = Comparison(self, leaves, structure, cut).rows_of_outputs()
        return _Call(self, (args, kwargs), leaves, structure, cut, pack).in_parts(cut, self._compared[kind])


class _Call:
    """One forward to be run again, part by part if it is cut. Holds its arguments, or their `Spilled`."""

    def __init__(
        self, of: Recomputed, given: tuple[Any, Any], leaves: list[Any], structure: Any, cut: Cut | None, pack: Pack
    ) -> None:
        self._of, self._structure, self._cut = of, structure, cut
        self._random: dict[int, Any] = {}  # by part, the states of random numbers before its first run
        self._found: Found = {}  # buffers and attributes of the module before the first run
        # Arguments of the first runs: a module that is not cut gets the caller's own.
        self._live: Callable[[int], tuple[Any, Any]] | None = lambda k: given
        if cut is not None:
            parts_of = cut.parts_of(leaves)
            self._live = lambda k: pytree.tree_unflatten(parts_of(k), structure)
        self._kept: list[Any] = [as_found(leaf) for leaf in leaves]
        self._aside: dict[int, tuple[Spilled, bool]] = {}  # by position: the tensor, and whether it needs a gradient
        self._loaded: list[Any] = []  # the leaves, while parts of them are computed again
        self._left = 0  # of these parts
        tensors = [(k, value) for k, value in enumerate(leaves) if isinstance(value, Tensor)]
        # Tells the checkpoint which device's random numbers to replay.
        self._anchor = tensors[0][1].detach().new_empty(0) if tensors else torch.empty(0)
        first = next((k for k, value in tensors if worthwhile(value)), None)
        for k, value in tensors:
            if isinstance(value, nn.Parameter):  # of another unit, which gathers it when it is asked for
                continue
            # Masks and position tables are one tensor for all units; the unit's input is its own.
            self._aside[k] = pack(value, value.requires_grad or k == first), value.requires_grad
            self._kept[k] = None

    def _run(self, anchor: Tensor, k: int) -> Any:
        """Computes part k of the forward, the first time on the caller's arguments."""
        if self._cut is None:
            return self._compute(k)
        begin_part(anchor.device)
        start = k * self._cut.size
        with self._of.observer.span("part", f"{self._of.name} {start}:{start + self._cut.sizes[k]}"):
            return self._compute(k)

    def _compute(self, k: int) -> Any:
        of, cut = self._of, self._cut
        if self._live is None:
            of.counts["recomputed"] += 1
            args, kwargs = pytree.tree_unflatten(self._load(k), self._structure)
            with of.buffers.second_run(self._found), drawn_again(self._random[k]):
                output = of.forward(*args, **kwargs)
            return output if cut is None else (output, {})
        args, kwargs = self._live(k)
        self._random[k] = random_states()
        if k == 0:  # the last one
            self._live = None
        if cut is None:
            with of.buffers.first_run(self._found):
                return of.forward(*args, **kwargs)
        changes: dict[Any, Any] = {}
        unchanged = unchanged_arguments(of.name, args, kwargs, cut.option)
        with unchanged, of.buffers.part(changes, cut.option, self._found):
            output = of.forward(*args, **kwargs)
        return output, changes

    def _load(self, k: int) -> list[Any]:
        """The leaves of part k. Tensors that were set aside are loaded once for all parts."""
        if not self._left:
            self._loaded = [as_found(leaf) for leaf in self._kept]
            self._left = 1 if self._cut is None else self._cut.parts
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
        return checkpoint(self._run, self._anchor, 0, use_reentrant=False)

    def in_parts(self, cut: Cut, joined: tuple[bool, ...]) -> Any:
        """The output, joined from the parts. joined: for each leaf of outputs and attributes, whether it has rows."""
        output = Joined(self._of.name, cut, joined)
        with _no_shared_casts():
            for k in reversed(range(cut.parts)):
                output.add(k, checkpoint(self._run, self._anchor, k, use_reentrant=False))
        value, changes = output.whole()
        self._of.buffers.leave(changes)
        return value


@contextmanager
def _no_shared_casts() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)
