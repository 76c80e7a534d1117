"""`merge_adapter`: a LoRA adapter of PEFT's, added to the weights of a folder, from file to file.

One process, no model: weights are read, changed and written tile by tile, so memory does not grow with the model. Owns
which adapters it can add; all others are PEFT's own merge_and_unload's. LoRA: Hu et al. 2021, section 4.1.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from zero_core.checkpoint.pretrained import write_pretrained
from zero_core.checkpoint.safetensors import Entry, Reader, open_index

from .config import ConfigError

__all__ = ["merge_adapter"]

_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_NOT_HERE = {  # keys of adapter_config.json with which a weight is not W + scale B A, and what they may be
    "bias": ("none", None),
    "use_dora": (False, None),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "modules_to_save": ([], None),
    "lora_bias": (False, None),
    "trainable_token_indices": ([], None),
    "target_parameters": ([], None),
    "alora_invocation_tokens": ([], None),
}


def merge_adapter(
    base: str | Path, adapter: str | Path, out: str | Path, *, max_file_bytes: int = 5 << 30
) -> tuple[str, ...]:
    """Writes the model of `base` with the LoRA adapter of `adapter` added: ``W + scale · B A``, summed in fp32.

    base: a folder with safetensors and config.json. adapter: a folder that PEFT wrote. out: a new or empty folder; it
    gets the weights in the dtypes of `base`, and every other file of `base`, as its tokenizer, and of `adapter` where
    both have one. An adapter that was trained beside a quantised base is added to the weights before quantisation.

    Returns the names of the weights that changed. Raises ConfigError for an adapter that is not plain LoRA on linear
    layers, a weight that the base lacks or has in another shape, and an `out` with files; PretrainedError for damaged
    files and a full disk, and then nothing is left in `out`.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out)
    if not (base / "config.json").is_file():
        raise ConfigError(
            f"{base} has no config.json: name the folder of the model that the adapter was trained beside"
        )
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"{out} has files already: name a new folder")
    scale, transposed = _scale(adapter)
    entries, reader = open_index(base), Reader()
    changes = _changes(adapter, entries, reader, scale, transposed)
    kinds = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    values = {name: _Merged(reader, entry, changes.get(name)) for name, entry in entries.items()}
    write_pretrained(out, kinds, values, max_file_bytes)
    for folder in (base, adapter):
        for file in folder.iterdir():
            ours = file.suffix in (".safetensors", ".bin", ".gguf", ".pt") or file.name.endswith(".index.json")
            if file.is_file() and not ours and file.name not in (_CONFIG, "README.md"):
                shutil.copyfile(file, out / file.name)
    return tuple(changes)


def _scale(adapter: Path) -> tuple[float, bool]:
    """What B A is multiplied with, and whether the weights are laid out (inputs, outputs), as GPT-2's."""
    try:
        config: dict[str, Any] = json.loads((adapter / _CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{adapter} holds no adapter of PEFT's: {_CONFIG}: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{adapter} is of the type {config.get('peft_type')}, and only LORA is merged here: {_OTHERS}"
        )
    for key, plain in _NOT_HERE.items():
        if key in config and config[key] not in plain:
            raise ConfigError(f"{adapter} has {key}={config[key]}, which is not merged here: {_OTHERS}")
    rank, alpha = config["r"], config["lora_alpha"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), bool(config.get("fan_in_fan_out"))


_OTHERS = "load base and adapter with PEFT, and call merge_and_unload() and save_pretrained()"


@dataclass(frozen=True)
class _Change:
    """What is added to a weight (rows, columns): left[rows] @ right, both fp32."""

    left: Tensor  # (rows, rank)
    right: Tensor  # (rank, columns)


def _changes(
    adapter: Path, entries: Mapping[str, Entry], reader: Reader, scale: float, transposed: bool
) -> dict[str, _Change]:
    """By the name of the weight in the base."""
    if not (adapter / _WEIGHTS).is_file():
        raise ConfigError(f"{adapter} has no {_WEIGHTS}: save the adapter with save_pretrained")
    found: dict[str, dict[str, Tensor]] = {}
    for name, entry in open_index(adapter / _WEIGHTS).items():
        module, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B"):
            raise ConfigError(f"{adapter}: {name} is no A or B of a linear layer, and is not merged here: {_OTHERS}")
        values = reader.read(entry, 0, entry.numel).view(entry.shape)
        found.setdefault(f"{module}.weight", {})[part] = values.float()
    changes = {}
    for name, parts in found.items():
        if set(parts) != {"lora_A", "lora_B"}:
            raise ConfigError(f"{adapter} has only {', '.join(parts)} of {name}: it is damaged")
        if name not in entries:
            raise ConfigError(
                f"{adapter} adapts {name}, which the files of the base do not name so: is it another model? If "
                f"transformers renames or fuses this model's weights, {_OTHERS}"
            )
        left, right = parts["lora_B"] * scale, parts["lora_A"]
        if transposed:
            left, right = right.T.contiguous(), left.T.contiguous()
        shape = (left.shape[0], right.shape[1])
        if entries[name].shape != shape:
            raise ConfigError(f"{adapter} adds {shape} to {name}, which is {entries[name].shape}: is it another model?")
        changes[name] = _Change(left, right)
    return changes


@dataclass(frozen=True)
class _Merged:
    """A weight of the base with its change as a Source."""

    reader: Reader
    entry: Entry
    change: _Change | None

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major weight, in the dtype of the base."""
        values = self.reader.read(self.entry, start, stop)
        if self.change is None or start == stop:
            return values
        columns = self.entry.shape[1]
        first, last = start // columns, -(-stop // columns)
        added = (self.change.left[first:last] @ self.change.right).view(-1)
        offset = start - first * columns
        return (values.float() + added[offset : offset + stop - start]).to(values.dtype)
