"""One file that torch.save wrote for DeepSpeed: its plain data, and where in it each tensor lies.

Owns what may be in such a file. Executes nothing of it and reads no tensor: `Stored.source` does, a slice at a time.
"""

from __future__ import annotations

import pickle
import struct
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from zero_core.building.replay import Source
from zero_core.checkpoint.safetensors import Entry, Reader
from zero_core.errors import CheckpointError, ConfigError

__all__ = ["FilesError", "Stored", "read_plain"]

_DEEPSPEED = (  # the classes of DeepSpeed's own that its checkpoints hold, each read as its plain attributes
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)
_DATA_OFFSET_BYTES = 26  # in a record's header: the lengths of its name and of its extra field, then these two


class FilesError(ConfigError, CheckpointError):
    """Files of DeepSpeed's that cannot be read, or that do not make a whole checkpoint."""


@dataclass(frozen=True)
class Stored:
    """A tensor in a file. numel elements lie from `entry` on, with these strides."""

    entry: Entry
    stride: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def numel(self) -> int:
        return self.entry.numel

    @property
    def extent(self) -> int:
        """Elements of the file from the first one to the last."""
        steps = ((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return 1 + sum(steps) if self.numel else 0

    def source(self, reader: Reader) -> Source:
        return _Whole(self, reader)

    def read(self, reader: Reader) -> Tensor:
        return self.source(reader).read(0, self.numel).view(self.shape)


@dataclass(frozen=True)
class _Whole:
    """A stored tensor's elements in row-major order."""

    stored: Stored
    reader: Reader

    def read(self, start: int, stop: int) -> Tensor:
        entry, stride = self.stored.entry, self.stored.stride
        if torch.empty_strided(entry.shape, stride, device="meta").is_contiguous():
            return self.reader.read(entry, start, stop)
        extent = self.stored.extent
        laid = self.reader.read(Entry(entry.path, entry.dtype, (extent,), entry.start_bytes), 0, extent)
        return laid.as_strided(entry.shape, stride).reshape(-1)[start:stop].clone()


class _Inert:
    """Stands for an object of a class that is not loaded: takes what the pickle gives it and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Number(int):
    """Stands for a member of an enum of numbers."""


def read_plain(path: Path, inert: Iterable[str] = ()) -> Any:
    """Returns what the file holds, with a `Stored` for each tensor and a dict for each object of a known class.

    inert: full names of further classes whose objects become dicts of their attributes. Nothing of them is executed.
    Raises FilesError for a file that is cut short or of another format, and for one that wants to call anything else.
    """
    names = {*_DEEPSPEED, *inert}
    kinds: list[Any] = [(type(n, (_Number if n.endswith("Enum") else _Inert,), {}), n) for n in sorted(names)]
    records = _records(path)
    try:
        foreign = sorted({*get_unsafe_globals_in_checkpoint(path)} - names)
        if foreign:
            raise _refusal(path, ", ".join(foreign))
        with safe_globals(kinds), FakeTensorMode():
            loaded = torch.load(path, weights_only=True)
    except pickle.UnpicklingError as error:
        raise _refusal(path, str(error).splitlines()[0]) from error
    except FilesError:
        raise
    except Exception as error:  # a damaged pickle raises whatever its bytes lead to
        raise FilesError(f"{path} is damaged: {type(error).__name__}: {error}. Copy it anew") from error
    return _plain(loaded, path, records)


def _refusal(path: Path, wanted: str) -> FilesError:
    return FilesError(
        f"{path} wants to call {wanted}, and nothing of it was executed. A checkpoint of DeepSpeed needs no such call. "
        "If you know it as a class whose objects were in your client_state, convert the checkpoint with "
        "zero-hf convert FOLDER OUT --inert module.Class, which reads its objects as dicts, still without executing "
        "anything; for a Trainer's checkpoint-N, OUT is checkpoint-N/zero"
    )


def _records(path: Path) -> dict[int, int]:
    """Length by start, in bytes, of each record of tensor values in the file."""
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            found = {}
            for info in archive.infolist():
                if "/data/" not in info.filename:
                    continue
                if info.compress_type != zipfile.ZIP_STORED:
                    raise FilesError(f"{path}: {info.filename} is compressed, which torch.save never does")
                file.seek(info.header_offset + _DATA_OFFSET_BYTES)
                found[info.header_offset + _DATA_OFFSET_BYTES + 4 + sum(struct.unpack("<HH", file.read(4)))] = (
                    info.file_size
                )
            return found
    except (zipfile.BadZipFile, struct.error) as error:
        with open(path, "rb") as file:
            cut = file.read(4) == b"PK\x03\x04"
        if cut:
            raise FilesError(f"{path} is cut short or damaged ({path.stat().st_size:,} bytes): copy it anew") from error
        raise FilesError(
            f"{path} is not in torch.save's format of today (a zip archive). Save the checkpoint anew with a current "
            "DeepSpeed, without a writer of its own in its section checkpoint"
        ) from error


def _plain(value: Any, path: Path, records: dict[int, int]) -> Any:
    if isinstance(value, Tensor):
        return _stored(value, path, records)
    if isinstance(value, dict):
        return {key: _plain(each, path, records) for key, each in value.items()}
    if isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        return type(value)(_plain(each, path, records) for each in value)
    if isinstance(value, _Number):
        return int(value)
    if isinstance(value, _Inert):
        return {key: _plain(each, path, records) for key, each in vars(value).items() if key != "arguments" or each}
    return value


def _stored(tensor: Tensor, path: Path, records: dict[int, int]) -> Stored:
    start = int(getattr(tensor.untyped_storage(), "_checkpoint_offset", -1))
    skipped = int(tensor.storage_offset()) * tensor.element_size()
    found = Stored(Entry(path, tensor.dtype, tuple(tensor.shape), start + skipped), tuple(tensor.stride()))
    if found.extent and skipped + found.extent * tensor.element_size() > records.get(start, 0):
        raise FilesError(f"{path} is damaged: a tensor of shape {found.shape} is longer than its record. Copy it anew")
    return found
