"""Reads and writes the safetensors format: slices straight into a buffer, and files in parts by several ranks.

Owns bytes and their checks. Not here: which parameter a tensor belongs to (in pretrained.py). Format: 8 bytes of
little-endian header length, a JSON header {name: {dtype, shape, data_offsets}}, then the tensors, row-major, without
gaps (https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import ctypes
import io
import json
import math
import os
import shutil
import warnings
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import PretrainedError

DTYPES: dict[str, torch.dtype] = {
    code: getattr(torch, name)
    for code, name in (
        *(("F64", "float64"), ("F32", "float32"), ("F16", "float16"), ("BF16", "bfloat16")),
        *(("F8_E4M3", "float8_e4m3fn"), ("F8_E5M2", "float8_e5m2"), ("F8_E4M3FNUZ", "float8_e4m3fnuz")),
        *(("F8_E5M2FNUZ", "float8_e5m2fnuz"), ("F8_E8M0", "float8_e8m0fnu"), ("F4", "float4_e2m1fn_x2")),
        *(("C64", "complex64"), ("I64", "int64"), ("I32", "int32"), ("I16", "int16"), ("I8", "int8")),
        *(("U64", "uint64"), ("U32", "uint32"), ("U16", "uint16"), ("U8", "uint8"), ("BOOL", "bool")),
    )
}
_CODES = {dtype: code for code, dtype in DTYPES.items()}
_PACKED = {torch.float4_e2m1fn_x2: 2}  # values of an element, which the last dimension of a file's shape counts
_HEADER_LIMIT_BYTES = 100 << 20  # the reference implementation's own limit
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"


@dataclass(frozen=True)
class Entry:
    """One tensor of one file. `start_bytes` is absolute in the file."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start_bytes: int

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def memory_of(tensor: Tensor) -> memoryview:
    """Returns a writable view of the bytes of a contiguous CPU tensor."""
    assert tensor.is_contiguous() and tensor.device.type == "cpu"
    nbytes = tensor.numel() * tensor.element_size()
    return memoryview((ctypes.c_char * nbytes).from_address(tensor.data_ptr())).cast("B") if nbytes else memoryview(b"")


def read_header(path: Path) -> dict[str, Entry]:
    """Returns the tensors of one file. Raises PretrainedError if the header does not fit the file."""
    size = path.stat().st_size
    with open(path, "rb") as file:
        prefix = file.read(8)
        length = int.from_bytes(prefix, "little")
        if len(prefix) < 8 or length > min(size - 8, _HEADER_LIMIT_BYTES):
            raise PretrainedError(
                f"{path} is no safetensors file, or is cut short: it has {size} bytes, and its header should "
                f"have {length}: fetch it again"
            )
        try:
            header: dict[str, Any] = json.loads(file.read(length))
            entries = {n: _entry(path, n, e, 8 + length) for n, e in header.items() if n != "__metadata__"}
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise PretrainedError(f"{path}: the header is damaged: {error!r}: fetch it again") from error
    for name, entry in entries.items():
        if entry.start_bytes + entry.nbytes > size:
            wanted = entry.start_bytes + entry.nbytes
            raise PretrainedError(f"{path} is cut short: {size} bytes, {name!r} ends at {wanted}: fetch it again")
    return entries


def _entry(path: Path, name: str, fields: Mapping[str, Any], data_start: int) -> Entry:
    begin, end = fields["data_offsets"]
    if fields["dtype"] not in DTYPES:
        raise PretrainedError(f"{path}: {name!r} has unknown dtype {fields['dtype']}: cast it to one of {[*DTYPES]}")
    dtype, shape = DTYPES[fields["dtype"]], list(fields["shape"])
    if dtype in _PACKED:
        shape[-1] //= _PACKED[dtype]
    entry = Entry(path, dtype, tuple(shape), data_start + begin)
    if begin < 0 or end - begin != entry.nbytes:
        raise ValueError(f"{name}: shape {entry.shape} is {entry.nbytes} bytes, data_offsets span {end - begin}")
    return entry


def open_index(folder: str | os.PathLike[str]) -> dict[str, Entry]:
    """Returns all tensors, by name, of a Hugging Face folder (model.safetensors, a sharded index, or any) or one file.

    Raises PretrainedError naming the files of the index that the folder lacks, and the tensors that its files lack.
    """
    folder = Path(folder)
    if folder.is_file():
        return read_header(folder)
    index_path, single = folder / INDEX_NAME, folder / SINGLE_NAME
    if single.is_file():
        if index_path.is_file():
            warnings.warn(
                f"{folder} has {SINGLE_NAME} and {INDEX_NAME}, and weights are read from the first, as transformers "
                "does: delete the one that an earlier save left",
                stacklevel=3,
            )
        return read_header(single)
    if index_path.is_file():
        return _indexed(folder, index_path)
    merged: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for name, entry in read_header(path).items():
            if name in merged:
                raise PretrainedError(
                    f"{name} is both in {merged[name].path.name} and in {path.name}, without an index: name one file; "
                    "or, if ranks have written a part of it each, as torch's HuggingFaceStorageWriter does, join them "
                    "with consolidate_safetensors_files of torch.distributed.checkpoint, which torch 2.8 lacks"
                )
            merged[name] = entry
    if not merged:
        found = sorted(p.name for p in folder.iterdir())[:8] if folder.is_dir() else "no such folder"
        raise PretrainedError(
            f"{folder} holds no *.safetensors (found: {found}): download or save them again. Or make them with "
            "save_pretrained() of transformers, on a machine with memory for the whole model"
        )
    return merged


def _indexed(folder: Path, index_path: Path) -> dict[str, Entry]:
    """Returns the tensors that an index lists."""
    try:
        pairs = json.loads(index_path.read_text(), object_pairs_hook=list)
        listed = next(value for key, value in pairs if key == "weight_map")
        weight_map: dict[str, str] = dict(listed)
    except (ValueError, TypeError, StopIteration) as error:
        raise PretrainedError(f"{index_path} is damaged, or no index: {error!r}; fetch it again") from error
    if twice := [name for name, file in listed if weight_map[name] != file]:
        raise PretrainedError(f"{index_path} names two files for the tensor {twice[0]!r}: fetch it again")
    files = sorted(set(weight_map.values()))
    if absent := [f for f in files if Path(f).name != f or not (folder / f).is_file()]:
        raise PretrainedError(
            f"{index_path} names {', '.join(absent)}, no file in its folder: copy the file there, "
            "and name it in the index without a folder"
        )
    headers = {f: read_header(folder / f) for f in files}
    if lost := [n for n, f in weight_map.items() if n not in headers[f]]:
        raise PretrainedError(f"{index_path} lists tensors that its files lack, {lost[:8]}: fetch all files again")
    return {n: headers[f][n] for n, f in weight_map.items()}


class Reader:
    """Open files of an index; every read is one `readinto` of exactly the bytes asked for."""

    def __init__(self) -> None:
        self._files: dict[Path, io.FileIO] = {}
        self._finalizer = weakref.finalize(self, _close_all, self._files)  # a deferred model's reader has no `with`
        self.read_bytes = 0  # so far, headers apart

    def read(self, entry: Entry, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major tensor, (stop - start,) in the file's dtype, on the CPU."""
        if not 0 <= start <= stop <= entry.numel:
            raise ValueError(f"range [{start}, {stop}) of {entry.numel} elements")
        values = torch.empty(stop - start, dtype=entry.dtype, device="cpu")
        buffer = memory_of(values)
        if entry.path not in self._files:
            self._files[entry.path] = open(entry.path, "rb", buffering=0)
        file, done = self._files[entry.path], 0
        file.seek(entry.start_bytes + start * entry.dtype.itemsize)
        while done < len(buffer):  # more than once only if interrupted, or above the kernel's 2 GiB
            got = file.readinto(buffer[done:])
            if not got:
                raise PretrainedError(
                    f"{entry.path} ended at byte {file.tell()}, after {done} of {len(buffer)} bytes of elements "
                    f"[{start}, {stop}): fetch it again"
                )
            done += got
        self.read_bytes += done
        return values


def _close_all(files: dict[Path, io.FileIO]) -> None:
    for file in files.values():
        file.close()
    files.clear()


def room(folder: Path) -> str:
    """Returns text about the free bytes on a folder's disk, for an error."""
    try:
        return f"{shutil.disk_usage(folder).free:,} bytes are free there"
    except OSError:
        return "the folder cannot be opened"


def layout_entries(
    path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> tuple[bytes, dict[str, Entry]]:
    """Returns a new file's header and the place of each tensor (dtype, shape), the first at a multiple of 64 bytes."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        if dtype not in _CODES:
            raise PretrainedError(f"{name} has dtype {dtype}, which safetensors files cannot hold")
        nbytes = math.prod(shape) * dtype.itemsize
        listed = [*shape[:-1], shape[-1] * _PACKED[dtype]] if dtype in _PACKED else list(shape)
        header[name] = {"dtype": _CODES[dtype], "shape": listed, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % 64)
    data_start = 8 + len(text)
    entries = {n: _entry(path, n, header[n], data_start) for n in tensors}
    return len(text).to_bytes(8, "little") + text, entries


class Writer:
    """One new file, written in any order by any number of processes that share the filesystem.

    create=True, on one of them: writes the header and sets the size. The others open it after that.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]], *, create: bool = True
    ) -> None:
        header, self.entries = layout_entries(path, tensors)
        flags = os.O_WRONLY | (os.O_CREAT | os.O_TRUNC if create else 0)
        self.path = path
        self._descriptor = os.open(path, flags, 0o644)
        if create:
            self._write(memoryview(header), 0)
            end = max((e.start_bytes + e.nbytes for e in self.entries.values()), default=len(header))
            os.ftruncate(self._descriptor, end)

    def write(self, name: str, start: int, values: Tensor) -> None:
        """Writes elements [start, start + len(values)) of the tensor, converted to its dtype."""
        entry = self.entries[name]
        values = values.detach().resolve_conj().resolve_neg()  # files hold no flags for either
        values = values.reshape(-1).to(device="cpu", dtype=entry.dtype).contiguous()
        if start + values.numel() > entry.numel:
            raise ValueError(f"{name}: elements [{start}, {start + values.numel()}) of {entry.numel}")
        self._write(memory_of(values), entry.start_bytes + start * entry.dtype.itemsize)

    def _write(self, data: memoryview, offset: int) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._descriptor, data[done:], offset + done)

    def close(self) -> None:
        """Flushes the file to the disk and closes it."""
        os.fsync(self._descriptor)
        os.close(self._descriptor)
