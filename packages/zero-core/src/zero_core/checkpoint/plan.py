"""Plans which pieces of a sharded model a checkpoint holds, and how they are loaded again. Planners, no files.

Owns names and boxes: parameters are "model.NAME" (the fp32 master), states "optim.state.NAME.exp_avg" and so on, as
`torch.distributed.checkpoint.state_dict` names them, so FSDP2 and plain models load them. A rank's slice of a parameter
is cut into n-dimensional boxes of at most a tile; one box is alive at a time, in either direction.
"""

from __future__ import annotations

import io
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ..errors import CheckpointError
from ..layout import Box, boxes
from ..store import CHUNK_NUMEL
from .files import narrowed
from .shards import ShardSlice, ShardView

TILE_NUMEL = 4 * CHUNK_NUMEL


@dataclass(frozen=True)
class Sliced:
    """This rank's slice of one parameter's master or state, under the name that the checkpoint has for it."""

    fqn: str
    part: ShardSlice
    state: str


@dataclass
class Contents:
    """Everything one rank writes. Tensors and objects that several ranks list are written by one of them.

    view: has the methods `read` and `dtype_of` of `ShardView`.
    """

    view: Any
    tile_numel: int = TILE_NUMEL
    sliced: list[Sliced] = field(default_factory=list)
    whole: dict[str, Any] = field(default_factory=dict)  # fqn -> a small whole tensor (buffer, step), or an object
    paths: dict[str, tuple[str, ...]] = field(default_factory=dict)  # fqn -> the same as nested keys

    def add(self, value: Any, *path: str) -> None:
        self.whole[self._name(path)] = value

    def keep(self) -> None:
        """Copies the small tensors and pickles the objects, so that the run no longer changes them."""
        for fqn, value in self.whole.items():
            self.whole[fqn] = value.detach().cpu().clone() if isinstance(value, Tensor) else _Pickled(value)

    def add_slice(self, part: ShardSlice, state: str, *path: str) -> None:
        self.sliced.append(Sliced(self._name(path), part, state))

    def _name(self, path: tuple[str, ...]) -> str:
        fqn = ".".join(path)
        self.paths[fqn] = path
        return fqn


def tile_boxes(shape: Sequence[int], start: int, stop: int, tile_numel: int) -> Iterator[Box]:
    """Cuts [start, stop) of a row-major tensor into boxes of at most `tile_numel` elements, each contiguous in it."""
    rows = itertools.accumulate(reversed(shape[1:]), operator.mul, initial=1)  # elements of a row in each dimension
    row = max(numel for numel in rows if numel <= tile_numel)
    step = tile_numel // row * row
    edges = [start, *range(start // step * step + step, stop, step), stop]
    for low, high in itertools.pairwise(edges):
        yield from boxes(shape, low, high)


class StreamingSavePlanner(dcp.DefaultSavePlanner):
    """Plans boxes; reads each from the store when the writer asks for it."""

    def __init__(self, contents: Contents) -> None:
        super().__init__(flatten_state_dict=False)
        self._contents = contents
        self._boxes: dict[MetadataIndex, tuple[Sliced, Box]] = {}

    def create_local_plan(self) -> dcp.SavePlan:
        contents = self._contents
        items = []
        for fqn, value in contents.whole.items():
            if isinstance(value, Tensor):
                offsets = (0,) * value.dim()
                items.append(_write_item(fqn, offsets, value.shape, value.shape, value.dtype, whole=True))
            else:
                items.append(WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO))
        for part, slices in itertools.groupby(contents.sliced, key=operator.attrgetter("part")):
            states = list(slices)
            for box in tile_boxes(part.shape, part.start, part.stop, contents.tile_numel):
                for sliced in states:  # all of a box at once: the store has them together
                    self._boxes[MetadataIndex(sliced.fqn, box.offsets)] = sliced, box
                    dtype = contents.view.dtype_of(part, sliced.state)
                    items.append(_write_item(sliced.fqn, box.offsets, box.sizes, part.shape, dtype, whole=False))
        self.plan = dcp.SavePlan(items, planner_data=contents.paths)
        return self.plan

    def create_global_plan(self, all_plans: list[dcp.SavePlan]) -> tuple[list[dcp.SavePlan], Metadata]:
        plans, metadata = super().create_global_plan(all_plans)
        metadata.planner_data = {fqn: path for plan in all_plans for fqn, path in plan.planner_data.items()}
        return plans, metadata

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        fqn = write_item.index.fqn
        if write_item.type == WriteItemType.BYTE_IO:
            value = self._contents.whole[fqn]
            return value if isinstance(value, _Pickled) else _Pickled(value)
        if write_item.type == WriteItemType.TENSOR:
            return self._contents.whole[fqn].detach().cpu().contiguous().clone()
        sliced, box = self._boxes[write_item.index]
        values = self._contents.view.read(sliced.part, sliced.state, box.start, box.start + box.numel)
        return values.view(box.sizes)


class _Pickled(io.BytesIO):
    """The bytes of an object, which itself may be a BytesIO."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        torch.save(value, self)


def _write_item(
    fqn: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], dtype: torch.dtype, *, whole: bool
) -> WriteItem:
    chunk = ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
    data = TensorWriteData(chunk, dcp.metadata.TensorProperties(dtype=dtype), torch.Size(shape))
    kind = WriteItemType.TENSOR if whole else WriteItemType.SHARD
    return WriteItem(MetadataIndex(fqn, torch.Size(offsets)), kind, tensor_data=data)


class StreamingLoadPlanner(dcp.DefaultLoadPlanner):
    """Plans the boxes that this rank holds; writes each into the store as soon as it is read.

    plan: returns the parts to read, given the checkpoint's metadata; raises CheckpointError where it does not fit the
    model, or where the reader found the files damaged. `tensors` and `objects` hold the values when loading is done.
    """

    def __init__(self, view: ShardView, plan: Callable[[Metadata], Wanted], tile_numel: int = TILE_NUMEL) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._view, self._plan_wanted, self._tile_numel = view, plan, tile_numel
        self._boxes: dict[MetadataIndex, tuple[Sliced, Box]] = {}
        self.tensors: dict[str, Tensor] = {}
        self.objects: dict[str, Any] = {}

    def create_local_plan(self) -> dcp.LoadPlan:
        assert self.metadata is not None
        wanted = self._plan_wanted(self.metadata)
        stored = self.metadata.state_dict_metadata
        items: list[ReadItem] = []
        for sliced in wanted.sliced:
            items += self._items_of(sliced, stored[sliced.fqn])
        for fqn in wanted.tensors:
            entry: Any = stored[fqn]
            self.tensors[fqn] = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
            chunk = ChunkStorageMetadata(torch.Size((0,) * len(entry.size)), entry.size)
            items += create_read_items_for_chunk_list(fqn, entry, [chunk])
        for fqn in wanted.objects:
            index, nothing = MetadataIndex(fqn), torch.Size((0,))
            items.append(ReadItem(LoadItemType.BYTE_IO, index, nothing, index, nothing, nothing))
        return dcp.LoadPlan(items)

    def _items_of(self, sliced: Sliced, entry: Any) -> list[ReadItem]:
        part = sliced.part
        wanted = list(tile_boxes(part.shape, part.start, part.stop, self._tile_numel))
        for box in wanted:
            self._boxes[MetadataIndex(sliced.fqn, box.offsets)] = sliced, box
        chunks = [ChunkStorageMetadata(torch.Size(b.offsets), torch.Size(b.sizes)) for b in wanted]
        items = create_read_items_for_chunk_list(sliced.fqn, entry, chunks)
        found = sum(math.prod(item.lengths) for item in items)
        if found != part.stop - part.start:
            raise CheckpointError(
                f"the checkpoint has {found} of the {part.stop - part.start} elements of {sliced.fqn!r} that this rank "
                "needs, so not all ranks wrote the checkpoint: call save() on every rank, or load another folder"
            )
        return items

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.objects[read_item.dest_index.fqn] = value

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        """Returns memory for one item: a new box as it is stored, or the part of a whole tensor that it fills."""
        fqn = read_item.dest_index.fqn
        if (whole := self.tensors.get(fqn)) is None:
            entry: Any = self.metadata.state_dict_metadata[fqn] if self.metadata is not None else None
            return torch.empty(read_item.lengths, dtype=entry.properties.dtype, device="cpu")
        return narrowed(whole, read_item.dest_offsets, read_item.lengths)

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        if read_item.dest_index.fqn in self.tensors:
            return
        sliced, box = self._boxes[read_item.dest_index]
        if (start := _run_start(box, read_item.dest_offsets, read_item.lengths)) is not None:
            self._view.write(sliced.part, sliced.state, start, tensor.reshape(-1))
            return
        # A box cut across its rows, as tensor parallelism does: read, patch, write back, still one box alive.
        whole = self._view.read(sliced.part, sliced.state, box.start, box.start + box.numel).view(box.sizes)
        narrowed(whole, read_item.dest_offsets, read_item.lengths).copy_(tensor)
        self._view.write(sliced.part, sliced.state, box.start, whole.reshape(-1))


@dataclass(frozen=True)
class Wanted:
    """The parts of a checkpoint to read."""

    sliced: Sequence[Sliced]
    tensors: Sequence[str]
    objects: Sequence[str]


def _run_start(box: Box, offsets: Sequence[int], lengths: Sequence[int]) -> int | None:
    """Returns where in the row-major parameter a part of `box` begins, if it is one contiguous run; else None."""
    strides = [math.prod(box.sizes[d + 1 :]) for d in range(len(box.sizes))]
    varying = [d for d, length in enumerate(lengths) if length > 1]
    if varying and any(lengths[d] != box.sizes[d] for d in range(varying[0] + 1, len(lengths))):
        return None
    return box.start + sum(o * s for o, s in zip(offsets, strides, strict=True))


def shapes_of(metadata: Metadata) -> Mapping[str, tuple[int, ...]]:
    """Returns the shapes of a checkpoint's tensors by name, without its objects."""
    entries = metadata.state_dict_metadata.items()
    return {fqn: tuple(entry.size) for fqn, entry in entries if isinstance(entry, TensorStorageMetadata)}
