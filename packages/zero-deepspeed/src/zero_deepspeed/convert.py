"""Converts a DeepSpeed checkpoint into one of zero-core's (`convert`) or into safetensors (`convert_weights`).

One process, no model: values go from file to file in tiles, so memory does not grow with the checkpoint. A checkpoint
is complete or absent, as `zero_core.checkpoint.save` writes it; safetensors get their names when they are complete.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from zero_core.checkpoint import write
from zero_core.checkpoint.match import STATE
from zero_core.checkpoint.plan import Contents
from zero_core.checkpoint.pretrained import write_pretrained
from zero_core.checkpoint.shards import ShardSlice
from zero_core.errors import ConfigError

from .checkpoint import refuse_uncorrected
from .files import Checkpoint, Pieces, open_checkpoint


def convert(folder: str | Path, out: str | Path, *, tag: str | None = None, inert: Iterable[str] = ()) -> Checkpoint:
    """Writes a checkpoint for `zero_core.checkpoint.load`: masters, states, steps, groups, scheduler and loss scale.

    It is read at any number of ranks, stage and store; `Loaded.extra` is the client_state. folder, tag, inert: as for
    `load_checkpoint`. Returns the checkpoint. Raises FilesError as that does, and CheckpointError if `out` cannot be
    written; then `out` is unchanged.
    """
    saved = open_checkpoint(folder, tag, inert=inert)
    refuse_uncorrected(saved)
    contents = Contents(cast(Any, _Files(saved.tensors)))
    for name, values in saved.tensors.items():
        numel, path = math.prod(values.shape), name.split(".", 1)
        if path[0] == "optim":  # optim.state.NAME.STATE, where NAME may have dots
            path = ["optim", "state", *name.removeprefix("optim.state.").rsplit(".", 1)]
        if values.shape and numel:
            contents.add_slice(ShardSlice(name, values.shape, 0, numel, 0, 0, 0, 0), "", *path)
        else:
            contents.add(values.read(0, numel).view(values.shape), *path)
    for i, group in enumerate(saved.run["groups"]):
        for key, option in group.items():
            contents.add(option, "optim", "param_groups", str(i), key)
    contents.add(saved.run, *STATE.split("."))
    write(Path(out), contents, saved.aliases, alone=True)
    return saved


def convert_weights(
    folder: str | Path,
    out: str | Path,
    *,
    tag: str | None = None,
    dtype: torch.dtype | None = None,
    model: str | Path | None = None,
    inert: Iterable[str] = (),
    max_file_bytes: int = 5 << 30,
) -> Checkpoint:
    """Writes safetensors that transformers loads: masters, frozen parameters and buffers.

    dtype: of all floating-point tensors, rounded as torch rounds; by default masters are fp32 and the others as they
    were saved. model: a folder whose config.json is copied. Raises as `convert` does, and PretrainedError.
    """
    if model is not None and not (Path(model) / "config.json").is_file():
        raise ConfigError(f"{model} has no config.json to copy: name the original model's folder, or leave model= out")
    saved = open_checkpoint(folder, tag, inert=inert)
    values = {name.removeprefix("model."): each for name, each in saved.tensors.items() if name.startswith("model.")}
    kinds = {
        name: (dtype if dtype is not None and each.dtype.is_floating_point else each.dtype, each.shape)
        for name, each in values.items()
    }
    write_pretrained(Path(out), kinds, values, max_file_bytes)
    for name in ("config.json", "generation_config.json"):
        if model is not None and (Path(model) / name).is_file():
            shutil.copyfile(Path(model) / name, Path(out) / name)
    return saved


@dataclass(frozen=True)
class _Files:
    """The part of a sharded model that zero-core's planner uses, read from the files."""

    tensors: Mapping[str, Pieces]

    def dtype_of(self, part: ShardSlice, state: str) -> torch.dtype:
        return self.tensors[part.name].dtype

    def read(self, part: ShardSlice, state: str, start: int, stop: int) -> Tensor:
        return self.tensors[part.name].read(start, stop)
