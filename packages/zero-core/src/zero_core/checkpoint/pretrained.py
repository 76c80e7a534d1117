"""Loads Hugging Face weights into a model, sharded, deferred or plain, and saves them.

Owns the choice of slices that each rank reads and writes. Every rank reads only its own slices, one read each, and
writes only them, so no rank ever holds more than a tile of a sharded parameter. Not here: names (in
model/parameter_names.py), bytes (in safetensors.py).
"""

from __future__ import annotations

import bisect
import copy
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PretrainedError
from ..model.deferred_init import recording_of
from ..model.init_replay import Source
from ..model.initial_values import Initialiser
from ..model.parameter_names import Part, match, named_tensors, whole_tensors
from ..tensors.inner_tensors import named_parts
from .safetensors import INDEX_NAME, SINGLE_NAME, Entry, Reader, Writer, open_index, room
from .shards import ShardView, view_of

_TILE_NUMEL = 1 << 22
_Kind = tuple[torch.dtype, tuple[int, ...]]


@dataclass(frozen=True)
class PretrainedReport:
    """The result of load_pretrained. `missing` parameters keep their values; `unexpected` tensors were not read."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    tied: tuple[tuple[str, str], ...] = ()  # (other name, first name): one parameter
    read_bytes: int = 0  # by this rank, so far: a deferred model's weights are read by shard()


class _Laid:
    """A parameter laid end to end from parts of file tensors."""

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._starts = [0, *itertools.accumulate(part.numel for part in parts)]

    def pieces(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Yields (file tensor, from, to) for elements [start, stop) of the row-major parameter, in order."""
        for at in range(bisect.bisect_right(self._starts, start) - 1, bisect.bisect_left(self._starts, stop)):
            part, begin = self._parts[at], self._starts[at]
            yield part.name, part.start + max(start - begin, 0), part.start + min(stop - begin, part.numel)


class FileValues:
    """A parameter's values, laid end to end from `parts` of the tensors in `entries`. Fills `init_replay.Source`."""

    def __init__(self, parts: Sequence[Part], reader: Reader, entries: Mapping[str, Entry]) -> None:
        self.laid, self.reader, self.entries = _Laid(parts), reader, entries

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major parameter, in the file's dtype."""
        pieces = [self.reader.read(self.entries[name], *span) for name, *span in self.laid.pieces(start, stop)]
        return pieces[0] if len(pieces) == 1 else torch.cat(pieces or [torch.empty(0, device="cpu")])


def load_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, strict: bool = True, rename: Callable[[str], str] | None = None
) -> PretrainedReport:
    """Loads safetensors weights (a folder, sharded or not, or one file) into the model, in place.

    - After `shard`: every rank reads its slices and writes them into its store, tile by tile.
    - Built in `deferred_init`, before `shard`: nothing is read yet but buffers; `shard` reads each rank's slices.
    - Plain: parameters are filled.

    Values are converted to the parameter's dtype, into the fp32 master where there is one. rename: from a name in the
    model to the file's, where they differ. Ties, base-model prefixes, tiled linears and fused experts need none.
    Raises PretrainedError naming every mismatched shape and, if `strict`, every missing and unexpected name, and a tied
    parameter for which the files hold two values. Without `strict`, the second one's name is among the unexpected.
    """
    entries = open_index(folder)
    found = match(model, {name: entry.shape for name, entry in entries.items()}, rename)
    complaints = [f"shapes differ: {'; '.join(found.mismatched)}"] if found.mismatched else []
    if strict:
        complaints += [f"missing from the files: {', '.join(found.missing)}"] if found.missing else []
        complaints += [f"not in the model: {', '.join(found.unexpected)}"] if found.unexpected else []
    if complaints:
        told = f"{folder} does not fit {type(model).__name__}: {' | '.join(complaints)}; build the model as saved"
        names = ", or pass rename= where names differ, or strict=False to load only the names that both have"
        raise PretrainedError(told + names * (len(complaints) > bool(found.mismatched)))
    tensors = named_tensors(model)
    reader = Reader()
    values = {name: FileValues(parts, reader, entries) for name, parts in found.parts.items()}
    left = []
    for name, other in ((name, other) for name, others in found.others.items() for other in others):
        numel, second = entries[other].numel, FileValues([Part(other, 0, entries[other].numel)], reader, entries)
        if numel != sum(part.numel for part in found.parts[name]) or differ(values[name], second, numel):
            left.append(other)
    if strict and left:
        raise PretrainedError(
            f"{folder} has {', '.join(left)} with other values than the parameter that {type(model).__name__} ties to "
            "it: build the model without the tie (tie_word_embeddings=False in transformers' config), or pass "
            "strict=False to leave these values out"
        )
    fill(model, values)
    ties = tuple((alias, t.name) for t in tensors if not t.is_buffer for alias in t.aliases)
    return PretrainedReport(tuple(found.parts), found.missing, (*found.unexpected, *left), ties, reader.read_bytes)


def differ(one: Source, other: Source, numel: int) -> bool:
    """Says whether two tensors of `numel` elements in files have different values. Reads them in tiles."""
    wide = torch.complex128
    return not all(
        torch.allclose(one.read(*span).to(wide), other.read(*span).to(wide), rtol=0, atol=0, equal_nan=True)
        for span in _tiles(0, numel)
    )


@torch.no_grad()
def fill(model: nn.Module, values: Mapping[str, Source]) -> None:
    """Gives parameters and buffers the values of their sources, by the names of `parameter_names.named_tensors`.

    A deferred parameter gets them from `shard`, which reads each rank's slices; all others get them now.
    """
    tensors, view = named_tensors(model), view_of(model)
    owners = {id(part.tensor): part.module for part in named_parts(model)}
    for named in tensors:
        source, tensor = values.get(named.name), named.tensor
        if source is None or (view is not None and not view.is_whole(named)):
            continue
        if not tensor.is_meta:
            _copy(tensor, source)
            continue
        recording = recording_of(owners[id(tensor)])
        if recording is None or not recording.knows(tensor):
            raise PretrainedError(
                f"cannot load into {named.name!r} on the meta device: build the model in zero_core.deferred_init()"
            )
        recording.attach(tensor, source)
    if view is not None:
        view.overwriting(values, as_built=True)
        for slice_ in view.slices():
            if (source := values.get(slice_.name)) is not None:
                for start, stop in _tiles(slice_.start, slice_.stop):
                    view.write(slice_, "master", start, source.read(start, stop))


def _copy(tensor: Tensor, source: Source) -> None:
    if not tensor.is_contiguous():
        tensor.copy_(source.read(0, tensor.numel()).view(tensor.shape))
        return
    flat = tensor.detach().view(-1)
    for start, stop in _tiles(0, flat.numel()):
        flat[start:stop].copy_(source.read(start, stop))


def _tiles(start: int, stop: int) -> list[tuple[int, int]]:
    return [(at, min(at + _TILE_NUMEL, stop)) for at in range(start, stop, _TILE_NUMEL)]


def save_pretrained(
    model: nn.Module, folder: str | os.PathLike[str], *, dtype: torch.dtype | None = None, max_file_bytes: int = 5 << 30
) -> None:
    """Writes the model's weights as safetensors that `transformers` loads, with its config if it has one.

    Collective if the model is sharded: every rank must see the folder, and writes its own slices. Tied parameters are
    written once, tiled linears whole. dtype: of the floating-point tensors; each parameter's own by default. Files
    appear under their final names when they are complete, the index last.
    """
    folder, view = Path(folder), view_of(model)
    tensors: dict[str, _Kind] = {}
    for parts, shape, own in whole_tensors(model).values():
        tensors.setdefault(parts[0].name, (dtype if dtype is not None and own.is_floating_point else own, shape))
    files = _split(tensors, max_file_bytes)
    first = view is None or view.is_first
    meet = (lambda what: None) if view is None else view.ranks.meet
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        with _complete(folder, files):
            for name, of_file in files.items():
                Writer(folder / f"{name}.partial", of_file).close()
    meet("save_pretrained")
    with _complete(folder, files), ExitStack() as stack:
        by_tensor: dict[str, Writer] = {}
        for name, of_file in files.items():
            writer = stack.enter_context(closing(Writer(folder / f"{name}.partial", of_file, create=False)))
            by_tensor |= dict.fromkeys(of_file, writer)
        _write_values(model, view, by_tensor)
    meet("save_pretrained")
    if first:
        _publish(model, folder, files)
    meet("save_pretrained")


def write_pretrained(
    folder: Path, tensors: Mapping[str, _Kind], values: Mapping[str, Source], max_file_bytes: int = 5 << 30
) -> None:
    """Writes safetensors from `values`, read tile by tile, as tensors of these dtypes and shapes. One process.

    As with `save_pretrained`, files appear under their final names when they are complete, and there is no config.
    """
    files = _split(tensors, max_file_bytes)
    folder.mkdir(parents=True, exist_ok=True)
    with _complete(folder, files):
        for name, of_file in files.items():
            with closing(Writer(folder / f"{name}.partial", of_file)) as writer:
                for tensor, (_, shape) in of_file.items():
                    for start, stop in _tiles(0, torch.Size(shape).numel()):
                        writer.write(tensor, start, values[tensor].read(start, stop))
    _publish(None, folder, files)


@contextmanager
def _complete(folder: Path, files: Mapping[str, Mapping[str, _Kind]]) -> Iterator[None]:
    """Inside, an OSError such as a full disk removes partial files and becomes an error with the needed bytes."""
    try:
        yield
    except OSError as error:
        needed = sum(torch.Size(s).numel() * kind.itemsize for each in files.values() for kind, s in each.values())
        for name in files:
            (folder / f"{name}.partial").unlink(missing_ok=True)
        raise PretrainedError(
            f"save_pretrained into {folder}: {error}; the weights take {needed:,} bytes, and {room(folder)}. "
            "Earlier files are unchanged: make room, or name another folder"
        ) from error


def _split(tensors: Mapping[str, _Kind], max_file_bytes: int) -> dict[str, dict[str, _Kind]]:
    """Returns file names with their tensors, filled in the given order up to `max_file_bytes` each."""
    groups: list[dict[str, _Kind]] = [{}]
    filled = 0
    for name, (kind, shape) in tensors.items():
        nbytes = torch.Size(shape).numel() * kind.itemsize
        if groups[-1] and filled + nbytes > max_file_bytes:
            groups.append({})
            filled = 0
        groups[-1][name] = (kind, shape)
        filled += nbytes
    if len(groups) == 1:
        return {SINGLE_NAME: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


@torch.no_grad()
def _write_values(model: nn.Module, view: ShardView | None, writers: Mapping[str, Writer]) -> None:
    laid = {name: _Laid(parts) for name, (parts, _, _) in whole_tensors(model).items()}
    first = view is None or view.is_first

    def put(name: str, start: int, values: Tensor) -> None:
        """Writes elements of the parameter `name`, from `start` on, to their places in the files."""
        for into, low, high in laid[name].pieces(start, start + values.numel()):
            part, values = values.tensor_split([high - low])
            writers[into].write(into, low, part)

    initialiser = Initialiser(model) if view is None else None
    for named in named_tensors(model):
        if initialiser is not None and isinstance(named.tensor, nn.Parameter):
            put(named.name, 0, initialiser.values(named.tensor).reshape(-1))
        elif first and (view is None or view.is_whole(named)):
            put(named.name, 0, named.tensor.detach().reshape(-1))
    if view is not None and view.ranks.replicate.rank == 0:  # no replica writes
        for slice_ in view.slices():
            for start, stop in _tiles(slice_.start, slice_.stop):
                put(slice_.name, start, view.parameter_values(slice_, start, stop))


def _publish(model: nn.Module | None, folder: Path, files: Mapping[str, Mapping[str, _Kind]]) -> None:
    """Renames the files, removes those of an earlier save, writes the index and the config."""
    for stale in (*folder.glob("model-*-of-*.safetensors"), folder / INDEX_NAME, folder / SINGLE_NAME):
        if stale.name not in files:
            stale.unlink(missing_ok=True)
    for name in files:
        os.replace(folder / f"{name}.partial", folder / name)
    config: Any = getattr(model, "config", None)
    if hasattr(config, "save_pretrained"):
        config = copy.deepcopy(config)
        config.architectures = [type(model).__name__]
        kinds = {kind for tensors in files.values() for kind, _ in tensors.values() if kind.is_floating_point}
        dtype = kinds.pop() if len(kinds) == 1 else getattr(model, "dtype", None)
        if dtype is not None:  # from_pretrained builds the model in it
            setattr(config, "dtype" if hasattr(config, "dtype") else "torch_dtype", dtype)
        config.save_pretrained(folder)
        generation: Any = getattr(model, "generation_config", None)
        if hasattr(generation, "save_pretrained"):
            generation.save_pretrained(folder)
    if len(files) > 1:
        total = sum(torch.Size(s).numel() * d.itemsize for ts in files.values() for d, s in ts.values())
        weight_map = {tensor: name for name, tensors in files.items() for tensor in tensors}
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2)
        temporary = folder / f"{INDEX_NAME}.partial"
        temporary.write_text(text)
        os.replace(temporary, folder / INDEX_NAME)
