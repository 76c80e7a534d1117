"""`save` and `load` of a sharded run, through torch.distributed.checkpoint, at any world size, stage and store.

Owns what belongs to a run besides tensors: steps, groups, random state, scheduler, loss scale, the user's own. Boxes
are `checkpoint_plan`'s, files `checkpoint_files`'s.

A checkpoint is a folder that stock `torch.distributed.checkpoint` reads, laid out as
`{"model": get_model_state_dict(m), "optim": get_optimizer_state_dict(m, o)}` is, plus objects of ours under "zero.":

    model.NAME                 fp32 master of a parameter (under each of its names where it is tied), or a buffer
    optim.state.NAME.STATE     exp_avg ..., fp32, and step
    optim.param_groups.I.KEY   options of group I
    zero.state, zero.rng.RANK  what `load` restores besides
"""

from __future__ import annotations

import io
import os
import random
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from .checkpoint_files import StreamingReader, StreamingWriter
from .checkpoint_plan import TILE_NUMEL, Contents, Sliced, StreamingLoadPlanner, StreamingSavePlanner, Wanted, shapes_of
from .errors import CheckpointError, ZeroError
from .keys import Named, named_tensors
from .shards import MASTER, ShardView, clean_name, view_of

__all__ = ["Loaded", "load", "save"]

_STATE = "zero.state"
_FORMAT = 1


@dataclass(frozen=True)
class Loaded:
    """What `load` found. `extra` is what `save` was given; None for a checkpoint that another library wrote."""

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
    tile_numel: int = TILE_NUMEL,
) -> None:
    """Write the sharded model, and with `optimizer` the whole run, into `folder`. Collective; all ranks see the folder.

    States stream from the store one box of at most `tile_numel` elements at a time. Complete or absent: killed at any
    moment, the folder holds what it held before, or the new checkpoint. extra: anything that pickles; rank 0's is kept.
    Raises CheckpointError naming the path where a rank cannot write.
    """
    view = _view(model, optimizer)
    names = named_tensors(model)
    contents = _contents(view, names, with_optimizer=optimizer is not None, tile_numel=tile_numel)
    contents.objects[_STATE] = (("zero", "state"), _run_state(view, optimizer, scheduler, extra))
    rank = view.ranks.rank
    contents.objects[f"zero.rng.{rank}"] = (("zero", f"rng.{rank}"), _random_state(view.ranks.device))
    aliases = {f"model.{clean_name(a)}": f"model.{clean_name(n.name)}" for n in names for a in n.aliases}
    with _unwrapped():
        dcp.save(
            {},
            storage_writer=StreamingWriter(Path(folder), aliases),
            planner=StreamingSavePlanner(contents),
            no_dist=view.ranks.size == 1,
        )


def load(
    folder: str | os.PathLike[str],
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    scheduler: Any = None,
    strict: bool = True,
    random_state: bool = True,
    model_key: str = "model",
    optimizer_key: str = "optim",
    tile_numel: int = TILE_NUMEL,
) -> Loaded:
    """Read a checkpoint into the sharded model, and with `optimizer` the run. Collective.

    It may have been saved at any world size, stage and store, by FSDP2, or from plain state dicts; model_key and
    optimizer_key are the keys it was saved under ("" for none). Each rank reads the boxes that its slices touch.
    Without `strict`, parameters the checkpoint lacks keep their values and names the model lacks are ignored. Random
    state is restored rank by rank, where there is that rank's. Load only folders you trust: they are pickles.
    Raises CheckpointError, before anything is changed, for a checkpoint that is cut short or of another model.
    """
    view = _view(model, optimizer)
    names = named_tensors(model)
    states = tuple(s for s in view.store.state_names() if s != MASTER) if optimizer is not None else None
    finder = _Finder(Path(folder), view, names, states, strict, model_key, optimizer_key)
    small = _read(folder, view, finder.small, tile_numel)
    run, steps = finder.decode(small)
    options = []
    if optimizer is not None:
        options = _options(view, run["groups"] if run else finder.foreign_groups(small), strict=bool(run))
    if scheduler is not None and run and run["scheduler"] is None:
        raise CheckpointError(f"{folder} was saved without a scheduler; load it with scheduler=None")
    view.handle.engine.discard_gradients()
    _read(folder, view, lambda metadata: Wanted(finder.slices(metadata, steps), (), ()), tile_numel)
    with torch.no_grad():
        for named in names:
            if named.is_buffer and finder.found.get(named.name) in small.tensors:
                named.tensor.copy_(small.tensors[finder.found[named.name]])
    step = int(run["step_count"]) if run else max(steps.values(), default=0)
    if optimizer is not None:
        _restore_optimizer(view, optimizer, step, steps, options)
        scale = view.handle.engine.loss_scale
        if scale is not None and run.get("loss_scale") is not None:
            scale.load_state_dict(run["loss_scale"])
    if scheduler is not None and run:
        scheduler.load_state_dict(run["scheduler"])
    if random_state and (own := small.objects.get(f"zero.rng.{view.ranks.rank}")) is not None:
        _restore_random_state(_unpickle(own), view.ranks.device)
    return Loaded(step, run.get("extra") if run else None, bool(run), run.get("world_size") if run else None)


def _view(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> ShardView:
    view = view_of(model)
    if view is None:
        raise ZeroError(
            f"{type(model).__name__} is not sharded; call zero_core.shard first (any stage), or use "
            "torch.distributed.checkpoint with its state dict, which reads the same folders"
        )
    if optimizer is not None and optimizer is not view.handle.optimizer:
        raise ZeroError(f"the {type(optimizer).__name__} is not the optimizer that shard() returned for this model")
    return view


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise what a rank raised, instead of torch's summary of all ranks, and no warning about one process."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            yield
    except CheckpointException as summary:
        rank, (error, _) = min(summary.failures.items())
        if isinstance(error, ZeroError):
            raise error from None
        raise CheckpointError(f"rank {rank}: {type(error).__name__}: {error}") from error


def _read(folder: str | os.PathLike[str], view: ShardView, plan: Any, tile_numel: int) -> StreamingLoadPlanner:
    reader = StreamingReader(Path(folder))

    def checked(metadata: Metadata) -> Wanted:
        if reader.failure is not None:
            raise reader.failure
        return plan(metadata)

    planner = StreamingLoadPlanner(view, checked, tile_numel)
    with _unwrapped():
        dcp.load({}, storage_reader=reader, planner=planner, no_dist=view.ranks.size == 1)
    return planner


# -- writing -----------------------------------------------------------------------------------------------------------


def _contents(view: ShardView, names: Sequence[Named], *, with_optimizer: bool, tile_numel: int) -> Contents:
    contents = Contents(view, [], {}, {}, tile_numel)
    states = [s for s in view.store.state_names() if s != MASTER] if with_optimizer else []
    for part in view.slices():
        name = clean_name(part.name)
        contents.sliced.append(Sliced(f"model.{name}", ("model", name), part, MASTER))
        if view.handle.units[part.unit].groups[part.index] is not None:
            for state in states:
                path = ("optim", "state", name, state)
                contents.sliced.append(Sliced(".".join(path), path, part, state))
    for named in names:
        if named.is_buffer or named.tensor.numel() == 0:  # an empty parameter is in nobody's slice
            name = clean_name(named.name)
            value = named.tensor if named.is_buffer else torch.empty(named.tensor.shape)
            contents.tensors[f"model.{name}"] = (("model", name), value)
            for state in states if not named.is_buffer and named.tensor.requires_grad else ():
                contents.tensors[f"optim.state.{name}.{state}"] = (("optim", "state", name, state), value)
    if with_optimizer:
        for name, step in _steps(view).items():
            path = ("optim", "state", name, "step")
            contents.tensors[".".join(path)] = (path, torch.tensor(float(step)))
        for i, group in enumerate(_groups(view)):
            for key, value in group.items():
                entry = ("optim", "param_groups", str(i), key)
                into: dict[str, Any] = contents.tensors if isinstance(value, Tensor) else contents.objects
                into[".".join(entry)] = (entry, value)
    return contents


def _steps(view: ShardView) -> dict[str, int]:
    """Steps that each optimized parameter has taken."""
    return {
        clean_name(slot.name): unit.steps[k]
        for unit in view.handle.units
        for k, slot in enumerate(unit.layout.slots)
        if unit.groups[k] is not None
    }


def _groups(view: ShardView) -> list[dict[str, Any]]:
    """The optimizer's groups, parameters by name."""
    by_id = {
        id(p): clean_name(s.name) for u in view.handle.units for p, s in zip(u.parameters, u.layout.slots, strict=True)
    }
    return [
        {k: v for k, v in group.items() if k != "params"} | {"params": [by_id[id(p)] for p in group["params"]]}
        for group in view.handle.optimizer.param_groups
    ]


def _run_state(view: ShardView, optimizer: Any, scheduler: Any, extra: Any) -> dict[str, Any]:
    scale = view.handle.engine.loss_scale
    return {
        "format": _FORMAT,
        "world_size": view.ranks.size,
        "step_count": view.handle.optimizer.step_count,
        "groups": _groups(view) if optimizer is not None else None,
        "scheduler": scheduler.state_dict() if scheduler is not None else None,
        "loss_scale": scale.state_dict() if scale is not None else None,
        "extra": extra,
    }


def _random_state(device: torch.device) -> dict[str, Any]:
    state: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def _restore_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


# -- reading -----------------------------------------------------------------------------------------------------------


class _Finder:
    """Finds a model's tensors among a checkpoint's. Every rank checks the whole model, so all raise or none does."""

    def __init__(
        self,
        folder: Path,
        view: ShardView,
        names: Sequence[Named],
        states: Sequence[str] | None,
        strict: bool,
        model_key: str,
        optimizer_key: str,
    ) -> None:
        self._folder, self._view, self._names, self._states, self._strict = folder, view, names, states, strict
        self._model = f"{model_key}." if model_key else ""
        self._optimizer = f"{optimizer_key}." if optimizer_key else ""
        self.found: dict[str, str] = {}  # name in the model -> name in the checkpoint
        self._state_name: dict[str, str] = {}  # name in the model -> the prefix of its states' names

    def small(self, metadata: Metadata) -> Wanted:
        """Check the checkpoint against the model; ask for its small tensors and objects."""
        shapes, everything = shapes_of(metadata), metadata.state_dict_metadata
        missing, mismatched, used = self._match(shapes)
        tensors = [self.found[n.name] for n in self._names if n.is_buffer and n.name in self.found]
        if self._states is not None:
            missing += self._match_states(shapes)
            tensors += [f"{p}.step" for p in self._state_name.values() if f"{p}.step" in shapes]
        mine = [n for n in shapes if n.startswith(self._model) and not (self._model == "" and self._foreign(n))]
        unexpected = [n for n in mine if n not in used]
        complaints = [f"shapes differ: {_some(mismatched)}"] if mismatched else []
        if self._strict:
            complaints += [f"missing from the checkpoint: {_some(missing)}"] if missing else []
            complaints += [f"not in the model: {_some(unexpected)}"] if unexpected else []
        if complaints:
            raise CheckpointError(
                f"{self._folder} is of another model: {' | '.join(complaints)}{self._way_out(shapes)}"
            )
        rng = f"zero.rng.{self._view.ranks.rank}"
        groups = [n for n in everything if n.startswith(f"{self._optimizer}param_groups.") and n not in shapes]
        return Wanted((), tensors, [n for n in (_STATE, rng) if n in everything] + groups)

    def _foreign(self, name: str) -> bool:
        return name.startswith((self._optimizer or "optim.", "zero."))

    def _way_out(self, shapes: Mapping[str, Any]) -> str:
        if self.found or not shapes:
            return ""
        keys = sorted({name.split(".")[0] for name in shapes})
        return f"; its names begin with {', '.join(keys[:5])}: pass model_key= and optimizer_key="

    def _match(self, shapes: Mapping[str, tuple[int, ...]]) -> tuple[list[str], list[str], set[str]]:
        missing, mismatched, used = [], [], set()
        for named in self._names:
            candidates = [self._model + clean_name(n) for n in named.names]
            present = [c for c in candidates if c in shapes]
            used.update(present)
            if not present:
                missing.append(candidates[0])
            elif shapes[present[0]] != tuple(named.tensor.shape):
                mismatched.append(f"{present[0]}: saved {shapes[present[0]]}, model {tuple(named.tensor.shape)}")
            else:
                self.found[named.name] = present[0]
        return missing, mismatched, used

    def _match_states(self, shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
        """Where each parameter's states are; names states that are absent while others are there."""
        missing: list[str] = []
        assert self._states is not None
        trained = set(_steps(self._view))
        for named in self._names:
            if named.is_buffer or clean_name(named.name) not in trained:
                continue
            for name in named.names:
                prefix = f"{self._optimizer}state.{clean_name(name)}"
                held = [s for s in self._states if f"{prefix}.{s}" in shapes]
                if held or f"{prefix}.step" in shapes:
                    missing += [f"{prefix}.{s}" for s in self._states if s not in held and named.tensor.numel()]
                    self._state_name[named.name] = prefix
                    break
        return missing

    def decode(self, small: StreamingLoadPlanner) -> tuple[dict[str, Any], dict[str, int]]:
        """Our own record of the run ({} if there is none), and the steps that each parameter had taken."""
        run = _unpickle(small.objects[_STATE]) if _STATE in small.objects else {}
        if run and run["format"] > _FORMAT:
            raise CheckpointError(f"{self._folder} has format {run['format']}; this zero-core reads up to {_FORMAT}")
        steps = {}
        for name, prefix in self._state_name.items():
            step = small.tensors.get(f"{prefix}.step")
            steps[name] = 1 if step is None else int(step)  # SGD has states and counts no steps
        return run, steps

    def slices(self, metadata: Metadata, steps: Mapping[str, int]) -> list[Sliced]:
        """What this rank reads. States of a parameter that never stepped are left out: its optimizer makes them."""
        wanted = []
        for part in self._view.slices():
            fqn = self.found.get(part.name)
            if fqn is not None:
                wanted.append(Sliced(fqn, (), part, MASTER))
            unit = self._view.handle.units[part.unit]
            if part.name in self._state_name and (steps[part.name] or unit.steps[part.index]):
                prefix = self._state_name[part.name]
                fqns = {s: f"{prefix}.{s}" for s in self._states or ()}
                wanted += [Sliced(f, (), part, s) for s, f in fqns.items() if f in metadata.state_dict_metadata]
        return wanted

    def foreign_groups(self, small: StreamingLoadPlanner) -> list[dict[str, Any]]:
        """The groups that another library saved, "PREFIX.param_groups.I.KEY" each."""
        groups: dict[int, dict[str, Any]] = {}
        start = f"{self._optimizer}param_groups."
        for fqn, data in small.objects.items():
            index, _, key = fqn[len(start) :].partition(".")
            if fqn.startswith(start) and index.isdigit():
                groups.setdefault(int(index), {})[key] = _unpickle(data)
        return [groups[i] for i in sorted(groups)]


def _options(view: ShardView, saved: list[dict[str, Any]] | None, *, strict: bool) -> list[dict[str, Any]]:
    """For each live group the options that the checkpoint has for the same parameters; {} to leave it as it is."""
    by_members = {frozenset(group.get("params", ())): group for group in saved or ()}
    found = []
    for group in _groups(view):
        options = by_members.get(frozenset(group["params"]), {})
        if strict and saved is not None and not options:
            raise CheckpointError(
                f"no group of the checkpoint has the {len(group['params'])} parameters {_some(group['params'])}: build "
                "the optimizer with the groups it was saved with"
            )
        found.append({k: v for k, v in options.items() if k != "params"})
    return found


def _restore_optimizer(
    view: ShardView, optimizer: Any, step: int, steps: Mapping[str, int], options: Sequence[Mapping[str, Any]]
) -> None:
    optimizer.step_count = step
    for unit in view.handle.units:
        for k, slot in enumerate(unit.layout.slots):
            unit.steps[k] = steps.get(slot.name, 0)
    for live, saved in zip(optimizer.param_groups, options, strict=True):
        live.update(saved)


def _unpickle(stream: io.BytesIO) -> Any:
    stream.seek(0)
    return torch.load(stream, map_location="cpu", weights_only=False)


def _some(names: Sequence[str], most: int = 6) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"
