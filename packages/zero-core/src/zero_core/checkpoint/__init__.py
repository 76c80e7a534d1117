"""Saves and loads a sharded run through torch.distributed.checkpoint, at any world size, stage and store.

Owns a run's values besides tensors: steps, groups, random state, scheduler, loss scale, the user's `extra`. Not here:
boxes of tensors (in plan.py), files (in files.py).

A checkpoint is a folder that stock `torch.distributed.checkpoint` reads, laid out as
`{"model": get_model_state_dict(m), "optim": get_optimizer_state_dict(m, o)}` is, plus objects of ours under "zero.":

    model.NAME                 fp32 master of a parameter (under each of its names where it is tied), a buffer, or what
                               a module's get_extra_state returns
    optim.state.NAME.STATE     exp_avg ..., fp32, in the shapes that the optimizer keeps; step, and other numbers of it
                               (NAdam's mu_product)
    optim.param_groups.I.KEY   options of group I
    zero.state, zero.rng.RANK  the values besides tensors, and each rank's random state
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from ..device import random_state_of, restore_random_state
from ..errors import CheckpointError, ZeroError, listed
from ..util.threads import Saving
from .files import StreamingReader, StreamingWriter
from .match import FORMAT, STATE, Finder, groups_of, options_of, steps_of, unpickle
from .plan import TILE_NUMEL, Contents, StreamingLoadPlanner, StreamingSavePlanner, Wanted
from .safetensors import room
from .shards import MASTER, ShardView, clean_name, extra_states, view_of

__all__ = ["Loaded", "Saving", "load", "save"]


@dataclass(frozen=True)
class Loaded:
    """The result of `load`. `extra` is the argument of `save`; None for a checkpoint that another library wrote."""

    step: int  # optimizer steps taken when it was saved
    extra: Any
    ours: bool  # False: written by FSDP2 or from plain state dicts; then random state and scheduler were not in it
    world_size: int | None


def save(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    extra: Any = None,
    trained_only: bool = False,
    also: Callable[[str], bool] = lambda name: False,
    model_key: str = "model",
    optimizer_key: str = "optim",
    flatten: bool = False,
    tile_numel: int = TILE_NUMEL,
    blocking: bool = True,
) -> Saving:
    """Writes the sharded model, and with `optimizer` the whole run, into `folder`, which all ranks see. Collective.

    trained_only: leaves out frozen parameters, such as the base of a model with adapters. `load` then needs a model
    that was built in the same way, from the same weights. Buffers are saved, and so are frozen parameters that were
    written since the model was built by `shard` or `load_pretrained`, as by a merge of adapters. also: says by name
    which further parameters are saved, the same on every rank.

    model_key, optimizer_key: prefixes of the names, "" for none. flatten: options of groups are saved for each
    parameter, as torch's `flatten_optimizer_state_dict` does. torchtitan's are "", "optimizer" and flattened.

    States stream from the store one box of at most `tile_numel` elements at a time. Complete or absent: killed at any
    moment, the folder holds the previous checkpoint or the new one. extra: any object that pickles; rank 0's is saved.
    Raises CheckpointError naming the path where a rank cannot write.

    blocking=False, for a model whose store is durable: returns at once, and a thread copies the store's values on disk
    while training continues. An update that would overwrite values before they are copied waits for the copy. Only one
    copy runs at a time, so the next one begins when this one has ended. It takes memory for two of the store's tiles,
    read and decoded, and a box. Its error is raised by `wait` of the returned `Saving`, by the next such call, or by
    `optimizer.close()`, which wait for it. Raises ZeroError if the store is not durable, or if frozen parameters would
    be saved: these are not on its disk.
    """
    view = _view(model, optimizer)
    view.ranks.meet("checkpoint.save")
    if optimizer is not None:
        view.handle.optimizer.check_saved()
    left_out = view.left_out(also) if trained_only else {}
    if not blocking:
        _check_durable(view, left_out)
    contents = Contents(view, tile_numel)
    keys = [(key,) if key else () for key in (model_key, optimizer_key)]
    _fill(contents, left_out, keys[0], None if optimizer is None else keys[1], flatten)
    scale = view.handle.engine.loss_scale
    run = {
        "format": FORMAT,
        "world_size": view.ranks.size,
        "step_count": view.handle.optimizer.step_count,
        "groups": groups_of(view) if optimizer is not None else None,
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "loss_scale": scale.state_dict() if scale is not None else None,
        "extra": extra,
        **({"left_out": left_out} if trained_only else {}),
    }
    if view.is_first:  # torch would keep any one of several ranks' entries
        contents.add(run, *STATE.split("."))
    contents.add(random_state_of(view.ranks.device), "zero", f"rng.{view.ranks.rank}")
    start = f"{model_key}." if model_key else ""
    aliases = {start + clean_name(a): start + clean_name(n.name) for n in view.names for a in n.aliases}
    writing = partial(write, Path(folder), contents, aliases, alone=view.ranks.size == 1)
    if blocking:
        writing()
        return Saving()
    return _begin_copy(view, contents, partial(writing, group=view.ranks.beside()))


def _begin_copy(view: ShardView, contents: Contents, writing: Callable[[], None]) -> Saving:
    """Begins to write, on another thread, the values that a durable store has on its disk now."""
    commits, saving = view.handle.engine.commits, Saving()
    commits.end_copy()
    contents.keep()
    pinned = view.store.pin()
    try:
        contents.view = replace(view, store=pinned)
        saving.begin(writing, pinned.close, view.ranks.leave_beside)
    except BaseException:
        pinned.close()
        raise
    commits.begin_copy(saving)
    return saving


def write(folder: Path, contents: Contents, aliases: Mapping[str, str], *, alone: bool, group: Any = None) -> None:
    """Writes `contents` into `folder`. aliases: further name -> the name of the tensor. alone: one rank.

    Collective in `group` without `alone`. Raises CheckpointError as `save` does.
    """
    writer, planner = StreamingWriter(folder, aliases), StreamingSavePlanner(contents)
    with _unwrapped(folder):
        if alone:
            _write_alone(writer, planner)
        else:
            dcp.save({}, storage_writer=writer, planner=planner, process_group=group)


def _write_alone(writer: StreamingWriter, planner: StreamingSavePlanner) -> None:
    """As dcp.save of one rank, without its warning: another thread must not switch warnings off and on."""
    try:
        writer.reset()
        planner.set_up_planner({}, is_coordinator=True)
        writer.set_up_storage_writer(True)
        plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
        plan = planner.finish_plan(writer.prepare_global_plan(plans)[0])
        writer.finish(metadata, [writer.write_data(plan, planner).value()])
    except Exception as error:
        raise CheckpointException("write", {0: (error, traceback.extract_tb(error.__traceback__))}) from error


def _check_durable(view: ShardView, left_out: Container[str]) -> None:
    """Raises ZeroError unless a durable store has all values of the checkpoint on its disk."""
    if view.handle.engine.commits is None:
        raise ZeroError(
            "save(blocking=False) copies the steps that a durable store keeps on disk, and the "
            f"{type(view.store).__name__} of this {type(view.handle.model).__name__} is not durable: give shard a "
            "store with durable=True, or save with blocking=True"
        )
    if frozen := [n for unit, k, n in view.parameters() if unit.groups[k] is None and clean_name(n) not in left_out]:
        raise ZeroError(
            f"save(blocking=False) copies trained parameters only, and these are not trained: {listed(frozen)}. Leave "
            "them out with trained_only=True, or save with blocking=True"
        )


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    strict: bool = True,
    values: bool = True,
    random_state: bool = True,
    model_key: str = "model",
    optimizer_key: str = "optim",
    tile_numel: int = TILE_NUMEL,
    verify: bool = True,
    reader: Any = None,
) -> Loaded:
    """Reads a checkpoint into the sharded model, and with `optimizer` the run. Collective.

    It may have been saved at any world size, stage and store, by FSDP2, or from plain state dicts, flattened or not;
    model_key and optimizer_key are the keys it was saved under ("" for none). Each rank reads the boxes that its slices
    touch.
    Parameters that it left out (`save(trained_only=True)`) keep their values. It must have all trained parameters.
    Gradients stay as they are.
    Without `strict`, parameters that the checkpoint lacks keep their values, and names that the model lacks are
    ignored. values=False keeps the model's own values, and reads only the masters that round to them. A rank's random
    state is restored if the checkpoint has one for it. Load only folders you trust: they are pickles.
    verify: compares each tensor and object with the checksum that was written with it (0.7 s a GB on one core of a 2.5
    GHz Xeon).
    reader: a torch.distributed.checkpoint.StorageReader of files in another format. Its `failure` is an error found
    before it read any tensor, or None. It is read twice: first the small tensors and objects, then, if the checkpoint
    fits the model, this rank's slices. None: the folder is a checkpoint.
    Raises CheckpointError, before anything is changed, for a checkpoint that is cut short or of another model. A
    damaged tensor raises it when it is read.
    """
    reader = reader or StreamingReader(Path(folder), verify=verify)
    view = replace(_view(model, optimizer), keeps_values=not values)
    view.ranks.meet("checkpoint.load")
    states = tuple(s for s in view.store.state_names() if s != MASTER) if optimizer is not None else None
    prefixes = [f"{key}." if key else "" for key in (model_key, optimizer_key)]
    finder = Finder(Path(folder), view, states, strict, prefixes)
    small = _read(reader, view, finder.small, tile_numel)
    run, steps = finder.decode(small)
    options = []
    if optimizer is not None:
        groups = run["groups"] if run else finder.foreign_groups(small)
        options = options_of(view, groups, strict=bool(run or (strict and groups)))
    if scheduler is not None and run and run["scheduler"] is None:
        raise CheckpointError(f"{folder} was saved without a scheduler; load it with scheduler=None")
    view.handle.engine.settle()
    view.overwriting(finder.found)
    _read(reader, view, lambda metadata: Wanted(finder.slices(metadata, steps), (), ()), tile_numel)
    with torch.no_grad():
        for named in view.names:
            if values and view.is_whole(named) and finder.found.get(named.name) in small.tensors:
                named.tensor.copy_(small.tensors[finder.found[named.name]])
    for name, module in extra_states(model):
        if (state := small.tensors.get(fqn := prefixes[0] + clean_name(name), small.objects.get(fqn))) is not None:
            module.set_extra_state(state if isinstance(state, Tensor) else unpickle(state))
    for part, name, value in finder.scalars(small, steps):
        view.store.write_scalar(part.unit, part.segment, name, value)
    step = int(run["step_count"]) if run else max(steps.values(), default=0)
    if optimizer is not None:
        view.handle.optimizer.step_count = step
        for unit, k, name in view.parameters():
            unit.steps[k] = steps.get(name, 0)
        for live, saved in zip(optimizer.param_groups, options, strict=True):
            live.update(saved)
        scale = view.handle.engine.loss_scale
        if scale is not None and run.get("loss_scale") is not None:
            scale.load_state_dict(run["loss_scale"])
    if scheduler is not None and run:
        scheduler.load_state_dict(run["scheduler"])
    if random_state and (own := small.objects.get(f"zero.rng.{view.ranks.rank}")) is not None:
        restore_random_state(unpickle(own), view.ranks.device)
    return Loaded(step, run.get("extra") if run else None, bool(run), run.get("world_size") if run else None)


def _view(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ShardView:
    view = view_of(model)
    if view is None or view.handle.model is not model:
        raise ZeroError(
            f"{type(model).__name__} is not sharded: call zero_core.shard(model, optimizer) first, and pass this model."
            " Or use torch.distributed.checkpoint with model.state_dict(): it reads and writes the same folders"
        )
    if optimizer is not None and optimizer is not view.handle.optimizer:
        raise ZeroError(f"the {type(optimizer).__name__} is not the optimizer that shard() returned for this model")
    return view


@contextmanager
def _unwrapped(written: Path | None = None) -> Iterator[None]:
    """Raises the error of one rank, instead of torch's summary of all ranks.

    Adds the disk's free bytes, because torch's writer reports a full disk only as an unexpected file position.
    """
    try:
        yield
    except CheckpointException as summary:
        rank, (error, _) = min(summary.failures.items())
        if isinstance(error, ZeroError):
            raise error from None
        where = f"write {written} ({room(written)})" if written else "read the checkpoint"
        way = ". If the folder is the cause, make room there, or name another" if written else ""
        raise CheckpointError(f"rank {rank} could not {where}: {type(error).__name__}: {error}{way}") from error


def _read(reader: Any, view: ShardView, plan: Any, tile_numel: int) -> StreamingLoadPlanner:
    def checked(metadata: Metadata) -> Wanted:
        if reader.failure is not None:
            raise reader.failure
        return plan(metadata)

    planner = StreamingLoadPlanner(view, checked, tile_numel)
    with _unwrapped(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # of one process
        dcp.load({}, storage_reader=reader, planner=planner, no_dist=view.ranks.size == 1)
    return planner


# -- writing -----------------------------------------------------------------------------------------------------------


def _fill(
    contents: Contents, left_out: Container[str], model: tuple[str, ...], optim: tuple[str, ...] | None, flatten: bool
) -> None:
    """Lists the model's tensors, and the optimizer's values unless `optim` is None. model, optim: the first keys."""
    view: ShardView = contents.view
    for part in view.slices():
        name = clean_name(part.name)
        if name not in left_out:
            contents.add_slice(part, MASTER, *model, name)
        trained_in = view.handle.units[part.unit].groups[part.index]
        if trained_in is not None and optim is not None:
            for state in view.handle.optimizer.state_names_of(trained_in, part.shape):
                contents.add_slice(part, state, *optim, "state", name, state)
            for state, shape in view.shaped(part).items():
                contents.add_slice(part.of(shape), state, *optim, "state", name, state)
            for scalar in view.store.scalar_names():
                stepped = view.handle.units[part.unit].steps[part.index]
                number = view.store.read_scalar(part.unit, part.segment, scalar) if stepped else None
                if number is None:  # torch's first ones: of ASGD's eta, its mu, and NAdam's mu_product
                    options = view.handle.optimizer.param_groups[trained_in]
                    number = float(options["lr"]) if scalar == "eta" else 1.0
                contents.add(torch.tensor(number, dtype=torch.float32, device="cpu"), *optim, "state", name, scalar)
    for name, module in extra_states(view.handle.model):
        if view.is_first:
            contents.add(module.get_extra_state(), *model, clean_name(name))
    trained_by = {name: unit.groups[k] for unit, k, name in view.parameters()}
    for named in view.names:
        whole = view.is_whole(named)
        if view.is_first and (whole or named.tensor.numel() == 0):  # an empty parameter is in no rank's slice
            name = clean_name(named.name)
            value = named.tensor if whole else torch.empty(named.tensor.shape, dtype=torch.float32, device="cpu")
            contents.add(value, *model, name)
            if whole or optim is None or (trained_in := trained_by.get(named.name)) is None:
                continue
            states = view.handle.optimizer.state_names_of(trained_in, tuple(value.shape))
            number = torch.zeros((), dtype=torch.float32, device="cpu")
            kept = dict.fromkeys(states, value) | dict.fromkeys(view.store.scalar_names(), number)
            for state, empty in kept.items():
                contents.add(empty, *optim, "state", name, state)
    if optim is not None:
        for name, step in steps_of(view).items():
            contents.add(torch.tensor(step, dtype=torch.float32, device="cpu"), *optim, "state", name, "step")
        for i, group in enumerate(groups_of(view)):
            for where in group["params"] if flatten else [str(i)]:
                for key, option in group.items():
                    if not (flatten and key == "params"):
                        contents.add(option, *optim, "param_groups", where, key)
