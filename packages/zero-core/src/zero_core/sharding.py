"""What a user calls: `shard`, `no_sync`, `units`; and `handle`, for siblings that read shards. Nothing runs here."""

from __future__ import annotations

import math
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, overload

import torch
from torch import nn

from .building.init import Initialiser
from .building.overlaps import Follower, overlaps_of, remember
from .building.parts import keep_parts, named_parts, wraps
from .building.wrapping import UnitPlan, plan_units, unit_modules
from .checks import check_given, check_group, check_update_in_backward
from .comm.collectives import CollectivesFactory
from .comm.ranks import Ranks
from .device import has_streams, indexed
from .errors import StageError, ZeroError
from .layout import UnitLayout
from .optim.backward_updates import UpdatesInBackward
from .optim.carried import carry_over
from .optim.device_store import DeviceStore
from .optim.handover import Handover
from .optim.optimizer import ShardedOptimizer
from .pool import Pool
from .precision import as_bytes
from .runtime.attaching import Node
from .runtime.composite import Composite
from .runtime.context import UnitContext
from .runtime.hooks import Engine
from .runtime.parameter import home_of, set_home
from .runtime.place import Place, Window
from .runtime.replaced import replace_optimizer
from .runtime.scaling import LossScale
from .runtime.snapshots import Snapshots
from .runtime.stages import STAGES
from .runtime.unit import Unit
from .store import NullObserver, Observer, Segment, ShardSpec, ShardStore, StoreContext, lent_bytes

__all__ = ["Handle", "handle", "no_sync", "shard", "units"]

_HANDLE = "_zero_handle"
_PREFETCH_BYTES = 128 << 20
_in_use: weakref.WeakSet[ShardStore] = weakref.WeakSet()  # stores of sharded models, which a failed shard leaves open


@dataclass(frozen=True)
class Handle:
    """What is behind a sharded model, for checkpoints and tools.

    Call `settle()` before store.read_state or write_state: it gives every lease back, so nothing stale stays resident.
    Of each unit: `.layout` (slots named as in model.named_parameters()), `.index` (in the store), `.parameters`,
    `.groups` (None: frozen), `.steps` (step count per parameter, writable), `.dtype`.
    """

    model: nn.Module
    units: tuple[Unit, ...]
    store: ShardStore
    optimizer: ShardedOptimizer
    ranks: Ranks  # .shard.rank/.size/.group, .replicate..., .rank, .size, .device
    stage: int
    engine: Engine

    def settle(self) -> None:
        """Gives every lease of the store back, so that nothing stale stays resident."""
        self.engine.settle()

    def close(self) -> None:
        """Give the store's memory back. The model cannot be used after."""
        self.optimizer.close()


def handle(model: nn.Module) -> Handle:
    """The handle of a model that `shard` was called on."""
    found = model.__dict__.get(_HANDLE)
    if found is None:
        raise ZeroError(f"{type(model).__name__} is not sharded: call zero_core.shard(model, optimizer) first")
    return found


@overload
def shard(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> ShardedOptimizer: ...


@overload
def shard(model: nn.Module, optimizer: None = None, **options: Any) -> Handle: ...


def shard(  # type: ignore[misc]  # the overloads leave keywords to this signature
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    stage: int = 3,
    mesh: Any = None,
    units: Sequence[type[nn.Module]] | None = None,
    param_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    loss_scale: float | str | LossScale | None = None,
    max_grad_norm: float | None = None,
    resident_bytes: int = 0,
    prefetch_bytes: int = _PREFETCH_BYTES,
    update_in_backward: bool = False,
    store: ShardStore | None = None,
    observer: Observer | None = None,
    device: torch.device | str | None = None,
    collectives: CollectivesFactory | None = None,
    secondary_shards: bool = False,
) -> ShardedOptimizer | Handle:
    """Shard `model` in place and return the optimizer that takes the place of `optimizer`. Collective.

    Without an optimizer nothing is trained, as in a reference or a reward model, and the model's handle is returned.
    What is trained are the parameters of `optimizer` that require a gradient now. All others are kept in their own
    dtype, which may be any, and cost no more than their bytes. What `optimizer` keeps already (it has stepped, or was
    loaded) moves into the store, rank 0's to every rank.
    A plain tensor that a module keeps over a parameter's memory follows the parameter. Two parameters over one memory
    are refused if one is trained, and become one parameter if none is: see building/overlaps.py.

    stage: the ZeRO stage, 0 to 3.
    mesh: a DeviceMesh (shard,) or (replicate, shard); None: all ranks, or this process alone without torch.distributed.
    units: module classes of which each instance is a unit; None: the blocks of the model, see building/wrapping.py.
    param_dtype: of parameters and compute, while the fp32 masters are in the store; None: as they are.
    reduce_dtype: of gradients between ranks and to the store; None: the parameters'.
    loss_scale: "dynamic", a number, a LossScale, or None.
    max_grad_norm: gradients are clipped to this norm of all of them, exactly; None: they are not.
    resident_bytes: stage 3 keeps that much unsharded between uses.
    prefetch_bytes: how much is gathered ahead, or stays at the end of a forward for its backward; 0: nothing.
    update_in_backward: a unit is updated when its gradient arrives; not with clipping, loss scaling or stage 1.
    store: where shards are kept between uses; None: a DeviceStore.
    observer: is told of every span of work.
    device: where to compute, and buffers go along; None: where the parameters are. A model that does not fit there
        stays in host memory, or in deferred_init(), until shard takes it; then say `device`.
    collectives: makes what moves values between the ranks of a group, see comm.Collectives; None: by its backend.
    secondary_shards: of stage 3 over several machines, hpZ of ZeRO++: after its first gather a unit is gathered inside
        the machine until it changes, and each of its l ranks keeps 1/l of it. runtime/secondary.py has the details.

    Raises ZeroError, StageError, AlreadyShardedError, UnsupportedOptimizerError, each naming the way out.

    Examples:
        >>> import torch, zero_core
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), max_grad_norm=1.0)
        >>> model(torch.ones(2, 4)).sum().backward()
        >>> optimizer.step()
        >>> f"{optimizer.grad_norm:.3f}"
        '4.472'
        >>> optimizer.close()
    """
    trains = optimizer is not None
    optimizer = torch.optim.SGD([{"params": []}]) if optimizer is None else optimizer
    check_given(model, optimizer, stage, param_dtype, max_grad_norm)
    check_group(mesh)
    scale = LossScale.of(loss_scale)
    if update_in_backward:
        check_update_in_backward(stage, max_grad_norm, scale)
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    overlaps = overlaps_of(model, optimized)
    for twins in overlaps.twins:
        twins.tie(model)
    observer = observer or NullObserver()
    where = _compute_device(model, device, mesh)
    pool = Pool(where)
    if secondary_shards and STAGES[stage].keeps_parameters:
        raise StageError(f"secondary_shards=True with stage={stage}, which gathers a unit once a step: leave it out")
    ranks = Ranks.build(
        mesh, pool, sharded=STAGES[stage].sharded, device=where, collectives=collectives, secondary=secondary_shards
    )
    ranks.meet("shard")
    initialiser = Initialiser(model)
    plans = plan_units(model, units, optimized)
    if device is not None:
        _move_buffers(model, where)
    store = store or DeviceStore()
    context = UnitContext(ranks, store, pool, observer)
    made = _Maker(model, optimizer, plans, overlaps.followers, param_dtype, reduce_dtype, context)
    made.compare(stage, max_grad_norm)
    updates = UpdatesInBackward(made.units, context, optimizer.param_groups) if update_in_backward else None
    engine = Engine(
        model, made.units, made.nodes(unit_modules(model, units)), context, STAGES[stage],
        prefetch_bytes=prefetch_bytes, resident_bytes=resident_bytes, loss_scale=scale,
        begin_update=updates.begin if updates is not None else None, optimized=optimized,
    )  # fmt: skip
    handover = Handover(made.units)
    try:
        lent = lent_bytes([unit.nbytes for unit in made.units], prefetch_bytes, resident_bytes, ranks.shard.size)
        made.attach_store(initialiser, handover, stage, lent)
        for unit in made.units:
            for k, parameter in enumerate(unit.parameters):
                set_home(parameter, Place(engine, unit, k))
            for k, follower in unit.followers:
                home = home_of(unit.parameters[k])
                set_home(follower.tensor, home if follower.whole else Window(engine, unit, k, follower))
            for composite in unit.composites:
                set_home(composite.parameter, composite)
        carry_over(optimizer, made.units, store, ranks)
        engine.attach()
        engine.keep_attached(Snapshots(engine).attach(model))
        sharded = ShardedOptimizer(optimizer, engine, updates, max_grad_norm)
    except BaseException as error:
        engine.detach()
        handover.undo(error, store, close=store not in _in_use)
        raise
    _in_use.add(store)
    initialiser.release()
    remember(overlaps.extents)
    found = model.__dict__[_HANDLE] = Handle(model, tuple(made.units), store, sharded, ranks, stage, engine)
    optimizer.__dict__["_zero_sharded"] = True
    replace_optimizer(optimizer)
    return sharded if trains else found


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only accumulate, in fp32 on each rank; the first backward or step() outside reduces the sum."""
    with handle(model).engine.reducer.no_sync():
        yield


def units(model: nn.Module) -> tuple[Unit, ...]:
    """The units of a sharded model, in the order of the store's shards."""
    return handle(model).units


class _Maker:
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
    ) -> None:
        self.model, self.optimizer, self.plans, self.context = model, optimizer, plans, context
        self.ranks = context.ranks
        found = [plan.own_dtype or param_dtype or plan.dtype for plan in plans]
        trained = {dtype for plan, dtype in zip(plans, found, strict=True) if plan.trained}
        self.reduce_dtype = reduce_dtype or (trained.pop() if len(trained) == 1 else torch.float32)
        groups = {id(p): g for g, group in enumerate(optimizer.param_groups) for p in group["params"]}
        following: dict[int, list[Follower]] = defaultdict(list)
        for follower in followers:
            following[id(follower.lead)].append(follower)
        composites = self._composites()
        self.units: list[Unit] = []
        for index, (plan, dtype) in enumerate(zip(plans, found, strict=True)):
            shapes = [(name, tuple(p.shape)) for name, p in plan.parameters.items()]
            layout = UnitLayout.build(plan.name, shapes, itemsize=dtype.itemsize, shard_count=self.ranks.shard.size)
            parameters = list(plan.parameters.values())
            places = [groups[id(p)] if plan.trained else None for p in parameters]
            unit = Unit(
                index, layout, parameters, places, dtype, self.reduce_dtype, context,
                followers=[(k, follower) for k, p in enumerate(parameters) for follower in following[id(p)]],
                composites=list(dict.fromkeys(composites[id(p)] for p in parameters if id(p) in composites)),
            )  # fmt: skip
            self.units.append(unit)

    def _composites(self) -> dict[int, Composite]:
        """The parameters that have parts, by the ids of these."""
        made: dict[int, Composite] = {}
        found: dict[int, Composite] = {}
        for name, part, parameter, module, quantised in list(named_parts(self.model, remove_duplicate=False)):
            if quantised:
                keep_parts(parameter, module)
            if wraps(type(parameter)):
                composite = made.setdefault(id(parameter), Composite(name.rpartition(".")[0], parameter))
                found[id(part)] = composite
        return found

    def compare(self, stage: int, max_grad_norm: float | None) -> None:
        """The same on every rank? Else the first collective would be of two sizes, which ends a process of gloo's."""
        units = [(u.name, u.groups, [(s.name, s.shape) for s in u.layout.slots], u.dtype) for u in self.units]
        kind, options = type(self.optimizer).__name__, (stage, max_grad_norm, self.reduce_dtype)
        if not self.ranks.agree(zlib.crc32(repr((units, kind, options)).encode()), "what shard() was given"):
            shapes = [s.shape for u in self.units for s in u.layout.slots]
            raise ZeroError(
                f"the ranks gave shard() different things: on rank {self.ranks.rank} a model of {len(shapes)} "
                f"parameters, {sum(map(math.prod, shapes)):,} elements, in {len(units)} units, {kind} with groups of "
                f"{[len(group['params']) for group in self.optimizer.param_groups]}, stage={stage}, max_grad_norm="
                f"{max_grad_norm}, {self.reduce_dtype} gradients; it must be the same on all {self.ranks.size}"
            )

    def attach_store(self, initialiser: Initialiser, handover: Handover, stage: int, prefetch_bytes: int) -> None:
        """Hand the shards over, unit by unit: each unit's own memory goes before the next one's is read."""
        rank = self.ranks.shard.rank
        for buffer in self.model.buffers():
            if not buffer.is_meta and buffer.numel():
                self.ranks.broadcast(buffer.data, "buffers")

        def initial(i: int) -> torch.Tensor:
            unit = self.units[i]
            for parameter in unit.parameters:
                if not parameter.is_meta and self.ranks.size > 1:
                    values = parameter.data.contiguous().to(self.ranks.device)  # NCCL takes no host memory
                    self.ranks.broadcast(as_bytes(values), unit.name)
                    parameter.data = values.to(parameter.device)
            values = initialiser.shard(unit.layout, unit.parameters, rank, unit.master_dtype)
            handover.take(i)
            return values

        context = StoreContext(
            device=self.ranks.device,
            local_rank=self.ranks.device.index or 0,
            rank=rank,
            shard_count=self.ranks.shard.size,
            reduce_dtype=self.reduce_dtype,
            prefetch_bytes=prefetch_bytes,
            keeps_parameters=STAGES[stage].keeps_parameters,
            observer=self.context.observer,
            rescue=handover.give_back,
            agree=self._last_generation,
        )
        self.context.store.attach([self._spec(unit) for unit in self.units], self.optimizer, initial, context=context)

    def _last_generation(self, found: Sequence[int]) -> int:
        """The last one that all ranks have. Raises ZeroError where one has none of a run that others have."""
        numbers = self.ranks.numbers([0.0] * self.ranks.size)
        numbers[self.ranks.rank] = max(found, default=0)
        everybody = [int(number) for number in self.ranks.sum_everywhere(numbers, "last generation").tolist()]
        if max(everybody) - min(everybody) > 1:
            rank = everybody.index(min(everybody))
            raise ZeroError(
                f"the last generations of the ranks are {everybody}, and ranks differ by one at most: rank {rank} has "
                "lost its slab, or has another run's; load a checkpoint, after removing the slabs of all ranks"
            )
        return min(everybody)

    def _spec(self, unit: Unit) -> ShardSpec:
        segments = tuple(
            Segment(p.shard_start, p.shard_stop, unit.groups[p.k], p.slot.name, p.slot.shape, p.slot_start)
            for p in unit.pieces
        )
        plan = self.plans[unit.index]
        told = plan.encloses, plan.trained, plan.beside
        return ShardSpec(unit.name, unit.layout.shard_numel, unit.dtype, segments, *told)

    def nodes(self, modules: dict[str, nn.Module]) -> list[Node]:
        """The modules that get hooks: those of a unit, and the root in any case."""
        opened: dict[str, list[int]] = {"": []}
        for index, plan in enumerate(self.plans):
            for path in plan.modules:
                opened.setdefault(path, []).append(index)
        return [Node(n, path or "root", modules[path], tuple(opened[path])) for n, path in enumerate(opened)]


def _compute_device(model: nn.Module, device: torch.device | str | None, mesh: Any) -> torch.device:
    """What was asked for; else where the parameters are; deferred ones are nowhere: the mesh's device, or the CPU."""
    devices = {p.device for p in model.parameters() if not p.is_meta}
    if len(devices) > 1:
        raise ZeroError(f"parameters on {sorted(map(str, devices))}: move the model to one device before shard")
    if device is None and devices:
        return devices.pop()
    found = torch.device(device if device is not None else getattr(mesh, "device_type", "cpu"))
    if has_streams(found) and not torch.get_device_module(found).is_available():
        raise ZeroError(f"device={found}: torch sees no such device here; leave device out to compute on the CPU")
    return indexed(found)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                module._buffers[name] = buffer.to(device)
