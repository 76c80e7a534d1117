"""Lends one unit's parameters to visits, which may write into them. Knows neither modules nor order.

Not here: its memory (in unit_memory.py), its gradient (in unit_gradient.py).

[Note: changes before a backward]
A backward gathers the current values, even if a step or a write has changed them since the forward. Autograd raises if
a tensor that it saved was changed in place, which it knows by the tensor's version counter. So each change that moves a
parameter's counter in plain torch has to move it here. A write into the parameter itself does that without our help.
After a step, a loaded checkpoint or a write into a gathered copy, `Version.wrote` does it. Autograd then raises for the
programs for which it raises in plain torch, and lets others run: no node saves the bias of a linear layer, for example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from ..errors import ChangedParameterError
from ..layout import Piece, UnitLayout
from ..model.aliases import Follower
from ..model.initial_values import become
from ..precision import FLOATS, as_bytes, rounded
from ..tensors.composite_parameter import Composite
from ..tensors.inner_tensors import forget_parts
from ..tensors.parameter_home import set_home
from ..tensors.sharded_parameter import sharded_class
from ..tensors.version_counters import Version
from .unit_gradient import Leftover, UnitGradient
from .unit_memory import Residency, Secondary, UnitContext, UnitMemory
from .write_checks import Watch


class Unit(UnitMemory):
    """Parameters that are unsharded, used and resharded together."""

    def __init__(
        self,
        index: int,
        layout: UnitLayout,
        parameters: Sequence[Any],  # nn.Parameter, or its parts
        groups: Sequence[int | None],
        dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        context: UnitContext,
        *,
        followers: Sequence[tuple[int, Follower]],
        composites: Sequence[Composite],
        wholes: Sequence[Any],
    ) -> None:
        """followers: other tensors over the memory of parameter k. composites: parameters that have parts here. wholes:
        for each parameter itself, or the one whose rows it is."""
        self.trainable = any(group is not None for group in groups)
        super().__init__(index, layout, dtype, context, exact=not self.trainable)
        self.parameters, self.groups = tuple(parameters), tuple(groups)
        self.wholes = tuple(wholes)
        self.gradient = UnitGradient(self, self.parameters, self.groups, reduce_dtype)
        self._classes: list[type[Tensor]] = [type(p) for p in self.parameters]  # nn.Parameter, or the user's subclass
        self.followers, self.composites = followers, composites
        self.users = 0  # open visits; the class of the parameters is nn.Parameter while there is one
        self.steps = [0] * len(self.parameters)
        self.versions = [Version() for _ in self.parameters]  # they end when they are no longer as the model was built
        if context.ranks.inside.size > 1:
            self.secondary = Secondary(context.ranks.inside, self.versions)
        self.copies = False  # a forward writes into the parameters: never the store's own memory, see `keep`
        self.watch = Watch(self.flat, self.views, self.parameters)

    def begin_anew(self) -> None:
        """After Ctrl-C at any line: sharded, used by nobody, and without a gradient."""
        super().begin_anew()
        self.seal()
        self.gradient.begin_anew()

    def adopt_parameters(self) -> None:
        """Make the user's parameters views of `flat`, without memory. Once, at the start."""
        for parameter in self.parameters:
            parameter.grad = None
        for tensor, k, _ in self.tensors():
            become(tensor, self.views[k])
        self.seal()

    def give_back(self, k: int, values: Tensor) -> None:
        """Make parameter k and its followers plain tensors again, with `values` of its shape, which may be on meta."""
        parameter = self.parameters[k]
        for tensor, at, kind in self.tensors():  # the parameter first
            if at == k:
                set_home(tensor, None)
                forget_parts(tensor)
                tensor.__class__ = nn.Parameter if tensor is parameter else Tensor
                become(tensor, values if tensor is parameter else parameter.detach())
                tensor.__class__ = kind  # from meta and back, `become` makes a follower a parameter

    def show(self, k: int, values: Tensor) -> None:
        """Let parameter k and its followers show `values` of its shape."""
        for tensor, at, _ in self.tensors():
            if at == k:
                tensor.data = values

    def keep_written(self) -> None:
        """Give the writes of a visit to the store. Call it when the visit is over, while the memory is still there.

        If the visit wrote into memory that the store lent, the old values are gone, and nothing tells which elements
        changed. Each parameter that was written is then kept whole, and in a 16-bit dtype all of its masters lose their
        low bits. Later visits get a copy, so this happens once.
        """
        start, stop = self.layout.shard_range(self.ranks.shard.rank)
        mine = self.flat.detach()[start:stop].clone()
        written = self.watch.written()
        for version, wrote in zip(self.versions, written, strict=True):
            version.ended() if wrote else version.wrote()
        if self.keeps_writes:
            return
        if self.residency is Residency.UNSHARDED:
            self.keep(mine)
        else:
            self.copies = True
            self.reshard()
            for piece in self.pieces:
                if written[piece.k]:
                    values = mine[piece.shard_start : piece.shard_stop].to(self.master_dtype)
                    self.store.write_state(self.index, "master", piece.shard_start, values)

    def enter(self, audit: Any = None) -> None:
        """One more visit uses the parameters: of their own class, with memory, from here on.

        audit: a kind of visits; some of that kind compare the values before and after, see `Watch.begin`.
        """
        self.unshard(copy=self.copies)
        self.users += 1
        if self.users == 1:
            self.watch.begin(audit, compares=not self.keeps_writes)
            self.unseal()
            for parameter, slot in zip(self.parameters, self.layout.slots, strict=True):
                if parameter.dtype is not self.dtype or parameter.shape != slot.shape:
                    raise ChangedParameterError(
                        f"{slot.name} was {slot.shape}, {self.dtype} in shard() and is now {tuple(parameter.shape)}, "
                        f"{parameter.dtype}: build the model again, and cast or resize it before zero_core.shard"
                    )
            for composite in self.composites:
                composite.open(self.index)

    @property
    def master_dtype(self) -> torch.dtype:
        """Of the state "master": see `store.ShardSpec`."""
        return torch.float32 if self.trainable else self.dtype

    @property
    def keeps_writes(self) -> bool:
        """Whether a forward writes into the masters themselves, so that no write can be lost."""
        masters = self.store.lends_masters and self.dtype == self.master_dtype
        return masters and not self.brings_memory and self.ranks.size == 1

    def changed(self) -> None:
        """Marks every parameter as changed."""
        for version in self.versions:
            version.wrote()

    def overwritten(self, k: int) -> None:
        """Parameter k gets other values in a way that autograd does not see: [Note: changes before a backward]."""
        self.versions[k].ended(self.parameters[k])
        if self.wholes[k] is not self.parameters[k]:
            increment_version(self.wholes[k])
        if self.users:
            self.watch.forgive(k)

    def write_part(self, name: str, k: int, values: Tensor, start: int = 0, *, changed: bool = False) -> None:
        """This rank's part of state `name` of parameter k goes to the store. values: (n,) its elements from `start`.
        changed: masters that round to their value keep all their bits."""
        piece = self.layout.piece(self.ranks.shard.rank, k)
        first, last = (0, 0) if piece is None else (piece.slot_start, piece.slot_stop)
        first, last = max(first, start), min(last, start + values.numel())
        if piece is not None and first < last:
            dtype = self.master_dtype if name == "master" else torch.float32
            part, at = values[first - start : last - start], piece.shard_start + first - piece.slot_start
            written = part.to(dtype)
            if changed and part.dtype != dtype:
                old = self.store.read_state(self.index, name, at, at + part.numel()).to(part.device)
                written = torch.where(part != rounded(old, part.dtype), written, old)
            self.store.write_state(self.index, name, at, written)

    def shaped(self, k: int) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the states of parameter k that have not its shape, see `ShardStore.state_shapes`."""
        slot, group = self.layout.slots[k], self.groups[k]
        return self.store.state_shapes(group, slot.shape) if slot.uncut and group is not None else {}

    def write_shaped(self, k: int, name: str, values: Tensor) -> None:
        """Write all of one such state, in any shape, to the store if this rank has it."""
        for segment in self.segments_of(k):
            self.store.write_shaped(self.index, segment, name, 0, values.reshape(-1).to(torch.float32))

    def has_own_gradient(self, k: int) -> bool:
        """Whether parameter k, or the whole it is cut from, has a gradient on this rank that no optimizer wants."""
        with torch._C.DisableTorchFunctionSubclass():
            there = self.parameters[k].grad is not None or self.wholes[k].grad is not None
        return there and self.groups[k] is None

    def rows(self, k: int, values: Tensor) -> Tensor:
        """Parameter k's part of `values`: its rows if these have the shape of the whole it is cut from, else all."""
        whole = self.layout.slots[k].whole
        return values[whole.start : whole.stop] if tuple(values.shape) == whole.shape and values.dim() else values

    def full_state(self, k: int, name: str) -> Tensor:
        """State `name` of parameter k, fp32, in its own shape. Collective."""
        if (shape := self.shaped(k).get(name)) is None:
            return self.full_values(k, partial(self.store.read_state, self.index, name))
        numel = math.prod(shape)
        whole = torch.zeros(numel, dtype=torch.float32, device=self.ranks.device)  # an empty parameter has no owner
        for segment in self.segments_of(k):
            whole.copy_(self.store.read_shaped(self.index, segment, name, 0, numel))
        if (owner := self.layout.owner(k)) is not None:
            self.ranks.from_shard(whole, self.name, owner)
        return whole.view(shape)

    def master(self, k: int) -> Tensor:
        """Parameter k's master, in `master_dtype`, with all bits. Collective."""
        return self.full_values(k, partial(self.store.read_state, self.index, "master"), self.master_dtype)

    def full_values(self, k: int, read: Callable[[int, int], Tensor], dtype: torch.dtype = torch.float32) -> Tensor:
        """Parameter k's values, from `read(start, stop)`, which returns elements of this rank's shard. Collective."""
        slot, ranks = self.layout.slots[k], self.ranks
        if ranks.shard.size == 1:
            return read(slot.offset, slot.stop).to(ranks.device).view(slot.shape)
        if (owner := self.layout.owner(k)) is not None:
            whole = torch.empty(slot.numel, dtype=dtype, device=ranks.device)
            if (own := self.layout.piece(ranks.shard.rank, k)) is not None:
                whole.copy_(read(own.shard_start, own.shard_stop))
            return ranks.from_shard(whole, self.name, owner).view(slot.shape)
        pieces = [self.layout.piece(rank, k) for rank in range(ranks.shard.size)]
        widest = max((piece.numel for piece in pieces if piece is not None), default=0)
        rows = torch.zeros(len(pieces), widest, dtype=dtype, device=ranks.device)
        if (mine := pieces[ranks.shard.rank]) is not None:
            rows[ranks.shard.rank, : mine.numel] = read(mine.shard_start, mine.shard_stop)
        if widest:
            whole, part = rows.view(-1), rows[ranks.shard.rank]
            if dtype not in FLOATS:
                whole, part = as_bytes(whole), as_bytes(part)
            work = ranks.all_gather(whole, part, self.name, exact=True)
            ranks.wait(work, "all_gather", self.name)
        held = [(piece.slot_start, rank, piece.numel) for rank, piece in enumerate(pieces) if piece is not None]
        parts = [rows[rank, :numel] for _, rank, numel in sorted(held)]  # shards and ranks may differ in order
        return torch.cat(parts or [rows.view(-1)]).view(slot.shape)

    def rows_of(self, k: int, state: Mapping[str, Any]) -> dict[str, Any]:
        """`rows` of each tensor in a state of the whole."""
        return {name: self.rows(k, value) if isinstance(value, Tensor) else value for name, value in state.items()}

    @property
    def pieces(self) -> tuple[Piece, ...]:
        """Of the unit's shard on this rank, as many as the shard has segments."""
        return self.layout.pieces(self.ranks.shard.rank)

    def segments_of(self, k: int) -> list[int]:
        """Which segments of this rank's shard parameter k has: one or none."""
        return [segment for segment, piece in enumerate(self.pieces) if piece.k == k]

    def stepped(self) -> list[int]:
        """Which parameters a step changes."""
        return [k for k, group in enumerate(self.groups) if self.gradient.used[k] and group is not None]

    def count_step(self, leftover: Leftover) -> list[int]:
        """Count a step of every parameter that was used; its number for each segment, 0 for those that were not."""
        stepped = self.stepped()
        self.updating = bool(stepped) and self.context.updates_later
        for k in stepped:
            self.steps[k] += 1
        self.gradient.consumed(leftover)
        return [self.steps[piece.k] if piece.k in stepped else 0 for piece in self.pieces]

    def keep(self, mine: Tensor, *, master: bool = False) -> None:
        """Write this rank's slice (shard_numel,) to the store where it changed, so that other masters keep their bits.

        mine: in the unit's dtype, as it was gathered; master: it is the masters. Not for writes into the store's own
        memory.
        """
        self.changed()
        old = self.store.read_state(self.index, "master", 0, self.shard_numel).to(mine.device)
        if not self.trainable:
            for piece in self.pieces:
                part = slice(piece.shard_start, piece.shard_stop)
                if not torch.equal(as_bytes(mine[part]), as_bytes(old[part])):
                    self.versions[piece.k].ended()
                    self.store.write_state(self.index, "master", piece.shard_start, mine[part])
            return
        before = rounded(old, mine.dtype)
        if not master and self.layout.ranges is None:
            before = self.ranks.arrives_as(before)
        changed = mine != before
        if bool(changed.any()):
            self.store.write_state(self.index, "master", 0, torch.where(changed, mine.float(), old))

    def leave(self) -> None:
        """One visit fewer. The memory stays until reshard()."""
        self.users -= 1
        if self.users == 0:
            self.seal()

    def unseal(self) -> None:
        """Parameters and their followers have their own classes. They may have no memory yet."""
        for tensor, _, kind in self.tensors():
            tensor.__class__ = kind

    def tensors(self) -> list[tuple[Any, int, type[Tensor]]]:
        """Parameters and their followers; for each its parameter's number, and its class while it has memory."""
        own = zip(self.parameters, self._classes, strict=True)
        return [
            *((p, k, kind) for k, (p, kind) in enumerate(own)),
            *((follower.tensor, k, Tensor) for k, follower in self.followers),
        ]

    def seal(self) -> None:
        """No visit uses the parameters: any use from here on is an external one."""
        self.users = 0
        for tensor, _, kind in self.tensors():
            tensor.__class__ = sharded_class(kind)
        for composite in self.composites:
            composite.close(self.index)


def optimized_in(units: Iterable[Unit]) -> Iterator[tuple[Unit, int, Any]]:
    """Yields each parameter of the optimizer, or rows of one: its unit, its number there, and the whole parameter."""
    for unit in units:
        for k, whole in enumerate(unit.wholes):
            if unit.groups[k] is not None:
                yield unit, k, whole
