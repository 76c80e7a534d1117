"""Loads a DeepSpeed checkpoint into a sharded model (`load_checkpoint`), at any number of ranks, stage and store.

Owns the view of such a checkpoint as one of zero-core's. zero-core's `load` compares names, shapes, states and groups
before it changes anything, and each rank reads only its own slices.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner, Metadata, metadata
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from zero_core.checkpoint import load
from zero_core.checkpoint.match import STATE
from zero_core.checkpoint.shards import clean_name, view_of
from zero_core.errors import CheckpointError

from .files import Checkpoint, Pieces, open_checkpoint
from .pickles import FilesError

__all__ = ["Loaded", "load_checkpoint", "refuse_uncorrected"]

_CHOSEN = {"decoupled_weight_decay", "amsgrad", "maximize", "nesterov"}  # other values make another optimizer


Loaded = Checkpoint  # the result of `load_checkpoint`, without tensors and aliases


def load_checkpoint(
    folder: str | Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    tag: str | None = None,
    scheduler: Any = None,
    strict: bool = True,
    inert: Iterable[str] = (),
) -> Loaded:
    """Reads a checkpoint of DeepSpeed's save_checkpoint into a sharded model. Collective.

    Weights go into the fp32 masters, and with `optimizer`, which `shard` returned, also states, step counts, the
    options of the groups, and the loss scale of a model that has a dynamic one. Without it only the weights are read.
    scheduler: gets the state of DeepSpeed's; its class has to be the same, or one of zero_deepspeed's for a
    scheduler of DeepSpeed's own. tag: `latest` by default. strict: False leaves parameters that the checkpoint lacks
    as they are, and ignores names that the model lacks. inert: classes in client_state whose objects are read as dicts.
    Every rank gets rank 0's buffers. Random state is not in such a checkpoint.

    The files are pickles, and nothing in them is executed. Raises, on every rank and before anything is changed,
    FilesError (a ConfigError) for files that are absent, damaged or want to call something, and CheckpointError for a
    checkpoint of another model, optimizer or grouping.
    """
    view = view_of(model)
    live = {clean_name(n) for named in view.names for n in named.names} if view is not None else set()
    reader = _Reader(Path(folder))
    try:
        saved = reader.saved = open_checkpoint(folder, tag, inert=inert, live=live)
        _refuse_other_schedules(saved, scheduler)
        if optimizer is not None:
            refuse_uncorrected(saved)
            _keep_known_options(saved, optimizer.param_groups[0])
    except Exception as error:  # perhaps on this rank alone; the planner raises it on every one
        reader.failure = error
    load(folder, model, optimizer, scheduler=scheduler, strict=strict, random_state=False, reader=reader)
    return replace(saved, tensors={}, aliases={})


def refuse_uncorrected(saved: Checkpoint) -> None:
    """Raises FilesError for a run with bias_correction=False: torch's Adam always corrects the bias."""
    if any(group.get("bias_correction") is False for group in saved.run["groups"]):
        raise FilesError(
            f"{saved.folder} was trained with bias_correction=False, and torch's Adam always corrects the bias: load "
            "the weights alone, by engine.load_checkpoint(..., load_module_only=True) or load_checkpoint(folder, model)"
        )


def _refuse_other_schedules(saved: Checkpoint, scheduler: Any) -> None:
    """Raises CheckpointError for a schedule that would accept the state of a DeepSpeed schedule and not use it."""
    own = "last_batch_iteration"
    if scheduler is not None and own in (saved.run["scheduler"] or {}) and own not in scheduler.state_dict():
        raise CheckpointError(
            f"{saved.folder} has the state of a DeepSpeed schedule, which {type(scheduler).__name__} cannot load: use "
            "a schedule of zero_deepspeed.schedules. Or leave scheduler= out (engine: load_lr_scheduler_states=False)"
        )


def _keep_known_options(saved: Checkpoint, known: Mapping[str, Any]) -> None:
    """Drops options that the live optimizer lacks, and refuses those that would turn it into another optimizer."""
    for group in saved.run["groups"]:
        for key in group.keys() - {*known, "params", "initial_lr"}:
            del group[key]
        for key in group.keys() & _CHOSEN:
            if group[key] != known[key]:
                raise CheckpointError(
                    f"{saved.folder} was trained with {key}={group[key]}, and this optimizer has {key}={known[key]}: "
                    f"build the optimizer with {key}={group[key]} (for decoupled_weight_decay=True: torch.optim.AdamW)"
                )


class _Reader(FileSystemReader):
    """Reads a checkpoint of DeepSpeed's for zero-core's planner, which raises `failure` on every rank."""

    saved: Checkpoint | None = None
    failure: Exception | None = None

    def _tensors(self) -> dict[str, Pieces]:
        if self.saved is None:
            return {}
        return {**self.saved.tensors, **{alias: self.saved.tensors[name] for alias, name in self.saved.aliases.items()}}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        entries: dict[str, Any] = {STATE: metadata.BytesStorageMetadata()}
        for name, values in self._tensors().items():
            size, kind = torch.Size(values.shape), metadata.TensorProperties(dtype=values.dtype)
            chunk = metadata.ChunkStorageMetadata(torch.Size((0,) * len(size)), size)
            entries[name] = metadata.TensorStorageMetadata(kind, size, [chunk])
        return Metadata(entries, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        tensors = self._tensors()
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(cast(Checkpoint, self.saved).run, stream)
                planner.load_bytes(item, stream)
                continue
            target, values = planner.resolve_tensor(item), tensors[item.storage_index.fqn]
            strides = [math.prod(values.shape[d + 1 :]) for d in range(len(values.shape))]
            start = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
            target.copy_(values.read(start, start + math.prod(item.lengths)).view(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done
