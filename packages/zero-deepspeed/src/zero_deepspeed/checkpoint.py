"""`load_checkpoint`: a checkpoint of DeepSpeed's into a sharded model, at any number of ranks, stage and store.

Owns how such a checkpoint looks as one of zero-core's, whose `load` does the rest: it compares names, shapes, states
and groups before it changes anything, and each rank reads only its own slices.
"""

from __future__ import annotations

import io
import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint import FileSystemReader, LoadPlan, LoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType
from torch.futures import Future

from zero_core.checkpoint import load
from zero_core.checkpoint.match import STATE
from zero_core.checkpoint.shards import clean_name, view_of
from zero_core.errors import CheckpointError

from .files import Checkpoint, Pieces, Saved, open_checkpoint
from .pickles import FilesError

__all__ = ["Loaded", "load_checkpoint", "refuse_uncorrected"]

_CHOSEN = ("decoupled_weight_decay", "amsgrad", "maximize", "nesterov")  # other values make another optimizer


@dataclass(frozen=True)
class Loaded(Saved):
    """What `load_checkpoint` found. step: optimizer steps taken, global_steps less those that an overflow skipped."""

    step: int


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
    """Reads what DeepSpeed's save_checkpoint wrote into a sharded model. Collective.

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
    reader = _Reader(Path(folder), tag, inert, live, optimizer)
    loaded = load(folder, model, optimizer, scheduler=scheduler, strict=strict, random_state=False, reader=reader)
    saved = reader.saved
    assert saved is not None
    return Loaded(**{field.name: getattr(saved, field.name) for field in fields(Saved)}, step=loaded.step)


def refuse_uncorrected(saved: Checkpoint) -> None:
    """Raises FilesError for a run with bias_correction=False: torch's Adam always corrects the bias."""
    if any(group.get("bias_correction") is False for group in saved.run["groups"]):
        raise FilesError(
            f"{saved.folder} was trained with bias_correction=False, and torch's Adam always corrects the bias: load "
            "the weights alone, without an optimizer"
        )


@dataclass(eq=False)
class _Reader(FileSystemReader):
    """Reads a checkpoint of DeepSpeed's for zero-core's planner. The folder is opened once."""

    folder: Path
    tag: str | None
    inert: Iterable[str]
    live: Container[str]
    optimizer: torch.optim.Optimizer | None
    saved: Checkpoint | None = None
    failure: CheckpointError | None = None

    def __post_init__(self) -> None:
        super().__init__(self.folder)

    def _open(self) -> Checkpoint:
        found = open_checkpoint(self.folder, self.tag, inert=self.inert, live=self.live)
        if self.optimizer is not None:
            refuse_uncorrected(found)
            self._keep_known_options(found, self.optimizer.param_groups[0])
        return found

    def _keep_known_options(self, saved: Checkpoint, known: Mapping[str, Any]) -> None:
        """Drops options that the live optimizer lacks, and refuses those that would make it another one."""
        for group in saved.run["groups"]:
            if saved.decoupled is not None and group.get("weight_decay"):
                group.setdefault("decoupled_weight_decay", saved.decoupled)
            for key in [k for k in group if k not in known and k not in ("params", "initial_lr")]:
                del group[key]
            for key in _CHOSEN:
                if key in group and group[key] != known[key]:
                    raise CheckpointError(
                        f"{self.folder} was trained with {key}={group[key]}, and the optimizer here "
                        f"has {known[key]}: build it with the same (decoupled_weight_decay is torch.optim.AdamW)"
                    )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self.saved is None and self.failure is None:
            try:
                self.saved = self._open()
            except CheckpointError as error:
                self.failure = error
        if self.saved is None:
            return Metadata({}, storage_data={})
        entries: dict[str, Any] = {name: _entry(values) for name, values in self.saved.tensors.items()}
        entries |= {alias: entries[name] for alias, name in self.saved.aliases.items()}
        entries[STATE] = BytesStorageMetadata()
        return Metadata(entries, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found = self.saved
        assert found is not None
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(found.run, stream)
                planner.load_bytes(item, stream)
                continue
            target, values = planner.resolve_tensor(item), found.tensors[found.aliases.get(name, name)]
            strides = [math.prod(values.shape[d + 1 :]) for d in range(len(values.shape))]
            start = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
            target.copy_(values.read(start, start + math.prod(item.lengths)).view(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _entry(values: Pieces) -> TensorStorageMetadata:
    size = torch.Size(values.shape)
    chunk = ChunkStorageMetadata(torch.Size((0,) * len(size)), size)
    return TensorStorageMetadata(TensorProperties(dtype=values.dtype), size, [chunk])
