"""Runs a module's forward again in backward, whole or part by part, on the arguments of its first run.

Compares a part of a real batch with its halves, at the first call of each kind of a module that takes parts. Owns the
state of the second run, and which outputs have a row for each row. Not here: which modules may take parts (in
known_modules.py), how a batch is cut (in split_batch.py), which calls are cut, where arguments are kept meanwhile (in
checkpointed_forward.py).

[Note: a part and its halves]
The first rows and the last, as many as a part has, are computed at once and then in two halves. Outputs have to agree,
and so do gradients of the inputs for the same gradient of the outputs: the distance of two tokens' vectors is at most
`_TOLERANCE` of their norm, which rounding explains. A module that draws random numbers, as dropout does, is compared in
eval mode. The list of known modules decides the cases that this cannot see, see [Note: known modules].
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from ..core import Observer, ZeroError, hidden_from_hooks, set_compiler, skipped
from ..errors import OffloadError
from . import split_batch
from .buffer_replay import Buffers, Found, drawn_again, random_states
from .spill import ActivationError, Spilled
from .split_batch import Cut, Joined

SMALL_BYTES = 64 << 10  # a tensor below this is not worth a request
_TOLERANCE = {torch.bfloat16: 0.03, torch.float16: 0.004}  # four units in the last place
_EXACT_TOLERANCE = 1e-4  # fp32 and more: reordered sums differ by less, mixed rows by far more
Pack = Callable[[Tensor, bool], Spilled]  # (tensor, own) -> the tensor, set aside; own: no other call shares it


def worthwhile(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.nbytes >= SMALL_BYTES


class Original:
    """A module's own forward. It is compiled where the call of its module is, and also where backward runs it again."""

    def __init__(self, module: nn.Module) -> None:
        self._module, self._own = module, module.__dict__.get("forward")
        self._compiler: Any = None  # torch.compile's callback for the frames of the module's last call

    @property
    def forward(self) -> Any:
        """The module's, or its class's, which may be replaced later."""
        return self._own or type(self._module).forward.__get__(self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        before = set_compiler(self._compiler)
        try:
            return self.forward(*args, **kwargs)
        finally:
            set_compiler(before)

    def replaced(self, module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
        """Gives the module another forward, never compiled, with all its callees. Returns a function to undo this."""
        before = module.__dict__.get("forward")

        def outside(*args: Any, **kwargs: Any) -> Any:
            self._compiler = set_compiler(None)
            try:
                return forward(*args, **kwargs)
            finally:
                set_compiler(self._compiler)

        module.forward = skipped(wraps(self.forward, updated=())(outside))  # its attributes may be torch.compile's

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
        self._kept: list[Any] = [split_batch.as_found(leaf) for leaf in leaves]
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
        split_batch.begin_part(anchor.device)
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
        unchanged = split_batch.unchanged_arguments(of.name, args, kwargs, cut.option)
        with unchanged, of.buffers.part(changes, cut.option, self._found):
            output = of.forward(*args, **kwargs)
        return output, changes

    def _load(self, k: int) -> list[Any]:
        """The leaves of part k. Tensors that were set aside are loaded once for all parts."""
        if not self._left:
            self._loaded = [split_batch.as_found(leaf) for leaf in self._kept]
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


@dataclass(frozen=True)
class Comparison:
    """One call of a module. Some of its rows, or tokens, are computed to be compared, which leaves no trace."""

    of: Recomputed
    leaves: Sequence[Any]
    structure: Any
    cut: Cut

    def rows_of_outputs(self) -> tuple[bool, ...]:
        """For each leaf of the output, and then for each attribute that the module sets, whether it has a row for each
        row of the input (or a token for each token, as `cut` says); else it is the same for all.

        Raises ActivationError if values differ, if an output is neither, or if an argument is changed in place.
        """
        unit, cut = self.of.name, self.cut
        count = min(max(2, cut.size), cut.length)
        first, last = range(-(-count // 2)), range(cut.length - count // 2, cut.length)
        pieces = [[*first, *last], [*first], [*last]]
        device = next(self.leaves[k].device for k in cut.where)
        with _naming_failures(unit, count, cut), hidden_from_hooks(), torch.enable_grad(), _replayed(device) as drawn:
            found = [self._compute(places) for places in pieces]
            if drawn():
                with _eval_mode(self.of.module):
                    found = [self._compute(places) for places in pieces]
            if len({len(outputs) for outputs, _ in found}) > 1:
                raise split_batch.other_structure(unit, cut.option)
            sizes = [len(places) for places in pieces]
            together = zip(*(outputs for outputs, _ in found), strict=True)
            joined = tuple(self._has_rows(values, sizes) for values in together)
            for whole, *halves in zip(*(gradients for _, gradients in found), strict=True):
                self._refuse_unequal("gradients of its inputs", whole, halves, max(2 * _tolerance(whole), 1e-3))
        return joined

    def _compute(self, places: Sequence[int]) -> tuple[list[Any], list[Tensor]]:
        """Returns leaves of the output and of set attributes, and the inputs' gradients. places: the rows' indices."""
        cut, unit = self.cut, self.of.name
        index = torch.tensor(places, device=next(self.leaves[k].device for k in cut.where))
        given = [
            leaf.detach().index_select(cut.dim, index) if k in cut.where else _detached(leaf)
            for k, leaf in enumerate(self.leaves)
        ]
        floats = [k for k in sorted(cut.where) if given[k].is_floating_point()]
        inputs = {k: given[k].requires_grad_() for k in floats if self.leaves[k].requires_grad or k == floats[0]}
        # torch lets no leaf be written.
        handed = [leaf.clone() if k in inputs else leaf for k, leaf in enumerate(given)]
        args, kwargs = pytree.tree_unflatten(handed, self.structure)
        changes: dict[Any, Any] = {}
        with split_batch.unchanged_arguments(unit, args, kwargs, cut.option), self.of.buffers.part(changes, cut.option):
            output = self.of.forward(*args, **kwargs)
        memory = {handed[k].untyped_storage().data_ptr() for k in cut.where if cut.option == "tokens"}
        returned = (leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor))
        if any(leaf.untyped_storage().data_ptr() in memory for leaf in returned):
            raise ActivationError(
                f"module {unit} returns one of its inputs, or a view of one, and {cut.option}= returns a new tensor, "
                f"joined from parts: return a copy of the input. Or {split_batch.way_out(cut.option, unit)}"
            )
        outputs = pytree.tree_leaves((output, changes))
        return outputs, _gradients(outputs, [*inputs.values()])

    def _has_rows(self, values: Sequence[Any], sizes: Sequence[int]) -> bool:
        """Whether an output has a row for each row. values, sizes: it and its number of rows, at once and in halves."""
        dim = self.cut.dim
        if all(
            isinstance(v, Tensor) and v.dim() > dim and v.shape[dim] == n for v, n in zip(values, sizes, strict=True)
        ):
            self._refuse_unequal("outputs", values[0], values[1:], _tolerance(values[0]))
            return True
        if all(split_batch.same(values[0], value) for value in values[1:]):
            return False
        raise split_batch.not_joined(self.of.name, self.cut.option, values[0])

    def _refuse_unequal(self, what: str, whole: Tensor, halves: Sequence[Tensor], tolerance: float) -> None:
        option, dim = self.cut.option, self.cut.dim
        found = _distance(whole, torch.cat(list(halves), dim))
        if not found <= tolerance:
            raise ActivationError(
                f"module {self.of.name} mixes the {option} of its input: {whole.shape[dim]} "
                f"{option} at once and {halves[0].shape[dim]} at a time give {what} with a relative difference of "
                f"{found:.1e}, and rounding gives at most {tolerance:.0e}: {split_batch.way_out(option, self.of.name)}"
            )


def _gradients(outputs: Sequence[Any], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Returns the inputs' gradients. A row's gradient of the output is the same whatever rows are computed with it."""
    asked = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
    if not asked or not inputs:
        return []
    given = [value.detach().nan_to_num(0.0, 0.0, 0.0).cos() for value in asked]
    found = torch.autograd.grad(asked, inputs, given, allow_unused=True)
    return [torch.zeros_like(x) if gradient is None else gradient for gradient, x in zip(found, inputs, strict=True)]


def _tolerance(tensor: Tensor) -> float:
    """Returns the largest relative distance of two vectors that rounding explains."""
    kind, dtype = tensor.device.type, tensor.dtype
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
    return _TOLERANCE.get(dtype, _EXACT_TOLERANCE)


def _distance(whole: Tensor, halves: Tensor) -> float:
    """Returns the largest distance of two vectors of the last dimension, relative to their norm; 0 if all are equal."""
    if not whole.is_floating_point():
        return 0.0 if torch.equal(whole, halves) else float("inf")
    if not whole.numel():
        return 0.0
    if not torch.equal(whole.isfinite(), halves.isfinite()):
        return float("inf")
    left, right = (t.detach().double().nan_to_num(0.0, 0.0, 0.0) for t in (whole, halves))
    if left.dim() == 1:
        left, right = left[:, None], right[:, None]
    norms = left.norm(dim=-1)
    scale = norms + 0.01 * norms.mean()
    return float(((left - right).norm(dim=-1) / scale.clamp_min(1e-300)).max())


def _detached(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter) else leaf


@contextmanager
def _eval_mode(module: nn.Module) -> Iterator[None]:
    before = [(each, each.training) for each in module.modules()]
    try:
        for each, _ in before:
            each.training = False
        yield
    finally:
        for each, training in before:
            each.training = training


@contextmanager
def _naming_failures(unit: str, count: int, cut: Cut) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever a unit raises for a number of rows that it does not expect
        if isinstance(error, (ZeroError, OffloadError, torch.OutOfMemoryError)):
            raise
        shared = ". If an argument must not be cut, name it in shared=[...]. Else" if cut.option == "rows" else ";"
        raise ActivationError(
            f"module {unit} runs on {cut.length} {cut.option}, but not on {count} or fewer, so {cut.option}= cannot "
            f"cut its input: {type(error).__name__}: {error}{shared} {split_batch.way_out(cut.option, unit)}"
        ) from error


@contextmanager
def _replayed(device: torch.device) -> Iterator[Callable[[], bool]]:
    """Restores the random states on leaving. Yields a function that returns whether any number was drawn inside."""
    devices = [] if device.type == "cpu" else [device]
    kind = device.type if devices else "cuda"  # torch wants a kind, also where no device is named

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.get_device_module(each).get_rng_state(each) for each in devices)]

    with torch.random.fork_rng(devices, device_type=kind):
        before = states()
        yield lambda: not all(map(torch.equal, before, states()))
