"""Builds one sharded model: units from plans, nodes from modules, shards handed to a store unit by unit.

Owns the order of these steps, which bounds memory, and the earlier state of each parameter, for a `shard` that fails:
the user's plain tensor, or a place in earlier shards. The store hands back the values that it still has:
`StoreContext.rescue`. Not here: refusals (in validate.py), public calls (in shard.py).
"""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from ..device import has_streams, indexed
from ..errors import StoreError, ZeroError, listed, noted
from ..gradients.loss_scaling import LossScale
from ..hooks.attach_hooks import Node
from ..layout import UnitLayout, owners
from ..model.aliases import Follower
from ..model.initial_values import Initialiser
from ..model.unit_plan import UnitPlan
from ..optim.contracts import steps_whole
from ..optim.joint import kind_of
from ..optim.single_parameter import look_of
from ..optim.uncut import check_rows, uncut_groups
from ..precision import as_bytes
from ..store import Segment, ShardSpec, ShardStore, StoreContext
from ..tensors.composite_parameter import Composite
from ..tensors.inner_tensors import keep_parts, named_parts, wraps
from ..tensors.sharded_parameter import Sharded
from ..unit_memory.residency_policy import StageRow
from ..unit_memory.stacked_parameter import Stacked, refuse_cut
from ..unit_memory.unit import Unit
from ..unit_memory.unit_memory import UnitContext
from .move_shards import Earlier


class Maker:
    """Builds the parts of one sharded model, in the order in which memory allows it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        plans: list[UnitPlan],
        followers: Sequence[Follower],
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        context: UnitContext,
        earlier: Earlier,
    ) -> None:
        self.model, self.optimizer, self.plans, self.context = model, optimizer, plans, context
        self.earlier = earlier
        self.ranks = context.ranks
        found = [plan.own_dtype or param_dtype or plan.dtype for plan in plans]
        trained = {dtype for plan, dtype in zip(plans, found, strict=True) if plan.trained}
        self.reduce_dtype = reduce_dtype or (trained.pop() if len(trained) == 1 else torch.float32)
        groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        self._positions = {id(p): n for group in optimizer.param_groups for n, p in enumerate(group["params"])}
        following: dict[int, list[Follower]] = defaultdict(list)
        for follower in followers:
            following[id(follower.lead)].append(follower)
        composites = self._composites()
        uncut, size = uncut_groups(optimizer), self.ranks.shard.size
        stays = [(plan, _stays(plan, uncut)) for plan in plans]
        check_rows(optimizer, [(plan.rows[k], stay[k]) for plan, stay in stays for k in plan.rows if k in stay])
        numels = ([(p.numel(), name in stay) for name, p in plan.parameters.items()] for plan, stay in stays)
        owned = owners(numels, size)
        self.units: list[Unit] = []
        rows: dict[int, list[tuple[Unit, int]]] = defaultdict(list)  # by the ids of the parameters that are cut
        for index, ((plan, stay), dtype) in enumerate(zip(stays, found, strict=True)):
            shapes = [(name, tuple(p.shape)) for name, p in plan.parameters.items()]
            parameters = list(plan.parameters.values())
            wholes = [plan.wholes.get(name, p) for name, p in plan.parameters.items()]
            layout = UnitLayout.build(
                plan.name, shapes, itemsize=dtype.itemsize, shard_count=size, rows=plan.rows, uncut=stay,
                owners=owned[index],
            )  # fmt: skip
            places = [groups[id(p)] if plan.trained else None for p in wholes]
            unit = Unit(
                index, layout, parameters, places, dtype, self.reduce_dtype, context,
                followers=[(k, follower) for k, p in enumerate(parameters) for follower in following[id(p)]],
                composites=[*dict.fromkeys(composites[id(p)] for p in (*parameters, *wholes) if id(p) in composites)],
                wholes=wholes,
            )  # fmt: skip
            for version, parameter in zip(unit.versions, wholes, strict=True):
                if earlier.was_changed(parameter):
                    version.ended()
            unit.gradient.leftover = [earlier.leftover(parameter) for parameter in wholes]
            self.units.append(unit)
            for k, (whole, slot) in enumerate(zip(wholes, layout.slots, strict=True)):
                if slot.rows is not None:
                    rows[id(whole)].append((unit, k))
        self.stacks = {whole: Stacked(parts) for whole, parts in rows.items()}  # by the same ids
        for stack in self.stacks.values():
            refuse_cut(stack, following[id(stack.parameter)])

    def _composites(self) -> dict[int, Composite]:
        """The parameters that have parts, those of groups too, by the ids of these."""
        made: dict[int, Composite] = {}
        found: dict[int, Composite] = {}
        for name, part, parameter, module, quantised in list(named_parts(self.model, remove_duplicate=False)):
            if quantised:
                keep_parts(parameter, module)
            if wraps(type(parameter)):
                composite = made.setdefault(id(parameter), Composite(name.rpartition(".")[0], parameter))
                found[id(part)] = composite
        for plan in self.plans:
            for called, rows in plan.rows.items():
                owner: Any = plan.owners.get(called)
                if owner is not None:
                    keep_parts(owner, next(iter(plan.modules.values())))
                    composite = made.setdefault(id(owner), Composite(rows.name.rpartition(".")[0], owner))
                    found[id(plan.parameters[called])] = composite
        return found

    def compare(self, stage: int, max_grad_norm: float | None, scale: LossScale | None) -> None:
        """Raises if ranks were given different models or options: collectives of two sizes end a process with gloo."""
        units = [(u.name, u.groups, [(s.name, s.shape) for s in u.layout.slots], u.dtype) for u in self.units]
        kind, options = kind_of(self.optimizer), (stage, max_grad_norm, scale, self.reduce_dtype)
        if not self.ranks.agree(zlib.crc32(repr((units, kind, options)).encode()), "what shard() was given"):
            shapes = [s.shape for u in self.units for s in u.layout.slots]
            raise ZeroError(
                f"the ranks gave shard() different things: on rank {self.ranks.rank} a model of {len(shapes)} "
                f"parameters, {sum(map(math.prod, shapes)):,} elements, in {len(units)} units, {kind} with "
                f"{[len(group['params']) for group in self.optimizer.param_groups]} parameters in its groups, stage="
                f"{stage}, max_grad_norm={max_grad_norm}, loss_scale={scale}, {self.reduce_dtype} gradients; compare "
                f"the other ranks' lines: all {self.ranks.size} must give the same"
            )

    def attach_store(self, initialiser: Initialiser, handover: Handover, row: StageRow, prefetch_bytes: int) -> None:
        """Hand the shards over, unit by unit: each unit's own memory goes before the next one's is read."""
        rank = self.ranks.shard.rank
        for buffer in self.model.buffers():
            if not buffer.is_meta and buffer.numel():
                self.ranks.broadcast(buffer.data, "buffers")

        def initial(i: int) -> Tensor:
            self.earlier.give_up(self.context.store)
            unit = self.units[i]
            for parameter, whole in zip(unit.parameters, unit.wholes, strict=True):
                if not parameter.is_meta and self.ranks.size > 1 and not self.earlier.has(whole):
                    values = parameter.data.contiguous().to(self.ranks.device)  # NCCL takes no host memory
                    self.ranks.broadcast(as_bytes(values), unit.name)
                    if parameter is whole:
                        parameter.data = values.to(parameter.device)
                    else:  # rows of a parameter, whose memory has the values
                        parameter.data.copy_(values)
            values = initialiser.shard(unit.layout, unit.wholes, rank, unit.master_dtype)
            handover.take(i)
            return values

        context = StoreContext(
            device=self.ranks.device, rank=rank, shard_count=self.ranks.shard.size, reduce_dtype=self.reduce_dtype,
            prefetch_bytes=prefetch_bytes, keeps_parameters=row.keeps_parameters,
            keeps_gradients=row.keeps_gradients and self.ranks.size > 1,
            observer=self.context.observer, rescue=handover.give_back, agree=self._last_generation,
        )  # fmt: skip
        self.context.store.attach([self._spec(unit) for unit in self.units], self.optimizer, initial, context=context)

    def _last_generation(self, found: Sequence[int]) -> int:
        """The last generation that all ranks have. Raises ZeroError if the ranks' last ones differ by more than one."""
        numbers = self.ranks.numbers([0.0] * self.ranks.size)
        numbers[self.ranks.rank] = max(found, default=0)
        everybody = [int(number) for number in self.ranks.sum_everywhere(numbers, "last generation").tolist()]
        if max(everybody) - min(everybody) > 1:
            rank = everybody.index(min(everybody))
            raise ZeroError(
                f"the last steps that the ranks have on disk are {everybody}, and ranks of one run differ by one at "
                f"most: rank {rank} has lost its slab, or has the slab of another run; load a checkpoint, after "
                "removing the slabs of all ranks"
            )
        return min(everybody)

    def _spec(self, unit: Unit) -> ShardSpec:
        plan, segments = self.plans[unit.index], []
        for p in unit.pieces:
            whole, group, parameter = p.slot.whole, unit.groups[p.k], unit.wholes[p.k]
            look = None if group is None or not steps_whole(self.optimizer, group) else look_of(parameter)
            where = whole.name, whole.shape, whole.flat_start + p.slot_start, p.slot.uncut
            position = self._positions.get(id(parameter), 0)
            segments.append(Segment(p.shard_start, p.shard_stop, group, *where, look, position))
        told = plan.encloses, plan.trained, plan.beside, plan.depth
        return ShardSpec(unit.name, unit.shard_numel, unit.dtype, tuple(segments), *told, unit.layout.numels)

    def nodes(self) -> list[Node]:
        """The modules that get hooks: those of a unit, and the root in any case."""
        opened: dict[str, list[int]] = {"": []}
        modules = {"": self.model}
        for index, plan in enumerate(self.plans):
            modules |= plan.modules
            for path in plan.modules:
                opened.setdefault(path, []).append(index)
        return [
            Node(n, path or "root", modules[path], tuple(units), foreseen=not any(self.plans[u].listed for u in units))
            for n, (path, units) in enumerate(opened.items())
        ]


class Handover:
    """Takes unit after unit from the user, and gives all of them back where `shard` fails."""

    def __init__(self, units: Sequence[Unit], stacks: Mapping[int, Stacked], earlier: Earlier) -> None:
        """stacks: by the ids of parameters that are cut into rows of several units."""
        self._units, self._stacks, self._earlier = units, stacks, earlier
        # By unit, of the parameters that are not back, by their numbers: a tensor like each on meta, and its device. A
        # deferred one itself, which its recording knows.
        self._away: dict[int, dict[int, tuple[Tensor, torch.device]]] = {}

    def take(self, i: int) -> None:
        """Unit i's parameters become views without memory: the caller has their values."""
        parameters = enumerate(self._units[i].parameters)
        self._away[i] = {
            k: (p.detach() if p.is_meta else torch.empty_like(p.data, device="meta"), p.device) for k, p in parameters
        }
        self._units[i].adopt_parameters()
        self._earlier.taken(self._units[i])
        for whole in self._units[i].wholes:
            stacked = self._stacks.get(id(whole))
            if stacked is not None and stacked.parts[-1][0] is self._units[i]:  # units are taken in order
                stacked.adopt()

    def give_back(self, i: int, master: Tensor) -> None:
        """Unit i's parameters have memory and values again, if this rank's shard of its master (numel,) is all of it.

        A frozen parameter that the store keeps in fewer bits than the user did has lost them, and stays away.
        """
        unit, away = self._units[i], self._away.get(i, {})
        unit.unseal()
        whole = unit.ranks.shard.size == 1
        for k, (like, device) in list(away.items()):
            slot = unit.layout.slots[k]
            kept = unit.trainable or like.dtype.itemsize <= unit.dtype.itemsize
            values = master[slot.offset : slot.stop] if whole and kept else None
            if self._earlier.has(unit.wholes[k]):
                self._earlier.put_back(unit, k, values)
            elif device.type == "meta":
                unit.give_back(k, like)
            elif values is not None:
                unit.give_back(k, torch.empty_like(like, device=device).copy_(values.view(slot.shape)))
            else:
                continue
            del away[k]
        for each in unit.composites:
            each.give_back(plain=not self._earlier.has(next(iter(each.parts.values()))))

    @torch.no_grad()
    def undo(self, error: BaseException, store: ShardStore, *, close: bool) -> None:
        """Put back every parameter that can be, and close the store if asked to. Raises StoreError naming the lost. An
        `error` that is no Exception, such as KeyboardInterrupt, gets them as a note."""
        lost = []
        for i, away in self._away.items():
            unit = self._units[i]
            with suppress(Exception):  # a store that failed has handed back its last values by `rescue`
                self.give_back(i, store.read_state(i, "master", 0, unit.shard_numel))
            unit.unseal()
            for k, (like, device) in away.items():
                if self._earlier.has(unit.wholes[k]):
                    self._earlier.put_back(unit, k, None)
                    continue
                unit.give_back(k, like)
                if device.type != "meta":
                    lost.append(unit.layout.slots[k].name)
        for stacked in self._stacks.values():
            if isinstance(stacked.parameter, Sharded) and not self._earlier.has(stacked.parameter):
                stacked.restore()
        if close:
            with suppress(Exception):
                store.close()
        if lost:
            told = (
                f"shard() failed after it had moved parameters ({listed(lost, most=4)}) into the store. On this rank "
                "the values of these parameters are lost. Build the model again before the next shard(). A model that "
                "was built in zero_core.deferred_init() keeps its values in such a case"
            )
            if isinstance(error, Exception):
                raise StoreError(f"{told}. The failure: {type(error).__name__}: {error}") from error
            noted(error, told)  # KeyboardInterrupt keeps its type


def _stays(plan: UnitPlan, uncut: Mapping[int, int]) -> dict[str, int]:
    """By the names of the unit's parameters that the optimizer needs whole, their groups. uncut: these by the ids."""
    wholes = {name: id(plan.wholes.get(name, p)) for name, p in plan.parameters.items()} if plan.trained else {}
    return {name: uncut[whole] for name, whole in wholes.items() if whole in uncut}


def compute_device(model: nn.Module, device: torch.device | str | None, mesh: Any) -> torch.device:
    """The device asked for; else that of the parameters; if all are deferred, that of the mesh, or the CPU."""
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise ZeroError(f"parameters on {sorted(map(str, devices))}: move the model to one device before shard")
    if device is None and devices:
        return devices.pop()
    found = torch.device(device if device is not None else getattr(mesh, "device_type", "cpu"))
    if has_streams(found) and not torch.get_device_module(found).is_available():
        raise ZeroError(f"device={found}: torch sees no {found.type} here; pass device='cpu' to compute on the CPU")
    return indexed(found)


def move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)
