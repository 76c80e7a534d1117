"""Reads and writes a checkpoint's files in torch.distributed.checkpoint's format, with one tensor alive at a time.

Not here: which tensors are written, and in which boxes (in plan.py). The stock writer keeps every tensor of a file
until the file ends, its `finish` leaves a moment without a manifest, and the stock reader reads a stored chunk again
for every box of it.

[Note: complete or absent]
Each save writes data files under names that no earlier save used, and only when all ranks have flushed theirs is the
manifest (`.metadata`) renamed over the previous one. Killed at any moment, the folder holds the previous checkpoint
whole, or the new one; stray data files are removed by the next save.
"""

from __future__ import annotations

import errno
import fcntl
import io
import mmap
import os
import pickle
import socket
import zipfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast
from zlib import crc32

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import filesystem as _stock
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorProperties
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from ..errors import CheckpointError

MANIFEST = ".metadata"
_SUFFIX = ".distcp"
_SUM = b"crc\0"  # behind the pickle of a manifest, where readers of pickles stop, and before its checksum
_BLOCK_BYTES = 8 << 20  # bytes of one write
_COPIED_BYTES = 1 << 20  # at once: another thread gets the interpreter in between


class StreamingWriter(dcp.FileSystemWriter):
    """Writes one file a rank. aliases: further name -> name of a tensor that the manifest lists under both."""

    def __init__(self, folder: Path, aliases: Mapping[str, str]) -> None:
        super().__init__(folder, single_file_per_rank=True, sync_files=True, thread_count=1)
        self._folder, self._aliases = folder, dict(aliases)

    def prepare_local_plan(self, plan: dcp.SavePlan) -> dcp.SavePlan:
        self._folder.mkdir(parents=True, exist_ok=True)
        return plan

    def write_data(self, plan: dcp.SavePlan, planner: dcp.SavePlanner) -> Future[list[WriteResult]]:
        """Resolves, writes and drops one item after another, in the plan's order."""
        name = f"{plan.storage_data.prefix}{self.save_id}{_SUFFIX}"
        path = self._folder / name
        results = []
        try:
            with _Uncached(path) as file:
                for item in plan.items:
                    offset = file.tell()
                    data = planner.resolve_data(item)
                    if isinstance(data, io.BytesIO):
                        file.write(data.getbuffer())
                    else:
                        torch.save(data, cast(Any, file))
                    length = file.tell() - offset
                    results.append(WriteResult(item.index, length, _stock._StorageInfo(name, offset, length)))
                    del data
                file.sync()
        except OSError as error:
            path.unlink(missing_ok=True)
            raise CheckpointError(f"cannot write {path}: {error}; make room. An earlier checkpoint is kept") from error
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Renames the manifest into place, then removes the data files that it does not list."""
        stored = {result.index: result.storage_data for of_rank in results for result in of_rank}
        names = {cast(Any, info).relative_path for info in stored.values()}
        if unseen := sorted(name for name in names if not (self._folder / name).is_file()):
            raise CheckpointError(
                f"{self._folder} is not one folder for all ranks: {len(unseen)} of {len(names)} files that they wrote, "
                f"such as {unseen[0]}, are not in that of {socket.gethostname()}, where the first rank is; save into a "
                "folder that all machines share. An earlier checkpoint there is kept"
            )
        for alias, name in self._aliases.items():
            if name in metadata.state_dict_metadata and alias not in metadata.state_dict_metadata:
                metadata.state_dict_metadata[alias] = metadata.state_dict_metadata[name]
                for index in [index for index in stored if index.fqn == name]:
                    stored[MetadataIndex(alias, index.offset, index.index)] = stored[index]
        metadata.storage_data = stored
        metadata.storage_meta = self.storage_meta()
        if hasattr(metadata, "version"):
            metadata.version = getattr(_stock, "CURRENT_DCP_VERSION", None)
        temporary = self._folder / f"{MANIFEST}.tmp"
        with open(temporary, "wb") as file:
            text = pickle.dumps(metadata)
            file.write(text + _SUM + crc32(text).to_bytes(4, "little"))
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self._folder / MANIFEST)
        directory = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        for path in self._folder.glob(f"*{_SUFFIX}"):
            if path.name not in names:
                path.unlink(missing_ok=True)


class _Uncached:
    """A new file, written sequentially, past the page cache if the filesystem supports it.

    Copying to the page cache takes more processor time than the rest of a checkpoint. A checkpoint in the background
    would take that time from training.
    """

    def __init__(self, path: Path) -> None:
        self._block = mmap.mmap(-1, _BLOCK_BYTES)  # whole pages: direct writes need aligned memory
        self._fd, self._direct = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), False
        with suppress(OSError):  # a filesystem without direct I/O
            self._past_the_cache(True)
        self._written = self._filled = 0  # bytes in the file, and in the block

    def __enter__(self) -> _Uncached:
        return self

    def __exit__(self, *failure: object) -> None:
        os.close(self._fd)

    def tell(self) -> int:
        return self._written + self._filled

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            part = left[: min(_BLOCK_BYTES - self._filled, _COPIED_BYTES)]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            left = left[len(part) :]
            if self._filled == _BLOCK_BYTES:
                self._put(_BLOCK_BYTES)
        return count

    def flush(self) -> None:
        """No-op: direct I/O writes whole blocks. `sync` writes the last one."""

    def sync(self) -> None:
        """Flushes the file to the disk, and ends it."""
        length = self.tell()
        self._put(-(-self._filled // mmap.PAGESIZE) * mmap.PAGESIZE)
        os.ftruncate(self._fd, length)
        os.fsync(self._fd)

    def _past_the_cache(self, direct: bool) -> None:
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
        self._direct = direct

    def _put(self, nbytes: int) -> None:
        with memoryview(self._block) as block:
            done = 0
            while done < nbytes:
                try:
                    done += os.write(self._fd, block[done:nbytes])
                except OSError as error:
                    if not self._direct or error.errno != errno.EINVAL:
                        raise
                    self._past_the_cache(False)  # a filesystem that accepts the flag and refuses the write
        self._written, self._filled = self._written + nbytes, 0


class StreamingReader(dcp.FileSystemReader):
    """Reads each stored tensor once, in file order, however many of its boxes are requested.

    An absent or damaged manifest, and files that are cut short, are found before any tensor is read. The error is kept
    in `failure` for the planner to raise, where torch.distributed.checkpoint takes it to every rank.
    """

    def __init__(self, folder: Path, *, verify: bool) -> None:
        super().__init__(folder)
        self._folder, self._verify = folder, verify
        self.failure: CheckpointError | None = None

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        try:
            metadata = _read_manifest(self._folder)
            _check_files(self._folder, metadata)
        except CheckpointError as error:
            self.failure = error
            metadata = Metadata({}, storage_data={})
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: dcp.LoadPlan, planner: dcp.LoadPlanner) -> Future[None]:
        wanted: dict[str, dict[int, list[ReadItem]]] = {}
        for item in plan.items:
            info = self.storage_data[item.storage_index]
            wanted.setdefault(info.relative_path, {}).setdefault(info.offset, []).append(item)
        for name, in_file in sorted(wanted.items()):
            with open(self._folder / name, "rb") as file:
                for _, items in sorted(in_file.items()):
                    self._read_one(file, items, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _read_one(self, file: Any, items: list[ReadItem], planner: dcp.LoadPlanner) -> None:
        info = self.storage_data[items[0].storage_index]
        file.seek(info.offset)
        read = io.BytesIO(file.read(info.length))
        stream: Any = self.transforms.transform_load_stream(items[0], info.transform_descriptors or (), read)
        if not stream.seekable():
            stream = io.BytesIO(stream.read(-1))
        try:
            if self._verify:
                _check_sums(stream)
            if items[0].type == LoadItemType.BYTE_IO:
                planner.load_bytes(items[0], stream)
                return
            stored = cast(Tensor, torch.load(stream, map_location="cpu", weights_only=True))
        except (RuntimeError, pickle.UnpicklingError, EOFError, zipfile.BadZipFile) as error:
            name, path = items[0].storage_index.fqn, self._folder / info.relative_path
            raise CheckpointError(f"{path}: {name} is damaged: {error}: copy the file again") from error
        for item in items:
            target = planner.resolve_tensor(item)
            target.copy_(narrowed(stored, item.storage_offsets, item.lengths))
            planner.commit_tensor(item, target)


def narrowed(tensor: Tensor, starts: Sequence[int], lengths: Sequence[int]) -> Tensor:
    """Returns the box of the tensor that begins at `starts`."""
    return tensor[tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))]


def _check_sums(stream: Any) -> None:
    """Raises zipfile.BadZipFile if a checksum differs. torch.save writes the checksums, but torch.load ignores them."""
    with zipfile.ZipFile(stream) as archive:
        wrong = archive.testzip()
    if wrong is not None:
        raise zipfile.BadZipFile(f"the checksum of its {wrong.split('/', 1)[-1]} is not what was written")
    stream.seek(0)


class _Unpickler(pickle.Unpickler):
    """Reads a manifest of torch 2.15 too, whose TensorProperties have a sixth item: strides, which no reader needs."""

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)
        return _Properties if found is TensorProperties else found


class _Properties(TensorProperties):
    def __setstate__(self, state: Any) -> None:
        try:
            super().__setstate__(state)
        except ValueError:
            super().__setstate__(state[:5])


def _read_manifest(folder: Path) -> Metadata:
    path = folder / MANIFEST
    try:
        text, known, checksum = (data := path.read_bytes())[:-8], data[-8:-4], data[-4:]
        if known == _SUM and checksum != crc32(text).to_bytes(4, "little"):
            raise ValueError("its checksum differs from the one in it")
        metadata = _Unpickler(io.BytesIO(data)).load()  # from a file, a damaged length would be allocated
    except FileNotFoundError as error:
        found = sorted(p.name for p in folder.iterdir())[:4] if folder.is_dir() else "no such folder"
        raise CheckpointError(
            f"{folder} holds no complete checkpoint: {MANIFEST} is missing (found: {found}). Load another folder"
        ) from error
    except Exception as error:  # a damaged pickle, or one of changed classes, may raise any
        raise CheckpointError(
            f"{path} is damaged, or was written by a newer torch than {torch.__version__}: {error!r}: copy it again, "
            "or load it with the torch that wrote it"
        ) from error
    if not isinstance(metadata, Metadata) or metadata.storage_data is None:
        raise CheckpointError(f"{path} is not a manifest of torch.distributed.checkpoint: load another folder")
    return metadata


def _check_files(folder: Path, metadata: Metadata) -> None:
    """Raises CheckpointError for a file that is missing, or shorter than the manifest says."""
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in sorted(ends.items()):
        path = folder / name
        if not path.is_file():
            raise CheckpointError(f"{path} is missing, and {MANIFEST} of the same folder names it: copy it again")
        size = path.stat().st_size
        if size < end:
            raise CheckpointError(f"{path} is cut short: it has {size} bytes of {end}: copy it again")
