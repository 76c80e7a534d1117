"""Writes generations of a run's ranks as one checkpoint, which any number of ranks, stage and store can load.

Owns the checkpoint's entries. Not here: reading a rank's values (in its store), the fields of a blob (in durable.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from .checkpoint import write
from .checkpoint.match import FORMAT, STATE
from .checkpoint.plan import Contents
from .checkpoint.shards import MASTER, ShardSlice, clean_name
from .errors import CheckpointError
from .plain import unpacked
from .store import Segment

__all__ = ["Kept", "write_checkpoint"]


class Kept(Protocol):
    """The generation of one shard rank, as a durable store left it."""

    @property
    def blob(self) -> bytes:
        """The bytes of its values besides shards."""

    @property
    def segments(self) -> Sequence[Sequence[Segment]]:
        """The segments of each of its shards; frozen shards have none."""

    def state_names_of(self, segment: Segment) -> Sequence[str]:
        """Returns the names of this segment's states, without "master", that have one value an element."""

    def state_shapes_of(self, segment: Segment) -> Mapping[str, tuple[int, ...]]:
        """Returns names and shapes of an uncut segment's states that have another shape."""

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        """Returns (stop - start,) fp32 of shard i, in order, as zero_core.store.Pinned does."""

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        """Does the same as in zero_core.store.Pinned."""


def write_checkpoint(kept: Sequence[Kept], folder: str | os.PathLike[str]) -> tuple[int, Any]:
    """Writes a checkpoint for `zero_core.checkpoint.load` into `folder`, in one process. Returns the step, and the
    first rank's result of `extra` of `resume`.

    kept: of every shard rank, in order. Frozen parameters are not in the checkpoint, so the model that loads it has to
    be built as before. Raises CheckpointError where generations are of different steps, or the folder cannot be
    written.
    """
    runs = [unpacked(each.blob) for each in kept]
    counts = [run["step_count"] for run in runs]
    if len(set(counts)) > 1:
        raise CheckpointError(f"the ranks' generations are of steps {counts}, so they are not of one run")
    contents = Contents(_Shards(kept))
    for place, (rank, i) in enumerate(_shards(kept)):
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
    for name, buffer in run["buffers"].items():
        contents.add(buffer, "model", clean_name(name))
    for name, step in run["steps"].items():
        contents.add(torch.tensor(float(step)), "optim", "state", clean_name(name), "step")
    groups = [group | {"params": [clean_name(name) for name in group["params"]]} for group in run["groups"]]
    for i, group in enumerate(groups):
        for key, option in group.items():
            contents.add(option, "optim", "param_groups", str(i), key)
    about: dict[str, Any] = {key: run[key] for key in ("step_count", "scheduler", "loss_scale", "extra")}
    about |= {"format": FORMAT, "world_size": len(kept), "groups": groups, "left_out": None}
    contents.add(about, *STATE.split("."))
    for rank_number, each in enumerate(runs):
        contents.add(each["random_state"], "zero", f"rng.{rank_number}")
    write(Path(folder), contents, {}, alone=True)
    return int(run["step_count"]), run["extra"]


def _shards(kept: Sequence[Kept]) -> list[tuple[Kept, int]]:
    return [(rank, i) for rank in kept for i in range(len(rank.segments))]


class _Shards:
    """All shards of all ranks, one after another, as a checkpoint's contents read them."""

    def __init__(self, kept: Sequence[Kept]) -> None:
        self._shards = _shards(kept)

    def read(self, part: ShardSlice, state: str, start: int, stop: int) -> Tensor:
        rank, i = self._shards[part.unit]
        if state in rank.state_shapes_of(rank.segments[i][part.segment]):
            return rank.read_shaped(i, part.segment, state, start, stop)
        at = part.shard_start - part.start
        return rank.read_state(i, state, at + start, at + stop)

    def dtype_of(self, part: ShardSlice, state: str) -> torch.dtype:
        return torch.float32
