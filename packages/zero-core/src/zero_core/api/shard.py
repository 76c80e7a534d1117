"""Has the functions that users call, `shard`, `unshard`, `no_sync` and `units`, and `handle` for other packages.

Not here: how values leave earlier shards, and how the model is restored where that fails (in move_shards.py); forward
and backward (in runtime).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from ..comm.collectives import CollectivesFactory
from ..comm.ranks import Ranks
from ..device import available_bytes
from ..errors import StageError, UnsupportedOptimizerError, ZeroError
from ..gradients.loss_scaling import LossScale
from ..gradients.reducer import Reducer
from ..hooks.engine import Engine
from ..hooks.parameter_access import connect
from ..model.aliases import overlaps_of, remember
from ..model.initial_values import Initialiser
from ..model.unit_plan import cut_experts, plan_units
from ..optim.backward_updates import UpdatesInBackward
from ..optim.contracts import apart, declare
from ..optim.device_store import DeviceStore
from ..optim.joint import joined, members_of
from ..optim.optimizer import ShardedOptimizer
from ..optim.prior_states import carry_over
from ..optim.uncut import check_uncut
from ..pool import Pool
from ..store import NullObserver, Observer, ShardStore, lent_bytes
from ..tensors.refusals import replace_optimizer
from ..unit_memory.residency_policy import STAGES, Uses
from ..unit_memory.stacked_parameter import Stacks
from ..unit_memory.unit import Unit
from ..unit_memory.unit_memory import UnitContext
from .assemble import Handover, Maker, compute_device, move_buffers
from .move_shards import Earlier
from .validate import check_find_unused, check_given, check_group, check_store, check_update_in_backward

_HANDLE = "_zero_handle"
_PREFETCH_BYTES = 128 << 20
_in_use: weakref.WeakSet[ShardStore] = weakref.WeakSet()  # stores of sharded models, which a failed shard leaves open


@dataclass(frozen=True)
class Handle:
    """The parts of a sharded model, for checkpoints and tools.

    Call `settle()` before store.read_state or write_state: it gives every lease back, so nothing stale stays resident.
    Of each unit: `.layout` (slots named as in model.named_parameters()), `.index` (in the store), `.parameters`,
    `.groups` (None: frozen), `.steps` (step count per parameter, writable), `.dtype`. Where a unit has rows of a
    stacked parameter, the slot is named "NAME[a:b]", `slot.rows` says which rows, and `.wholes` has the parameter.
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
    if (found := model.__dict__.get(_HANDLE)) is None:
        raise ZeroError(
            f"{type(model).__name__} is not sharded: call zero_core.shard(model, optimizer) first, and pass this model"
        )
    return found


@overload
def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer], **options: Any
) -> ShardedOptimizer: ...


@overload
def shard(model: nn.Module, optimizer: None = None, **options: Any) -> Handle: ...


def shard(  # type: ignore[misc]  # the overloads leave keywords to this signature
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
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
    expert_bytes: int | None = 64 << 20,
    update_in_backward: bool = False,
    find_unused_parameters: bool = False,
    store: ShardStore | None = None,
    observer: Observer | None = None,
    device: torch.device | str | None = None,
    collectives: CollectivesFactory | None = None,
    secondary_shards: bool = False,
    optimizer_contract: str | None = None,
) -> ShardedOptimizer | Handle:
    """Shard `model` in place and return the optimizer that takes the place of `optimizer`. Collective.

    Several optimizers, such as torch.optim.Muon for matrices and AdamW for the rest, become one `JointOptimizer`.
    Without an optimizer nothing is trained, as in a reference or a reward model, and the model's handle is returned.
    The parameters of `optimizer` that require a gradient now are trained. All others are kept in their own dtype, which
    may be any, and cost no more than their bytes. States that `optimizer` has already (it has stepped, or was loaded)
    move into the store, rank 0's to every rank.
    A plain tensor that a module keeps over a parameter's memory follows the parameter. Two parameters over one memory
    are refused if one is trained, and become one parameter if none is: see model/aliases.py.

    A model that is sharded already moves to new shards, for a second stage with another optimizer: other
    parameters trained, another store or stage, modules added or removed. Unit by unit, values leave the earlier shards
    with all their bits, those of the fp32 masters too, and the memory of each unit is given up when the new store has
    it. States start over. The optimizer and the store of the earlier shards are closed. If this fails, the model is in
    its earlier shards again, or a StoreError names the losses.

    stage: the ZeRO stage, 0 to 3.
    mesh: a DeviceMesh (shard,) or (replicate, shard); None: all ranks, or this process alone without torch.distributed.
    units: module classes whose instances are units; None: the blocks of the model, see model/unit_plan.py.
    param_dtype: of parameters and compute, while the fp32 masters are in the store; None: as they are.
    reduce_dtype: of gradients between ranks and to the store; None: the parameters'.
    loss_scale: "dynamic", a number, a LossScale, or None. With one, call `optimizer.scale_loss(loss).backward()`.
    max_grad_norm: gradients are clipped to this norm of all of them, exactly; None: they are not.
    resident_bytes: stage 3 keeps that much unsharded between uses.
    prefetch_bytes: how much is gathered ahead, or stays at the end of a forward for its backward; 0: nothing.
    expert_bytes: stage 3 cuts the stacked experts of a transformers model into groups of at most this size, or of one
        expert. Each group is a unit. On one rank each expert of a larger list of modules is a unit too. None: they stay
        in their block's unit. So they do on several ranks where a block has several stacks, as ranks may run different
        ones. The model's names and shapes do not change.
    update_in_backward: a unit is updated when its gradient arrives; not with clipping, loss scaling or stage 1.
    find_unused_parameters: ranks may run different units in a step, as a vision tower where a batch has images. As in
        DistributedDataParallel, a gradient that a rank does not have counts as zeros in the mean, and a parameter
        without one on every rank is not stepped. A forward first gathers all units, and waits for their updates.
        Gradients stay whole until the step, also at stages 0 and 2, in the memory of stage 1. Not at stage 3.
    store: where shards are kept between uses; None: a DeviceStore.
    observer: gets every span of work.
    device: where to compute, and buffers go along; None: where the parameters are. A model that does not fit there
        stays in host memory, or in deferred_init(), until shard takes it; then say `device`.
    collectives: makes the collectives of a group of ranks, see comm.Collectives; None: by the group's backend.
    optimizer_contract: "elementwise", "by itself" or "together", see optim/contracts.py; None: as the optimizer or the
        list of optim/contracts.json says, else "together", which needs everything on one device.
    secondary_shards: of stage 3 over several machines, hpZ of ZeRO++: after its first gather a unit is gathered inside
        the machine until it changes, and each of its l ranks keeps 1/l of it. unit_memory/unit_memory.py has the
        details.

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
    optimizer = torch.optim.SGD([{"params": []}]) if optimizer is None else joined(optimizer)
    check_given(model, optimizer, stage, param_dtype, max_grad_norm)
    check_group(mesh)
    scale = LossScale.of(loss_scale, model)
    if update_in_backward:
        check_update_in_backward(stage, max_grad_norm, scale, find_unused_parameters)
    row = STAGES[stage]
    if find_unused_parameters:
        check_find_unused(stage)
        row = replace(row, keeps_gradients=True, everywhere=True)
    optimized = {id(p) for group in optimizer.param_groups for p in group["params"]}
    where = compute_device(model, device, mesh)
    if secondary_shards and row.keeps_parameters:
        raise StageError(f"secondary_shards=True with stage={stage}, which gathers a unit once a step: leave it out")
    over = "because shard() was called again: use the optimizer that the last shard() returned, and run forward again"
    with torch.inference_mode(False), Earlier(model, "shard", over) as earlier:
        overlaps = overlaps_of(model, optimized)
        for twins in overlaps.twins:
            twins.tie(model)
        pool = Pool(where)
        ranks = Ranks.build(mesh, pool, sharded=row.sharded, collectives=collectives, secondary=secondary_shards)
        ranks.meet("shard")
        declare(optimizer, optimizer_contract)
        store = store or DeviceStore()
        check_store(store)
        if (why := apart(optimizer)) is not None and (ranks.shard.size > 1 or not isinstance(store, DeviceStore)):
            raise UnsupportedOptimizerError(why)
        store.bind(optimizer)
        check_uncut(model, optimizer, ranks)
        initialiser = Initialiser(model, earlier.values)
        cut_bytes = None if row.keeps_parameters else expert_bytes
        grouped, listed = cut_experts(model, cut_bytes, param_dtype, units, several=ranks.size > 1)
        plans = plan_units(model, units, optimized, grouped, listed)
        if device is not None:
            move_buffers(model, where)
        later = any(ranks.anywhere([store.updates_later], "what shard() was given"))
        gives = scale is None and not update_in_backward
        context = UnitContext(ranks, store, pool, observer or NullObserver(), later, gives)
        followers = [*overlaps.followers, *earlier.followers()]
        made = Maker(model, optimizer, plans, followers, param_dtype, reduce_dtype, context, earlier)
        made.compare(stage, max_grad_norm, scale)
        updates = UpdatesInBackward(made.units, context, optimizer.param_groups) if update_in_backward else None
        keeps, ahead, stays = row.keeps_parameters, prefetch_bytes, resident_bytes
        uses = Uses(made.units, context, keeps=keeps, prefetch_bytes=ahead, resident_bytes=stays)
        begin_update = None if updates is None else updates.begin
        reducer = Reducer(made.units, context, row, uses.writes, begin_update=begin_update)
        engine = Engine(
            model, made.nodes(), context, uses, reducer,
            loss_scale=scale, optimized=optimized, stacks=Stacks(grouped, made.stacks.values()),
        )  # fmt: skip
        handover = Handover(made.units, made.stacks, earlier)
        try:
            lent = lent_bytes([unit.nbytes for unit in made.units], prefetch_bytes, resident_bytes, ranks.shard.size)
            made.attach_store(initialiser, handover, row, lent)
            carry_over(optimizer, made.units, store, ranks)
            connect(engine)
            sharded = ShardedOptimizer(optimizer, engine, updates, max_grad_norm)
        except BaseException as error:
            engine.attachment.detach()
            handover.undo(error, store, close=store not in _in_use)
            raise
        _in_use.add(store)
        initialiser.release()
        remember(overlaps.extents)
        if earlier.engine is not None:  # perhaps that of another module, which has this one
            earlier.engine.model.__dict__.pop(_HANDLE, None)
        found = model.__dict__[_HANDLE] = Handle(model, tuple(made.units), store, sharded, ranks, stage, engine)
    for each in {optimizer, *members_of(optimizer)}:
        each.__dict__["_zero_sharded"] = True
        replace_optimizer(each, sharded)
    return sharded if trains else found


def unshard(model: nn.Module, device: torch.device | str | None = None) -> None:
    """Makes `model` plain: every parameter has its memory and whole value, on every rank. Collective.

    Parameters stay the same objects, with their ties, requires_grad and hooks, in the dtype in which the model
    computes, and contiguous, whatever strides they had before `shard`. `.grad` of the optimizer's parameters is None,
    even between step() and zero_grad(), where torch would still have the gradient. fp32 masters of 16-bit parameters
    and optimizer states are dropped, with the store; `shard` of a sharded model keeps the masters.
    device: where parameters and buffers are then; None: where the model computes.

    Raises ZeroError where a rank has no room for the whole model beside the shards, inside forward, backward and
    `gathered`, and where gradients wait for a step. The model is in its shards then, and has lost nothing.

    Examples:
        >>> import torch, zero_core
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> zero_core.unshard(model)
        >>> type(model.weight), model.weight.data_ptr() != 0
        (<class 'torch.nn.parameter.Parameter'>, True)
    """
    found = handle(model)
    where = torch.device(device) if device is not None else found.ranks.device
    if where.type == "meta":
        raise ZeroError("unshard() with device=meta, which has no memory: name another device, or leave device= out")
    over = "because zero_core.unshard removed them: build a plain torch optimizer, and run the forward again"
    with torch.inference_mode(False), torch.no_grad(), Earlier(model, "unshard", over):
        _check_room(found.ranks, sum(unit.nbytes for unit in found.units), where)
        values = [_values(unit, where) for unit in found.units]
        for unit in reversed(found.units):
            for k, value in enumerate(values.pop()):
                unit.give_back(k, value)
            for composite in unit.composites:
                composite.give_back()
        for stacked in found.engine.stacks.parameters:
            stacked.unshard()
        if device is not None:
            move_buffers(model, where)
        del found.model.__dict__[_HANDLE]


def _values(unit: Unit, device: torch.device) -> list[Tensor]:
    """Returns copies of the unit's parameters, in memory of their own."""
    unit.unshard()
    try:
        return [view.to(device, copy=True) for view in unit.views]
    finally:
        unit.reshard()


def _check_room(ranks: Ranks, nbytes: int, device: torch.device) -> None:
    """Raises ZeroError on all ranks if one has no room for `nbytes`."""
    if device.type == "cpu":  # all ranks of a machine share it
        nbytes *= int(os.environ.get("LOCAL_WORLD_SIZE", ranks.size))
    room = available_bytes(device)
    lacks = room is not None and room < nbytes
    if any(ranks.anywhere([lacks], "unshard()")):
        have = f"and {room:,} are free" if lacks else "and another rank has fewer"
        raise ZeroError(
            f"unshard() needs {nbytes:,} bytes on {device} for the whole model on each rank, {have}: name a device= "
            "with more room. Or leave the model in its shards: zero_core.shard and zero_core.save_pretrained accept it"
        )


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only accumulate, in fp32 on each rank; the first backward or step() outside reduces the sum."""
    with handle(model).engine.reducer.no_sync():
        yield


def units(model: nn.Module) -> tuple[Unit, ...]:
    """The units of a sharded model, in the order of the store's shards."""
    return handle(model).units
