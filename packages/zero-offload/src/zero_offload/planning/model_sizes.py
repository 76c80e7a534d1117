"""Describes a model for the planner: the size of each unit and the bytes of its activations.

Owns no placement and no hardware. A model that exists nowhere (a trillion parameters) is a list of numbers.
`ModelSizes.of` reads one that exists, on any device or on meta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from .. import core
from ..core import Grouped, Segment, ShardSpec, UnitLayout
from ..uncut_step import UncutStep
from .batches import Batch
from .meta_trial import followed_stacks

WHOLE = 20  # bytes of a width and token that attention's backward has at once, in 16 bits: measured, of Llama's
LOGIT_BYTES = 12  # of a logit: the fp32 log of its probability, that one's gradient and its own


@contextmanager
def only_trained(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> Iterator[None]:
    """A context in which only the optimizer's parameters require a gradient: `plan` counts states for all that do."""
    trained = {id(p) for group in (optimizer.param_groups if optimizer is not None else ()) for p in group["params"]}
    others = [p for p in model.parameters() if p.requires_grad and id(p) not in trained]
    for parameter in others:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in others:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class ParameterSizes:
    """One parameter, counted once: a tied parameter belongs to the first unit that has it.

    uncut: its shape and the index of its group in the optimizer, if the optimizer needs it whole.
    """

    name: str
    numel: int
    matmul_numel: int | None = None  # elements every token is multiplied with; None: all. A packed weight has more.
    uncut: tuple[tuple[int, ...], int] | None = None


@dataclass(frozen=True)
class UnitSizes:
    """One unit: the parameters that are unsharded, computed with and resharded together.

    trained: all of them are, else none. own_dtype: the dtype they are kept in, if it is not the other units'.
    """

    name: str
    parameters: tuple[ParameterSizes, ...]
    matmul_numel: int | None = None  # elements every token is multiplied with; None: all. An embedding has 0.
    is_block: bool = True  # has activations worth a policy; embeddings, heads and other units keep theirs
    encloses: bool = False  # the whole model's own unit: open from the first unit to the last
    trained: bool = True
    own_dtype: torch.dtype | None = None
    beside: int | None = None  # as in zero_core.store.ShardSpec
    is_head: bool = False  # a linear layer that computes the logits, whose loss may be computed by rows
    depth: int = 0  # as in zero_core.store.ShardSpec
    again: bool = False  # inside of a block that, if it recomputes, uses the unit twice in backward

    @cached_property
    def numel(self) -> int:
        return sum(parameter.numel for parameter in self.parameters)

    def nbytes(self, dtype: torch.dtype) -> int:
        """Bytes of the whole unit. `dtype`: the dtype of units without an `own_dtype`."""
        return self.numel * (self.own_dtype or dtype).itemsize

    @property
    def trained_numel(self) -> int:
        """Elements that have a gradient and states: all of the unit, or none."""
        return self.numel if self.trained else 0

    @property
    def compute_numel(self) -> int:
        """Elements that every token is multiplied with: 0 for an embedding, more than `numel` for a packed weight."""
        return self.numel if self.matmul_numel is None else self.matmul_numel

    def shard(
        self, dtype: torch.dtype, shard_count: int, rank: int, owned: Sequence[int | None] | None = None
    ) -> ShardSpec:
        """The shard of this unit that zero-core would give to a store on `rank`. owned: from `ModelSizes.owned`."""
        dtype = self.own_dtype or dtype
        uncut = {parameter.name: parameter.uncut for parameter in self.parameters if parameter.uncut is not None}
        slots = [(p.name, uncut[p.name][0] if p.name in uncut else (p.numel,)) for p in self.parameters]
        layout = UnitLayout.build(
            self.name, slots, itemsize=dtype.itemsize, shard_count=shard_count, uncut=uncut.keys(), owners=owned
        )
        groups = {name: group for name, (_, group) in uncut.items()}
        group = 0 if self.trained else None
        segments = tuple(
            Segment(
                p.shard_start, p.shard_stop, groups.get(name, group), name, p.slot.shape, p.slot_start, name in uncut
            )
            for p in layout.pieces(rank)
            for name in [p.slot.name]
        )
        told = self.encloses, self.trained, self.beside, self.depth
        return ShardSpec(self.name, layout.numel_of(rank), dtype, segments, *told, layout.numels)


@dataclass(frozen=True)
class ModelSizes:
    """Units in forward order, and bytes of activations per token of one rank's micro-batch."""

    units: tuple[UnitSizes, ...]
    checkpoint_bytes_per_token: int = 0  # a unit's input, which is all that recomputation keeps
    saved_bytes_per_token: int = 0  # activations that a unit's forward saves for its backward under "keep"
    freed_bytes_per_token: int = 0  # values that its forward computes and frees again
    working_bytes_per_token: int = 0  # that recomputation rebuilds at once: a whole layer's, also where tiles are units
    whole_bytes_per_token: int = 0  # the part of them in attention, which always takes whole rows
    part_bytes_per_token: int = 0  # the part of them in an MLP, which may take the tokens of a row in parts
    output_bytes_per_token: int = 0  # peak of logits and their gradient
    norms_by_rows: bool = True  # norms outside of the units are modules, which can compute some rows at a time

    @cached_property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    def owned(self, shard_count: int) -> list[tuple[int | None, ...] | None]:
        """For each unit, the owner of each parameter that the optimizer needs whole: see `zero_core.layout.owners`."""
        return core.owners(
            ([(p.numel, p.uncut is not None) for p in unit.parameters] for unit in self.units), shard_count
        )

    @cached_property
    def compute_numel(self) -> int:
        """Elements that every token is multiplied with: 2 FLOP for each in forward, 4 in backward."""
        return sum(unit.compute_numel for unit in self.units)

    @cached_property
    def blocks(self) -> int:
        """Units with activations worth a policy."""
        return sum(unit.is_block for unit in self.units)

    def kept_bytes_per_token(self, on_heap: bool) -> int:
        """Bytes of a unit that keeps its activations. `on_heap`: in glibc's heap, where freed values still take memory.

        torch asks the heap for memory that begins at a multiple of 64 bytes, and glibc looks for 96 bytes more than it
        then uses. So the next value of the same size does not fit into a freed one's place, which stays a gap.
        """
        return self.saved_bytes_per_token + (self.freed_bytes_per_token if on_heap else 0)

    def logits_by_rows(self, policies: Sequence[str], batch: Batch) -> bool:
        """Whether `offload_activations` lets the head compute its logits and their loss by rows, as the blocks do."""
        cuts = batch.in_parts and not batch.whole_logits and any(policy != "keep" for policy in policies)
        return cuts and any(unit.is_head for unit in self.units)

    def recomputed(self, policies: Sequence[str], batch: Batch) -> list[UnitSizes]:
        """Units whose forward runs again in backward. `policies`: one a unit."""
        head = self.logits_by_rows(policies, batch)
        pairs = zip(self.units, policies, strict=True)
        return [unit for unit, policy in pairs if policy != "keep" or (head and unit.is_head)]

    def summed(self, policies: Sequence[str], batch: Batch) -> list[list[int]]:
        """Elements of each trained parameter whose gradient is summed over parts. One list a module, over its units."""
        again = self.recomputed(policies, batch) if batch.in_parts else []
        names, opened = {unit.name for unit in again}, {unit.beside for unit in again} - {None}
        found: dict[tuple[int | None, str], list[int]] = {}
        for unit in self.units:
            if unit.trained and (unit.name in names or unit.beside in opened):
                module = found.setdefault((unit.beside, unit.name if unit.beside is None else ""), [])
                module.extend(parameter.numel for parameter in unit.parameters)
        return list(found.values())

    @classmethod
    def of(
        cls,
        model: nn.Module | ModelSizes | Sequence[int],
        classes: Sequence[type[nn.Module]] | None = None,
        dtype: torch.dtype | None = None,
        cast: bool = True,
        expert_bytes: int | None = None,
        ranks: int = 1,
        step: Any = None,
    ) -> ModelSizes:
        """Reads a module (on any device, meta and deferred ones too) or a sequence of elements per unit.

        `classes`: the module classes that form units, as for `zero_core.shard(units=...)`. A parameter that requires no
        gradient is frozen. `dtype`: of activations; None: 16 bits. Their size is an estimate, from ``model.config``
        where there is one. `cast`: floating-point parameters are kept in one dtype, `shard(param_dtype=)`; else each is
        in its own. `expert_bytes`: experts are cut into groups as `shard(expert_bytes=)` cuts them on `ranks` ranks;
        None: they are not. `step`: a bound UpdateStep; parameters that its optimizer needs whole, as torch.optim.Muon
        does, are not cut.
        """
        if isinstance(model, ModelSizes):
            return model
        if not isinstance(model, nn.Module):
            named = ((f"unit.{i}", int(numel)) for i, numel in enumerate(model))
            listed_units = tuple(UnitSizes(name, (ParameterSizes(name, numel),)) for name, numel in named)
            for each in listed_units:
                if each.numel < 0:
                    raise ValueError(f"{each.name} has {each.numel} elements; sizes are elements per unit, at least 0")
            return cls(listed_units)
        tables = (module for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag)))
        embeddings = {id(module._parameters.get("weight")) for module in tables}  # a parametrised one computes its own
        # A tied embedding is multiplied too. A packed weight, as of 4 bits, has fewer elements than are multiplied.
        linears = {
            id(module._parameters.get("weight")): module.in_features * module.out_features
            for module in model.modules()
            if isinstance(module, nn.Linear)
        }
        grouped, listed = core.cut_experts(model, expert_bytes, dtype if cast else None, classes, several=ranks > 1)
        linears |= _routed(model, grouped)
        head = getattr(model, "get_output_embeddings", lambda: None)()
        stacks = {each.stack.path: each.named().keys() for each in grouped}
        followed = followed_stacks(model, [each.stack for each in grouped], classes)
        last = {name for path, names in stacks.items() if path not in followed for name in names}
        units: list[UnitSizes] = []
        seen: set[str] = set()
        counted: set[int] = set()  # quantised weights of several parts: the first part counts for all
        for unit in core.plan_units(model, classes, grouped=grouped, listed=listed):
            opens = any(m is not model and next(m.children(), None) is not None for m in unit.modules.values())
            # A block's units have its activations once, and the units inside of it have none.
            is_block = opens and not unit.depth and not seen & unit.modules.keys()
            seen |= unit.modules.keys()
            rows = []
            for name, p in unit.parameters.items():
                owner = id(unit.owners.get(name, p))
                multiplied = linears.get(owner, 0 if owner in embeddings else p.numel())
                whole: Any = unit.wholes.get(name, p)
                group = step.uncut_group(whole) if unit.trained and isinstance(step, UncutStep) else None
                uncut = None if group is None else (tuple(p.shape), group)
                rows.append(ParameterSizes(name, p.numel(), 0 if owner in counted else multiplied, uncut))
                if name in unit.owners:
                    counted.add(owner)
            matmul = sum(row.matmul_numel or 0 for row in rows)
            is_head = type(head) is nn.Linear and any(module is head for module in unit.modules.values())
            told = unit.encloses, unit.trained, unit.own_dtype if cast else unit.dtype, unit.beside, is_head, unit.depth
            again = unit.depth > 0 and not unit.modules.keys() <= last
            units.append(UnitSizes(unit.name, tuple(rows), matmul, is_block, *told, again))
        config = getattr(model, "config", None)
        hidden, vocabulary = (int(getattr(config, key, 0) or 0) for key in ("hidden_size", "vocab_size"))
        wider = (dtype or torch.bfloat16).itemsize / 2  # the formulas count 16-bit activations
        inner = int(getattr(config, "intermediate_size", None) or getattr(config, "n_inner", None) or 4 * hidden)
        decomposed = getattr(config, "activation_function", None) == "gelu_new"
        pairs = _pair_bytes(model, hidden)
        saved, freed, working, part = _block_bytes(units, hidden, inner, pairs, decomposed, wider)
        checkpoint, saved, freed, working, whole, part = (
            int(n * wider) for n in (2 * hidden, saved, freed, working, WHOLE * hidden, part)
        )
        norms = bool(outer_norms(model, core.unit_modules(model, classes).values()))
        return cls(tuple(units), checkpoint, saved, freed, working, whole, part, LOGIT_BYTES * vocabulary, norms)


def dtypes_of(model: nn.Module | ModelSizes | Sequence[int]) -> tuple[torch.dtype, torch.dtype]:
    """The dtypes of trained parameters, and of reduced gradients, that `shard` uses if it is given neither."""
    if not isinstance(model, nn.Module):
        return torch.bfloat16, torch.bfloat16
    core.check_initialised(model)
    found = list(dict.fromkeys(p.dtype for p in model.parameters() if p.requires_grad))
    return (found or [torch.float32])[0], found[0] if len(found) == 1 else torch.float32


def outer_norms(model: nn.Module, opened: Iterable[nn.Module]) -> dict[str, nn.Module]:
    """Maps names to norms outside of the modules `opened`, which open the units. The norm before the head is one."""
    inside = {id(each) for module in opened if module is not model for each in module.modules()}
    return {
        name: module
        for name, module in model.named_modules()
        if "norm" in type(module).__name__.lower()
        and next(module.children(), None) is None
        and not isinstance(module, nn.modules.batchnorm._BatchNorm)
        and id(module) not in inside
    }


def _routed(model: nn.Module, grouped: Sequence[Grouped]) -> dict[int, int]:
    """Maps the ids of stacked experts' parameters, and of their groups', to the mean elements a token multiplies."""
    found = {}
    for stack in core.find_stacks(model).values():
        of_token = min(stack.experts, int(getattr(stack.module.config, "num_experts_per_tok", None) or stack.experts))
        groups = [group for each in grouped if each.stack.module is stack.module for group in each.groups]
        for name, parameter in stack.parameters.items():
            for p in (parameter, *(group._parameters[name] for group in groups)):
                found[id(p)] = p.numel() * of_token // stack.experts  # type: ignore[union-attr]
    return found


def _pair_bytes(model: nn.Module, hidden: int) -> int:
    """Bytes per token, in 16 bits, that its experts save for backward, in the block with most of them.

    Counted on Qwen3-MoE's, eager, over widths of 128 and 256: per expert 4 for each element of the model's width, and 6
    for each of the expert's inner width.
    """
    found = [0]
    for stack in core.find_stacks(model).values():
        config = stack.module.config
        met = int(getattr(config, "num_experts_per_tok", None) or 1)
        met += int(getattr(config, "n_shared_experts", None) or 0)
        each = sum(p.numel() // stack.experts for p in stack.parameters.values() if p.dim() > 2)
        found.append(met * (4 * hidden + 6 * each // max(1, 3 * hidden)))
    return max(found)


def _block_bytes(
    units: Sequence[UnitSizes], hidden: int, inner: int, pairs: int, decomposed: bool, wider: float
) -> tuple[int, int, int, int]:
    """(saved for backward, freed during forward, peak in the backward of one recomputed block, the MLP's part of that).

    In bytes per token of 16-bit values; the caller multiplies by `wider` for others. Known are blocks with a gated
    feed-forward and norms in fp32, as Llama's in transformers, and blocks whose GELU takes several operators
    (`decomposed`), as GPT-2's. Their figures are counted from the storages alive and freed after a forward, and from
    the peak of those alive, over widths of 128 to 512. A block of a mixture has `pairs` bytes for its experts instead
    of a feed-forward, and half as much again while its backward runs. Other blocks follow the formula of Korthikanti et
    al. 2022 for saved activations.
    """
    if pairs:
        return 24 * hidden + pairs, int(44 * hidden / wider), 26 * hidden + 3 * pairs // 2, 0
    matrix = hidden * inner
    for unit in units:
        numels = [p.numel if p.matmul_numel is None else p.matmul_numel for p in unit.parameters]
        matrices = sum(n for n in numels if matrix and n % matrix == 0) // max(1, matrix)
        if unit.is_block and matrices == 3:
            return 24 * hidden + 8 * inner, int(44 * hidden / wider), 26 * hidden + 12 * inner, 12 * inner
        if unit.is_block and matrices == 2 and decomposed:
            saved, freed = 16 * hidden + 10 * inner, 4 * hidden + 8 * inner
            return saved, freed, saved + freed, 18 * inner
    return 34 * hidden, 0, 34 * hidden, 19 * hidden
