"""Wraps the forward of units whose activations are not kept: it is run again in backward, in parts if `rows` is given.

Modules of a unit that act on each token alone take a row's tokens in parts if `tokens` is given. Owns the wrapping and
its undoing. Recomputation is torch's own non-reentrant checkpointing, which replays random numbers and autocast. Not
here: which modules take parts (in known_modules.py), how a forward is cut and run again (in split_batch.py and
recompute.py), the places of tensors that are set aside (in spill.py).

[Note: hooks do not nest]
Of several saved_tensors_hooks only the innermost is called, so this package installs none: the inputs that are set
aside never reach autograd, and the recomputation loads them. A unit called under somebody else's hooks (an enclosing
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
for all rows at once that would take a dozen times the memory of their input. A norm that is not known (see
[Note: known modules]) computes the whole batch. Autocast does not share casts of weights between parts, as the gradient
of a shared cast would be summed in 16 bits. Modules inside a unit, and hooks on them, see one call for each part.

[Note: a row in parts]
A unit's forward runs on whole rows, and so does its attention. A module inside of it that is known to act on each token
alone, an MLP or a norm, or that the user names, computes `tokens` tokens of each row at once. Of such modules that lie
in each other, the outermost does. A unit in which none has a matrix is refused, as nothing in it would be bounded.

    forward     norm: parts; attention: whole; norm: parts; MLP: part 2, part 1, part 0
    backward    norm, attention and norm again, up to the MLP's input
                MLP: part 0: forward again, backward; part 1: the same; part 2: the same
                attention: backward, whole; norm: part 0: forward again, backward; ...

The unit is one checkpoint, and each part is one inside of it. A part is computed again from the module's input, which
is handed to the unit's checkpoint as a tensor that autograd has saved: so it does not live between forward and
backward, but is recomputed. torch ends a recomputation at the last value that was saved. The parts' own checkpoints
are hidden from the unit's, so an MLP at the end of a block is not computed a third time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..core import Hooks, Observer, SavedAround, hidden_from_hooks, hooks_around
from .known_modules import stranger
from .recompute import Original, Recomputed, worthwhile
from .spill import STAYS, ActivationError, ChangedInputError, Spill, Spilled, keep
from .split_batch import Cut, find_cut, names_of_leaves, way_out
from .stored_spill import StoredSpill

_RECORDED = ("output_attentions", "output_router_logits")
_CACHES = ("past_key_value", "past_key_values", "layer_past", "cache_params")


class Activations(ExitStack):
    """The result of `offload_activations`, a context manager. `policies`: by unit.

    `close()` restores the units' own forward, and frees memory and extents. A graph that is alive cannot run backward
    after this. Idempotent.
    """

    def __init__(self, policies: Mapping[str, str], spills: Mapping[str, Spill], observer: Observer) -> None:
        super().__init__()
        self.policies, self._spills, self._observer = dict(policies), spills, observer
        for spill in spills.values():
            self.callback(spill.close)
        self._counts = {"recomputed": 0, "delegated": 0, "spilled_bytes": 0}

    def stats(self) -> dict[str, int]:
        """recomputed: forwards run again; delegated: forwards left to enclosing hooks; spilled_bytes: set aside in all;
        host_bytes: of the slots and buffers; nvme_bytes, and the same of other stored tiers in use: of the extents.
        """
        host = sum(spill.host_bytes for spill in self._spills.values())
        stored = {tier: spill for tier, spill in self._spills.items() if isinstance(spill, StoredSpill)}
        extents = {f"{tier}_bytes": spill.extent_bytes for tier, spill in stored.items()}
        return self._counts | {"host_bytes": host, "nvme_bytes": 0} | extents

    def _wrap(
        self, name: str, module: nn.Module, policy: str, by_rows: ByRows | None, by_tokens: ByTokens | None
    ) -> None:
        original = Original(module)
        unknown = "" if by_rows is None else stranger(module, "rows", by_rows.named)
        spill = self._spills.get(policy)
        computed = original if by_tokens is None else by_tokens.entered(name, module, original)
        recomputed = Recomputed(name, module, computed, self._counts, self._observer)

        def pack(value: Tensor, own: bool) -> Spilled:
            if spill is None or not own or not worthwhile(value):
                return STAYS.pack(value, name)
            self._counts["spilled_bytes"] += value.nbytes
            return spill.pack(value, name)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return original(*args, **kwargs)
            if hooks_around() is not None or torch._C._are_functorch_transforms_active():  # which take no checkpoints
                self._counts["delegated"] += 1
                return original(*args, **kwargs)
            leaves, structure = pytree.tree_flatten((args, kwargs))
            _refuse_caches(name, kwargs, leaves)
            cut = None
            if by_rows is not None:
                names = names_of_leaves(original.forward, args, kwargs)
                cut = find_cut(name, leaves, names, by_rows.rows, by_rows.shared)
            if cut is not None and unknown:
                raise ActivationError(
                    f"unit {name} {unknown}, and rows= would compute some rows of a batch after others. If no row "
                    f"depends on another one there, set row_modules=[{re.sub(r'[0-9]+', '*', name)!r}]. Else "
                    f"{way_out('rows', name)}"
                )
            return recomputed.call(args, kwargs, leaves, structure, cut, pack)

        self.callback(original.replaced(module, forward))


@dataclass(frozen=True)
class ByRows:
    """Cuts the units' batches into parts of `rows` rows. named: the modules that the user names."""

    rows: int
    shared: Sequence[str] | None
    named: Container[nn.Module]


class ByTokens:
    """Computes rows of more than `tokens` tokens in parts, in modules inside of units. named: by the user."""

    def __init__(self, tokens: int, named: Container[nn.Module], made: Activations) -> None:
        self._tokens, self._named, self._made = tokens, named, made
        self._counts, self._observer = made._counts, made._observer
        self._length = 0  # tokens of a row of the unit that runs; 0: none runs, or a part of a row does
        self._hooks: Hooks | None = None  # saved-tensor hooks of the checkpoint of the unit that runs

    def knows(self, module: nn.Module) -> bool:
        """Whether the module takes parts itself."""
        return not stranger(module, "tokens", self._named)

    def entered(self, unit: str, module: nn.Module, run: Callable[..., Any]) -> Callable[..., Any]:
        """The unit's forward, in which the unit or modules inside of it take rows in parts.

        That forward raises ActivationError for a long row if no module with a matrix takes parts.
        """
        bounded = self.knows(module)
        if bounded:
            run = self._in_parts(unit, module, run)
        for path, each in [] if bounded else [*self._outermost("", module)]:
            bounded = bounded or any(parameter.dim() > 1 for parameter in each.parameters())
            original = Original(each)
            self._made.callback(original.replaced(each, self._in_parts(f"{unit}.{path}", each, original)))

        def forward(*args: Any, **kwargs: Any) -> Any:
            length = _row_length(unit, pytree.tree_leaves((args, kwargs)))
            if length <= self._tokens:
                return run(*args, **kwargs)
            if not bounded:
                raise ActivationError(
                    f"tokens={self._tokens} has no effect in unit {unit} of class {type(module).__name__}: none of its "
                    "modules is known to act on each token separately. If a module does, such as an MLP, name it with "
                    f"token_modules=['*.mlp']. Else {keep(unit)}. Or leave tokens= out"
                )
            with self._of_rows(length):
                return run(*args, **kwargs)

        return forward

    def _outermost(self, path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        """The modules inside that take parts. A single matrix does not, as it saves only its input."""
        for name, child in module.named_children():
            at = f"{path}.{name}".lstrip(".")
            if self.knows(child):
                yield at, child
            else:
                yield from self._outermost(at, child)

    @contextmanager
    def _of_rows(self, length: int) -> Iterator[None]:
        before, self._length = (self._length, self._hooks), length
        self._hooks = hooks_around()
        try:
            yield
        finally:
            self._length, self._hooks = before

    def _in_parts(self, name: str, module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of a module that takes long rows in parts."""
        recomputed = Recomputed(name, module, original, self._counts, self._observer)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not self._length:
                return original(*args, **kwargs)
            leaves, structure = pytree.tree_flatten((args, kwargs))
            cut, around = _cut_of(leaves, self._length, self._tokens), hooks_around()
            if cut is None or around != self._hooks:  # a checkpoint of the unit's own, say, computes the module again
                self._counts["delegated"] += cut is not None
                return original(*args, **kwargs)

            def pack(value: Tensor, own: bool) -> Spilled:
                if around is None:
                    return STAYS.pack(value, name)
                return SavedAround(value, around, ChangedInputError(name))

            with self._of_rows(0), nullcontext() if around is None else hidden_from_hooks():
                return recomputed.call(args, kwargs, leaves, structure, cut, pack)

        return forward


def _hidden(leaves: Sequence[Any]) -> Tensor | None:
    """The hidden states: the first floating-point tensor of 2 or more dimensions, with a gradient if any has one."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor) and not isinstance(leaf, nn.Parameter)]
    found = [tensor for tensor in tensors if tensor.is_floating_point() and tensor.dim() > 1]
    return next((tensor for tensor in found if tensor.requires_grad), found[0] if found else None)


def _row_length(unit: str, leaves: Sequence[Any]) -> int:
    """Tokens of a row of the hidden states (rows, tokens, width) or (tokens, width). 0: there are none."""
    lead = _hidden(leaves)
    if lead is not None and lead.dim() > 3:
        raise ActivationError(
            f"unit {unit} is given hidden states of shape {tuple(lead.shape)}, and tokens= can only split a shape "
            f"(rows, tokens, width): {keep(unit)}. Or leave tokens= out"
        )
    return 0 if lead is None else lead.shape[-2]


def _cut_of(leaves: Sequence[Any], length: int, tokens: int) -> Cut | None:
    """How a module's arguments are cut into parts of `tokens` tokens; None: they are not `length` tokens."""
    lead = _hidden(leaves)
    sizes = () if lead is None else lead.shape
    # Not the last one, the width, and of two only the first: rows and tokens may be one.
    dims = range(1, len(sizes) - 1) if len(sizes) > 2 else range(len(sizes) > 1)
    dim = next((k for k in dims if sizes[k] == length), None)
    if dim is None:
        return None
    tensors = [(k, leaf) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() > dim]
    where = {k for k, tensor in tensors if tensor.shape[dim] == length and not isinstance(tensor, nn.Parameter)}
    return Cut(length, tokens, frozenset(where), dim, "tokens")


def _refuse_caches(unit: str, kwargs: Mapping[str, Any], leaves: Iterable[Any]) -> None:
    caches = [name for name in _CACHES if kwargs.get(name) is not None]
    caches += [f"an object of class {type(leaf).__name__}" for leaf in leaves if hasattr(leaf, "get_seq_length")]
    for cache in caches:
        raise ActivationError(
            f"unit {unit} was given {cache}, a cache that recomputation would write into a second time; "
            f"train with use_cache=False (model.config.use_cache = False). Or {keep(unit)}"
        )


def sum_in_fp32(units: Iterable[Any], in_parts: Iterable[nn.Module], option: str) -> Callable[[], None]:
    """Makes autograd sum gradients of 16-bit parameters in fp32. Returns a function that undoes it.

    units: all units of the model. in_parts: the modules whose parameters are summed so.
    """
    inside = {id(parameter) for module in in_parts for parameter in module.parameters()}
    narrow = [
        parameter
        for unit in units
        for parameter, whole, group in zip(unit.parameters, unit.wholes, unit.groups, strict=True)
        if group is not None and unit.dtype.itemsize == 2 and id(whole) in inside
    ]
    if narrow and not hasattr(Tensor, "grad_dtype"):
        raise ActivationError(
            f"{option}= with parameters in {narrow[0].dtype} needs Tensor.grad_dtype to add gradients in fp32, and "
            f"torch {torch.__version__} lacks it: update to 2.13, use fp32 parameters, or leave {option}= out"
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


def refuse_enclosing(served: Iterable[Any], nodes: Sequence[Any], option: str) -> None:
    """Refuses units inside of others: they would be gathered once a part, and ranks may differ in numbers of parts."""
    for node in served:
        inside = {id(module) for module in node.module.modules()} - {id(node.module)}
        found = next((other.name for other in nodes if id(other.module) in inside), None)
        if found is not None:
            raise ActivationError(
                f"unit {node.name} contains the unit {found}, which {option}= would gather again for each part of a "
                f"batch: leave {option}= out. Or, if zero_core.tile_linear made {found}, leave zero_core.tile_linear "
                f"out. Or, if {found} has experts, shard with expert_bytes=None"
            )


def refuse_recorded(model: nn.Module, option: str) -> Callable[[], None]:
    """Refuses outputs that transformers records by hooks inside of units, which would have an entry for each part."""
    recorded = _RECORDED[option == "tokens" :]  # attention takes the tokens of a row at once

    def refuse(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        for name in recorded if torch.is_grad_enabled() else ():
            given = kwargs.get(name)
            if getattr(getattr(module, "config", None), name, False) if given is None else given:
                raise ActivationError(
                    f"{name}=True with {option}=: {type(module).__name__} would return an entry for each part of a "
                    f"batch instead of one for each layer; pass {name}=False, or leave {option}= out"
                )

    return model.register_forward_pre_hook(refuse, with_kwargs=True).remove
