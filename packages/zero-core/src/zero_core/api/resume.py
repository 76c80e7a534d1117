"""Resumes a run from its durable store after a kill (`resume`), at the last step that all ranks have on disk.

Writes the generations of a run's ranks as one checkpoint, too, which any number of ranks, stage and store can load.
Owns a generation's values besides shards: steps, groups, scheduler, loss scale, buffers, random state, the caller's own
values, and a name by which ranks know that their steps are of one run. Not here: when a generation is committed (in
hooks/schedule.py), where its bytes are (in the store).
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .. import checkpoint
from ..checkpoint import match
from ..checkpoint.plan import Contents
from ..checkpoint.shards import MASTER, ShardSlice, clean_name, extra_states
from ..device import random_state_of, restore_random_state
from ..errors import CheckpointError, ZeroError, reached
from ..model.parameter_names import named_tensors
from ..unit_memory.unit import optimized_in
from ..util.tensor_json import packed, unpacked
from .shard import handle

FORMAT = 1


@dataclass(frozen=True)
class Resumed:
    """The result of `resume`. step: optimizer steps that the run has taken, 0 for one that begins. extra: the result of
    `extra` when the forward after that step began; None for a run that begins."""

    step: int
    extra: Any


def resume(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    scheduler: Any = None,
    extra: Callable[[], Any] | None = None,
    every: int = 1,
) -> Resumed:
    """Resumes the run that the model's durable store found, or begins one. Collective; once, before any forward.

    scheduler: its state is kept too. extra: called as each step's first forward begins, so it can return which batch
    that is, in plain values (numbers, texts, lists, dicts, tensors). Each rank keeps its own. A forward under no_grad,
    or inside AveragedModel.swapped_in, belongs to no step. The last step is committed by `commit` only, since no
    forward follows it. Random states of torch, numpy and Python's `random` are those after the last step, from which
    the next batch is drawn. A run that is killed loses at most two steps: the one that had not returned, and the one
    before it. every: only each `every`-th optimizer step is kept, so that values in host memory or on a device are
    written less often. Then at most `every` + 1 steps are lost.

    Parameters that are not trained are not kept: build them as before. Once a step is kept, a write into one raises
    ZeroError in the next forward.
    Raises ValueError for an `every` below 1, ZeroError for a model without a durable store, and CheckpointError for a
    run of another scheduler, or of other groups or buffers, and where ranks have steps of different runs.

    Examples:
        >>> import torch, zero_core, zero_offload
        >>> from zero_offload.testing import CrashByteStore  # replaces zero_nvme.Slab([path], name="run")
        >>> model = torch.nn.Linear(4, 1)
        >>> store = zero_offload.TieredStore("host", "host", "nvme", nvme=CrashByteStore(), durable=True)
        >>> optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store)
        >>> zero_core.resume(model, optimizer).step
        0
        >>> optimizer.close()
    """
    if every < 1:
        raise ValueError(f"every={every} must be at least 1: each every-th step is kept")
    found = handle(model)
    store, commits = found.store, found.engine.commits
    if commits is None:
        raise ZeroError(
            f"resume() of a {type(model).__name__} whose store is not durable; give shard a store such as "
            'zero_offload.TieredStore(..., nvme=zero_nvme.Slab([path], name="run"), durable=True)'
        )
    if optimizer is not found.optimizer:
        raise ZeroError(f"the {type(optimizer).__name__} is not the optimizer that shard() returned for this model")
    if commits.begun:
        raise ZeroError("resume() was already called: call it once, after shard() and before the first forward")
    run = _Run(model, found, scheduler, extra)
    there = None if store.resumed is None else unpacked(store.resumed)
    run.agree("" if there is None else there.get("life", ""))
    resumed = Resumed(0, None) if there is None else run.restore(there)
    store.make_room(len(_Run(model, found, scheduler, None).blob(random_state_of(found.ranks.device))))
    commits.begin(partial(random_state_of, found.ranks.device), run.blob, every)
    return resumed


def commit(model: nn.Module) -> None:
    """Commits the last step now, whatever `every` is, and returns when it is on disk. Collective; for the end of a run.

    Calls `extra` of `resume`, which has to return the values for the step after the last one. Without this call, a
    resumed run repeats its last step, from the one before, with the same bits. Raises ZeroError without `resume`, and
    inside AveragedModel.swapped_in.
    """
    engine = handle(model).engine
    commits = engine.commits
    if commits is None or not commits.begun:
        raise ZeroError("commit() without resume(): call zero_core.resume(model, optimizer) before the first forward")
    if engine.averages:
        raise ZeroError("commit() inside AveragedModel.swapped_in would keep the averages: leave the with block first")
    commits.finish()


class _Run:
    """Reads and restores a generation's values besides shards."""

    def __init__(self, model: nn.Module, found: Any, scheduler: Any, extra: Callable[[], Any] | None) -> None:
        self._model, self._handle, self._scheduler, self._extra = model, found, scheduler, extra
        self._life = ""  # the name of the run, which all of its steps have
        self._frozen: dict[tuple[int, int], int] = {}  # version counters of untrained parameters at the first commit

    def agree(self, life: str) -> None:
        """Takes the `life` of the found steps, or a new one. Raises if ranks found different ones."""
        ranks = self._handle.ranks
        pairs = [(life, uuid.uuid4().hex)] * ranks.size
        if ranks.size > 1:
            with reached(ranks.rank, ranks.size):
                dist.all_gather_object(pairs, pairs[0])
        if (other := next((rank for rank, (found, _) in enumerate(pairs) if found != pairs[0][0]), None)) is not None:
            raise CheckpointError(
                f"ranks 0 and {other} have durable steps of different runs. Perhaps a drive was missing while other "
                "ranks continued from a checkpoint: remove the slabs of all ranks to go on from the last checkpoint"
            )
        self._life = pairs[0][0] or pairs[0][1]

    def blob(self, random_state: Any) -> bytes:
        """Returns these values as bytes, when the forward after a step begins.

        Raises ZeroError if a parameter that is not trained was written since the first step.
        """
        scale, scheduler = self._handle.engine.loss_scale, self._scheduler
        for unit in self._handle.units:
            for k, count in enumerate(version.ends for version in unit.versions):
                if unit.groups[k] is None and count > self._frozen.setdefault((unit.index, k), count):
                    raise ZeroError(
                        f"{unit.layout.slots[k].whole.name} is not trained and was written after the first step, but "
                        "durable steps have trained parameters only. Make it a buffer, or leave durable= out"
                    )
        return packed(
            {
                "format": FORMAT,
                "life": self._life,
                "step_count": self._handle.optimizer.step_count,
                "steps": {u.layout.slots[k].whole.name: u.steps[k] for u, k, _ in optimized_in(self._handle.units)},
                "groups": match.named_groups(self._handle),
                "written": self._handle.optimizer.double.written(),
                "scheduler": None if scheduler is None else scheduler.state_dict(),
                "loss_scale": None if scale is None else scale.state_dict(),
                "buffers": self._values(),
                "random_state": random_state,
                "extra": None if self._extra is None else self._extra(),
            },
            "the run's state",
        )

    def restore(self, run: dict[str, Any]) -> Resumed:
        if run["format"] > FORMAT:
            raise CheckpointError(f"the run has format {run['format']}; this zero-core reads up to {FORMAT}")
        optimizer, scale = self._handle.optimizer, self._handle.engine.loss_scale
        for what, mine, there in (
            ("whether resume() is given scheduler=", self._scheduler is not None, run["scheduler"] is not None),
            ("whether shard() is given loss_scale=", scale is not None, run["loss_scale"] is not None),
            ("groups", [g["params"] for g in match.named_groups(self._handle)], [g["params"] for g in run["groups"]]),
            ("buffers", _shapes(self._values()), _shapes(run["buffers"])),
        ):
            if mine != there:
                raise CheckpointError(
                    f"{what}: {_short(there)} in the run on disk, {_short(mine)} now. Change your program "
                    "back. Or, to begin a new run, call remove() of the Slab"
                )
        extra = dict(extra_states(self._model))
        for name, value in self._values().items():
            extra[name].set_extra_state(run["buffers"][name]) if name in extra else value.copy_(run["buffers"][name])
        for unit, k, _ in optimized_in(self._handle.units):
            unit.steps[k] = run["steps"][unit.layout.slots[k].whole.name]
        optimizer.step_count = run["step_count"]
        for live, saved in zip(optimizer.param_groups, run["groups"], strict=True):
            live.update({key: value for key, value in saved.items() if key != "params"})
        if optimizer.double and "written" in run:
            optimizer.double.restore(run["written"])
        if scale is not None:
            scale.load_state_dict(run["loss_scale"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(run["scheduler"])
        restore_random_state(run["random_state"], self._handle.ranks.device)
        return Resumed(run["step_count"], run["extra"])

    def _values(self) -> dict[str, Any]:
        """Returns buffers and extra states of modules, by their names in a state dict."""
        buffers: dict[str, Any] = {each.name: each.tensor.data for each in named_tensors(self._model) if each.is_buffer}
        return buffers | {name: module.get_extra_state() for name, module in extra_states(self._model)}


def _shapes(values: dict[str, Any]) -> dict[str, list[int] | None]:
    """Extra states have none: a new model's may be another than a trained one's."""
    return {name: None if name.endswith("_extra_state") else list(value.shape) for name, value in values.items()}


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


# -- checkpoints of generations --------------------------------------------------------------------------------------


def write_checkpoint(kept: Sequence[Any], folder: str | os.PathLike[str]) -> tuple[int, Any]:
    """Writes a checkpoint for `zero_core.checkpoint.load` into `folder`, in one process. Returns the step, and the
    first rank's result of `extra` of `resume`.

    kept: for every shard rank, in order, its generation, as a durable store left it. A generation has `blob`, the bytes
    of its values besides shards; `segments`, those of each of its shards; for a segment, state_names_of(segment), the
    names of its states, without "master", that have one value an element, and state_shapes_of(segment), names and
    shapes of the others; and read_state and read_shaped of `store.Pinned`, for shards in order.
    Frozen parameters are not in the checkpoint, so the model that loads it has to be built as before. Raises
    CheckpointError where generations are of different steps, or the folder cannot be written.
    """
    runs = [unpacked(each.blob) for each in kept]
    counts = [run["step_count"] for run in runs]
    if len(set(counts)) > 1:
        raise CheckpointError(f"the ranks' generations are of steps {counts}, so they are not of one run")
    shards = _Shards((rank, i) for rank in kept for i in range(len(rank.segments)))
    contents = Contents(shards)
    for place, (rank, i) in enumerate(shards):
        for index, segment in enumerate(rank.segments[i]):
            if segment.group is not None and segment.shape is not None:
                where = segment.offset, segment.offset + segment.stop - segment.start, place, index, index
                part = ShardSlice(segment.name, segment.shape, *where, segment.start)
                name = clean_name(segment.name)
                contents.add_slice(part, MASTER, "model", name)
                for state in rank.state_names_of(segment):
                    contents.add_slice(part, state, "optim", "state", name, state)
                for state, shape in rank.state_shapes_of(segment).items():
                    contents.add_slice(part.of(shape), state, "optim", "state", name, state)
    run = runs[0]
    for name, value in run["buffers"].items():
        contents.add(value, "model", clean_name(name))
    for name, step in run["steps"].items():
        contents.add(torch.tensor(step, dtype=torch.float32, device="cpu"), "optim", "state", clean_name(name), "step")
    groups = match.cleaned(run["groups"])
    for i, group in enumerate(groups):
        for key, option in group.items():
            contents.add(option, "optim", "param_groups", str(i), key)
    about: dict[str, Any] = {key: run[key] for key in ("step_count", "scheduler", "loss_scale", "extra")}
    about |= {"format": match.FORMAT, "world_size": len(kept), "groups": groups, "left_out": None}
    contents.add(about, *match.STATE.split("."))
    for rank_number, each in enumerate(runs):
        contents.add(each["random_state"], "zero", f"rng.{rank_number}")
    checkpoint.write(Path(folder), contents, {}, alone=True)
    return int(run["step_count"]), run["extra"]


class _Shards(list[tuple[Any, int]]):
    """All shards of all ranks, one after another, as a checkpoint's contents read them: a rank's generation, and the
    number of the shard in it."""

    def read(self, part: ShardSlice, state: str, start: int, stop: int) -> Tensor:
        rank, i = self[part.unit]
        if state in rank.state_shapes_of(rank.segments[i][part.segment]):
            return rank.read_shaped(i, part.segment, state, start, stop)
        at = part.shard_start - part.start
        return rank.read_state(i, state, at + start, at + stop)

    def dtype_of(self, part: ShardSlice, state: str) -> torch.dtype:
        return torch.float32
