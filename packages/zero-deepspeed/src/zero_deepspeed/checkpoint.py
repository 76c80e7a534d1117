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
from torch import Tensor, nn
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
from zero_core.checkpoint.match import FORMAT, STATE
from zero_core.checkpoint.shards import clean_name, view_of
from zero_core.errors import CheckpointError

from .files import Checkpoint, Pieces, Saved, open_checkpoint
from .pickles import FilesError

__all__ = ["Loaded", "Seen", "Values", "load_checkpoint", "refuse_uncorrected", "seen"]

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


@dataclass(frozen=True)
class Values:
    """A tensor of the checkpoint, which is read in parts."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    source: Pieces


@dataclass(frozen=True)
class Seen:
    """A checkpoint of DeepSpeed's under the names that zero-core gives one of its own.

    sliced: masters and states. small: buffers and step counts. run: what `zero_core.checkpoint.save` keeps besides.
    aliases: further name -> name.
    """

    sliced: Mapping[str, Values]
    small: Mapping[str, Tensor]
    run: Mapping[str, Any]
    aliases: Mapping[str, str]


def seen(saved: Checkpoint, live: Container[str] = ()) -> Seen:
    """live: names in the model. Those of the checkpoint lose their "module." if more of them are then among these."""
    called = {name: clean_name(name) for name in (*saved.parameters, *saved.aliases, *saved.buffers)}
    shorter = {name: key.removeprefix("module.") for name, key in called.items()}
    if sum(key in live for key in shorter.values()) > sum(key in live for key in called.values()):
        called = shorter
    sliced: dict[str, Values] = {}
    small: dict[str, Tensor] = {f"model.{called[name]}": buffer for name, buffer in saved.buffers.items()}
    for name, parameter in saved.parameters.items():
        key, shape = called[name], parameter.shape
        dtype = parameter.dtype if parameter.group is None else torch.float32
        sliced[f"model.{key}"] = Values(shape, dtype, parameter.values)
        for state, source in parameter.states.items():
            sliced[f"optim.state.{key}.{state}"] = Values(shape, torch.float32, source)
        if parameter.step is not None:
            small[f"optim.state.{key}.step"] = torch.tensor(float(parameter.step))
    options = [{k: v for k, v in group.items() if k != "bias_correction"} for group in saved.groups]
    groups = [{**group, "params": [called[name] for name in group["params"]]} for group in options]
    steps = [parameter.step for parameter in saved.parameters.values() if parameter.step is not None]
    run = {
        "format": FORMAT,
        "world_size": saved.world_size,
        "step_count": max(steps, default=saved.global_steps - saved.skipped_steps),
        "groups": groups,
        "scheduler": saved.scheduler,
        "loss_scale": _loss_scale(saved.loss_scale),
        "extra": saved.client_state,
        "left_out": {} if saved.complete else None,  # DeepSpeed does not write down which it left out
    }
    aliases = {f"model.{called[alias]}": f"model.{called[name]}" for alias, name in saved.aliases.items()}
    return Seen(sliced, small, run, aliases)


def refuse_uncorrected(saved: Checkpoint) -> None:
    """Raises FilesError for a run with bias_correction=False: torch's Adam always corrects the bias."""
    if any(group.get("bias_correction") is False for group in saved.groups):
        raise FilesError(
            f"{saved.folder} was trained with bias_correction=False, and torch's Adam always corrects the bias: load "
            "the weights alone, without an optimizer"
        )


def _decoupled(config: Mapping[str, Any]) -> bool | None:
    """Whether the Adam of a JSON of DeepSpeed's decays weights as AdamW does; None: it has none, or does not say."""
    section = config.get("optimizer") or {}
    kind = str(section.get("type", "")).lower()
    params = section.get("params") or {}
    return {"adamw": True, "adam": bool(params.get("adam_w_mode", True))}.get(kind)


def _loss_scale(saved: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """DeepSpeed's dynamic scale as the state of a `zero_core.LossScale`: it doubles at the same step.

    DeepSpeed doubles when the steps since the last overflow, this one not counted, are a multiple of the window.
    """
    if saved is None or not saved.get("dynamic"):
        return None
    finite = int(saved["cur_iter"]) - int(saved["last_overflow_iter"]) - 1
    since = (finite - 1) % int(saved["scale_window"]) if finite else -1
    return {"value": float(saved["cur_scale"]), "finite_steps": since, "hysteresis_left": int(saved["cur_hysteresis"])}


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
    _seen: Seen | None = None

    def __post_init__(self) -> None:
        super().__init__(self.folder)

    def _open(self) -> Seen:
        saved = self.saved = open_checkpoint(self.folder, self.tag, inert=self.inert)
        found = seen(saved, self.live)
        if self.optimizer is not None:
            refuse_uncorrected(saved)
            self._keep_known_options(saved, self.optimizer.param_groups[0], found.run["groups"])
        return found

    def _keep_known_options(self, saved: Checkpoint, known: Mapping[str, Any], groups: list[dict[str, Any]]) -> None:
        """Drops options that the live optimizer lacks, and refuses those that would make it another one."""
        decoupled = _decoupled(saved.config)
        for group in groups:
            if decoupled is not None and group.get("weight_decay"):
                group.setdefault("decoupled_weight_decay", decoupled)
            for key in [k for k in group if k not in known and k not in ("params", "initial_lr")]:
                del group[key]
            for key in _CHOSEN:
                if key in group and group[key] != known[key]:
                    raise CheckpointError(
                        f"{self.folder} was trained with {key}={group[key]}, and the optimizer here "
                        f"has {known[key]}: build it with the same (decoupled_weight_decay is torch.optim.AdamW)"
                    )

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        if self._seen is None and self.failure is None:
            try:
                self._seen = self._open()
            except CheckpointError as error:
                self.failure = error
        found = self._seen
        if found is None:
            return Metadata({}, storage_data={})
        entries: dict[str, Any] = {name: _entry(v.shape, v.dtype) for name, v in found.sliced.items()}
        entries |= {name: _entry(tuple(t.shape), t.dtype) for name, t in found.small.items()}
        entries |= {alias: entries[name] for alias, name in found.aliases.items()}
        entries[STATE] = BytesStorageMetadata()
        return Metadata(entries, storage_data={})

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        found = self._seen
        assert found is not None
        for item in plan.items:
            name = item.storage_index.fqn
            if item.type == LoadItemType.BYTE_IO:
                stream = io.BytesIO()
                torch.save(found.run, stream)
                planner.load_bytes(item, stream)
                continue
            target = planner.resolve_tensor(item)
            name = found.aliases.get(name, name)
            if name in found.small:
                target.copy_(found.small[name])
            else:
                values = found.sliced[name]
                strides = [math.prod(values.shape[d + 1 :]) for d in range(len(values.shape))]
                start = sum(o * s for o, s in zip(item.storage_offsets, strides, strict=True))
                stop = start + math.prod(item.lengths)
                target.copy_(values.source.read(start, stop).view(target.shape))
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _entry(shape: tuple[int, ...], dtype: torch.dtype) -> TensorStorageMetadata:
    size = torch.Size(shape)
    chunk = ChunkStorageMetadata(torch.Size((0,) * len(shape)), size)
    return TensorStorageMetadata(TensorProperties(dtype=dtype), size, [chunk])
