"""Reads one file that torch.save wrote for DeepSpeed: plain data, and tensors mapped from it.

Owns the list of classes that such a file may contain. Executes no code from it.
"""

from __future__ import annotations

import zipfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals
from torch.utils._pytree import tree_leaves, tree_map

from zero_core.errors import CheckpointError, ConfigError

_DEEPSPEED = (  # the classes of DeepSpeed's own that its checkpoints hold, each read as its plain attributes
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaleConfig",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
)


class FilesError(ConfigError, CheckpointError):
    """Files of DeepSpeed's that cannot be read, or that do not make a whole checkpoint."""


class _Inert:
    """A stand-in for an object of a class that is not loaded: accepts the pickle's arguments and does nothing."""

    def __init__(self, *arguments: Any) -> None:
        self.arguments = arguments

    def __setstate__(self, state: Any) -> None:
        self.__dict__.update(state if isinstance(state, dict) else {"state": state})


class _Number(int):
    """A stand-in for a member of an enum of numbers."""


def read_plain(path: Path, inert: Iterable[str] = ()) -> Any:
    """Returns the file's content: tensors mapped into memory, and a dict for each object of a known class.

    inert: full names of further classes whose objects become dicts of their attributes. None of their code is executed.
    Raises FilesError for a file that is cut short or of another format, and for one that wants to call anything else.
    """
    names = {*_DEEPSPEED, *inert}
    kinds: list[Any] = [(type(n, (_Number if n.endswith("Enum") else _Inert,), {}), n) for n in sorted(names)]
    try:
        with zipfile.ZipFile(path) as archive:
            stored = [each.file_size for each in archive.infolist() if each.compress_type == zipfile.ZIP_STORED]
        if foreign := sorted({*get_unsafe_globals_in_checkpoint(path)} - names):
            raise FilesError(
                f"{path} wants to call {', '.join(foreign)}. No code was executed. DeepSpeed itself saves no such "
                "calls: do not use the file. But if these are classes of your own, saved in client_state, run zero-hf "
                "convert FOLDER OUT --inert module.Class: it reads their objects as dicts. FOLDER is the checkpoint. "
                "For a Trainer, FOLDER is checkpoint-N, and OUT is checkpoint-N/zero"
            )
        with safe_globals(kinds):
            loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        found = tree_map(_plain, loaded)
        storages = [each.untyped_storage() for each in tree_leaves(found) if isinstance(each, Tensor) and each.numel()]
        if Counter({each.data_ptr(): each.nbytes() for each in storages}.values()) - Counter(stored):
            raise ValueError("a tensor is longer than its record")
        return found
    except FilesError:
        raise
    except Exception as error:  # a damaged file raises whatever its bytes lead to
        what = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        raise FilesError(
            f"{path} is cut short, damaged or not as torch.save writes it ({what}). No code was executed. Copy it "
            "again, or save it again with a current DeepSpeed and its default checkpoint writer"
        ) from error


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, _Inert):
        return tree_map(_plain, {name: each for name, each in vars(leaf).items() if name != "arguments" or each})
    return int(leaf) if isinstance(leaf, _Number) else leaf
