"""The forward of units whose activations are not kept: run again in backward, in parts where `rows` says so.

Owns the wrapping and its undoing. Where what is set aside lies is `spill`'s; recomputation is torch's own non-reentrant
checkpointing, so random numbers and autocast are replayed by it.

[Note: hooks do not nest]
Of several saved_tensors_hooks only the innermost is called, so nothing here installs one: the inputs that are set aside
never reach autograd, and the recomputation asks for them. A unit called under somebody else's hooks (an enclosing
checkpoint, save_on_cpu) leaves its activations to those, and `stats()["delegated"]` counts it.

[Note: a batch in parts]
With `rows`, a unit computes its batch in parts, each a checkpoint of its own, within one call of its module: so its
parameters are gathered once for all parts in forward, and once in backward.

    forward     part 2, part 1, part 0; the outputs are joined, and only the unit's input is kept
    backward    part 0: recompute, backward; part 1: the same; part 2: the same; then one gradient of each parameter

Autograd runs backward in the reverse order of forward. So forward takes the parts from the last to the first, and
backward adds their gradients from the first to the last, as accumulation over the same parts does. Autograd computes
the sum in the parameter's `grad_dtype`, which is fp32 here, and passes it on when all parts are added. So the engine,
and hooks on parameters, see one gradient per backward. The norms between the blocks and the head
(`planning.sizes.outer_norms`) also compute in parts, whatever the policy of the blocks: most norms compute in fp32, and
for all rows at once that would take a dozen times the memory of their input. A norm that mixes rows cannot do this, and
computes the whole batch. Autocast does not share casts of weights between parts, as the gradient of a shared cast would
be summed in 16 bits. Modules inside a unit, and hooks on them, see one call for each part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint

from zero_core.heap import FreedMemory
from zero_core.store import Observer

from .buffers import Buffers, Found
from .cutting import Cut, Joined, argument_names, as_found, find_cut, flatten, unchanged_arguments
from .host_random import HostRandom
from .mixing import refuse_batch_norm, rows_of_outputs
from .spill import STAYS, ActivationError, Spill, Spilled
from .stored_spill import StoredSpill

__all__ = ["Activations", "ByRows", "refuse_enclosing", "refuse_recorded", "sum_in_fp32"]

SMALL_BYTES = 64 << 10  # a tensor below this is not worth a request
_RECORDED = ("output_attentions", "output_router_logits")
_CACHES = ("past_key_value", "past_key_values", "layer_past", "cache_params")


class Activations:
    """What `offload_activations` put in place. `policies`: by unit. `close()` undoes it."""

    def __init__(self, policies: Mapping[str, str], spills: Mapping[str, Spill], observer: Observer) -> None:
        self.policies, self._spills, self._observer = dict(policies), spills, observer
        self._undo: list[Callable[[], None]] = []
        self._counts = {"recomputed": 0, "delegated": 0, "spilled_bytes": 0}

    def stats(self) -> dict[str, int]:
        """recomputed: forwards run again; delegated: forwards left to enclosing hooks; spilled_bytes: set aside in all;
        host_bytes: of the slots and buffers; nvme_bytes, and the same of other stored tiers in use: of the extents.
        """
        host = sum(spill.host_bytes for spill in self._spills.values())
        stored = {tier: spill for tier, spill in self._spills.items() if isinstance(spill, StoredSpill)}
        extents = {f"{tier}_bytes": spill.extent_bytes for tier, spill in stored.items()}
        return self._counts | {"host_bytes": host, "nvme_bytes": 0} | extents

    def close(self) -> None:
        """Give the units their own forward back, and the memory and extents. A graph that is alive cannot run backward
        after this. Idempotent."""
        while self._undo:
            self._undo.pop()()
        for spill in self._spills.values():
            spill.close()

    def __enter__(self) -> Activations:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _wrap(self, name: str, module: nn.Module, policy: str, by_rows: ByRows | None, optional: bool = False) -> None:
        """optional: a module that cannot compute its batch by rows computes it as without rows, instead of raising."""
        original = module.forward
        had_own = "forward" in module.__dict__
        spill = self._spills.get(policy)
        positional = argument_names(original) if by_rows is not None else []
        buffers = Buffers(name, module)
        told = self._counts, self._observer, name, original, buffers, spill

        @wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            if torch._C._autograd._top_saved_tensors_default_hooks(False) is not None:
                self._counts["delegated"] += 1
                return original(*args, **kwargs)
            for cache in (key for key in _CACHES if kwargs.get(key) is not None):
                _refuse_cache(name, cache)
            if by_rows is None:
                leaves, structure = pytree.tree_flatten((args, kwargs))
                for cache in (leaf for leaf in leaves if hasattr(leaf, "get_seq_length")):
                    _refuse_cache(name, f"an object of class {type(cache).__name__}")
                call = _Call(*told, (args, kwargs), leaves, structure)
                return checkpoint(call.run, call.anchor, 0, use_reentrant=False)
            leaves, structure, names = flatten(args, kwargs, positional)
            for argument, leaf in zip(names, leaves, strict=True):
                if hasattr(leaf, "get_seq_length"):
                    _refuse_cache(name, argument)
            cut, joined = by_rows.cut(name, module, buffers, original, leaves, structure, names, if_it_can=optional)
            if cut is None and optional:
                return original(*args, **kwargs)
            call = _Call(*told, (args, kwargs), leaves, structure, cut, by_rows.begin_part)
            del args, kwargs, leaves
            if cut is None:
                return checkpoint(call.run, call.anchor, 0, use_reentrant=False)
            output = Joined(name, cut, joined)
            with _no_shared_casts():
                for k in reversed(range(cut.parts)):
                    output.add(k, checkpoint(call.run, call.anchor, k, use_reentrant=False))
            value, changes = output.whole()
            buffers.leave(changes)
            return value

        forward._torchdynamo_disable = True  # type: ignore[attr-defined]
        module.forward = forward

        def undo() -> None:
            if had_own:
                module.forward = original
            else:
                del module.__dict__["forward"]

        self._undo.append(undo)


class ByRows:
    """How the units compute their batches `rows` rows at a time."""

    def __init__(self, rows: int, shared: Sequence[str] | None) -> None:
        self._rows, self._shared = rows, shared
        # Of the calls that were compared: what their outputs are. None: the call is left whole.
        self._kinds: dict[Any, tuple[bool, ...] | None] = {}
        self._freed = FreedMemory()

    def begin_part(self, device: torch.device) -> None:
        """A part begins: see [Note: memory between parts] in cutting.py."""
        if device.type == "cpu":
            self._freed.begin()

    def cut(
        self,
        name: str,
        module: nn.Module,
        buffers: Buffers,
        original: Callable[..., Any],
        leaves: Sequence[Any],
        structure: Any,
        names: Sequence[str],
        *,
        if_it_can: bool,
    ) -> tuple[Cut | None, tuple[bool, ...]]:
        """How this call is cut, and which leaves of its output are joined. None: it is one part."""
        cut = find_cut(name, leaves, names, self._rows, self._shared)
        if cut is None:
            return None, ()
        refuse_batch_norm(name, module)
        flags = tuple(leaf if isinstance(leaf, (bool, str)) else type(leaf) for leaf in leaves)
        kind = (name, module.training, str(structure), cut.where, flags)
        if kind not in self._kinds:
            try:
                self._kinds[kind] = rows_of_outputs(name, module, buffers, original, leaves, structure, cut)
            except ActivationError:
                if not if_it_can:
                    raise
                self._kinds[kind] = None
        joined = self._kinds[kind]
        return (None, ()) if joined is None else (cut, joined)


class _Call:
    """One forward of one unit, to be run again, part by part if it is cut. Holds its inputs, or where they were set
    aside."""

    def __init__(
        self,
        counts: dict[str, int],
        observer: Observer,
        name: str,
        original: Callable[..., Any],
        buffers: Buffers,
        spill: Spill | None,
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
        first = next((k for k, value in tensors if _worthwhile(value)), None)
        for k, value in tensors:
            if isinstance(value, nn.Parameter):  # of another unit, which gathers it when it is asked for
                continue
            # Masks and position tables are one tensor for all units; the unit's input is its own.
            if spill is not None and _worthwhile(value) and (value.requires_grad or k == first):
                self._aside[k] = (spill.pack(value, name), value.requires_grad)
                counts["spilled_bytes"] += value.nbytes
            else:
                self._aside[k] = (STAYS.pack(value, name), value.requires_grad)
            self._kept[k] = None

    def run(self, anchor: Tensor, k: int) -> Any:
        """Part k of the forward, the first time on what was given."""
        if self._cut is None:
            return self._compute(k)
        self._begin_part(anchor.device)
        start = k * self._cut.rows
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
        unchanged = unchanged_arguments(self._name, args, kwargs)
        with unchanged, self._buffers.part(changes, self._found), self._random.first_run(k):
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


def _refuse_cache(name: str, argument: str) -> None:
    raise ActivationError(
        f"unit {name} was given {argument}, which recomputation would write to a second time; "
        "train with use_cache=False (model.config.use_cache = False), or keep this unit's activations"
    )


@contextmanager
def _no_shared_casts() -> Iterator[None]:
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def sum_in_fp32(units: Iterable[Any], by_rows: Iterable[nn.Module]) -> Callable[[], None]:
    """Let autograd add the gradients of the 16-bit parameters of the modules `by_rows` in fp32. Returns what undoes it.

    units: all of the model.
    """
    inside = {id(parameter) for module in by_rows for parameter in module.parameters()}
    narrow = [
        parameter
        for unit in units
        for parameter, group in zip(unit.parameters, unit.groups, strict=True)
        if group is not None and unit.dtype.itemsize == 2 and id(parameter) in inside
    ]
    if narrow and not hasattr(Tensor, "grad_dtype"):
        raise ActivationError(
            f"rows= with parameters in {narrow[0].dtype} needs Tensor.grad_dtype, by which autograd adds gradients in "
            f"fp32, and torch {torch.__version__} lacks it: update to 2.13, use fp32 parameters, or leave rows= out"
        )
    with torch._C.DisableTorchFunctionSubclass():
        before = [parameter.grad_dtype for parameter in narrow]
        for parameter in narrow:
            parameter.grad_dtype = torch.float32

    def undo() -> None:
        with torch._C.DisableTorchFunctionSubclass():
            for parameter, dtype in zip(narrow, before, strict=True):
                parameter.grad_dtype = dtype

    return undo


def _worthwhile(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.nbytes >= SMALL_BYTES


def refuse_enclosing(served: Iterable[Any], nodes: Sequence[Any]) -> None:
    """Units inside of others would be gathered for each part, of which ranks may have different numbers."""
    for node in served:
        inside = {id(module) for module in node.module.modules()} - {id(node.module)}
        found = next((other.name for other in nodes if id(other.module) in inside), None)
        if found is not None:
            raise ActivationError(
                f"unit {node.name} contains the unit {found}, which rows= would gather once for each part of a batch: "
                "leave zero_core.tile_linear out, or leave rows= out"
            )


def refuse_recorded(model: nn.Module) -> Callable[[], None]:
    """Refuse what transformers records by hooks on modules inside of units, which would have an entry for each part."""

    def refuse(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        for name in _RECORDED if torch.is_grad_enabled() else ():
            given = kwargs.get(name)
            if getattr(getattr(module, "config", None), name, False) if given is None else given:
                raise ActivationError(
                    f"{name}=True with rows=: {type(module).__name__} would return an entry for each part of a batch "
                    f"instead of one for each layer; pass {name}=False, or leave rows= out"
                )

    return model.register_forward_pre_hook(refuse, with_kwargs=True).remove
