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
# Keys of adapter_config.json that may have any value. All others have to be off, so a key of a later PEFT is refused.
_READ = frozenset({"peft_type", "r", "lora_alpha", "use_rslora", "fan_in_fan_out", "init_lora_weights"})
_NEEDLESS = frozenset(
    {
        # which weights are adapted: their names are in the file
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "ensure_weight_tying"),
        # how A and B began, which init_lora_weights decides, and how they were trained
        *("eva_config", "corda_config", "loftq_config", "lora_ga_config", "lora_dropout", "inference_mode"),
        # the adapter's task, and its author
        *("base_model_name_or_path", "revision", "task_type", "auto_mapping", "peft_version", "merge_weights"),
        # a detail of something that is off: use_qalora, megatron_config
        *("qalora_group_size", "megatron_core"),
    }
)
_BASE_UNCHANGED = ("true", "false", "none", "gaussian", "orthogonal", "eva", "mica")  # init_lora_weights
_CHANGED_AGAIN = ("pissa", "olora")  # PEFT repeats these to the last bit when it loads the adapter; not the others


def merge_adapter(
    base: str | Path, adapter: str | Path, out: str | Path, *, max_file_bytes: int = 5 << 30
) -> tuple[str, ...]:
    """Writes the model of `base` with the LoRA adapter of `adapter` added: ``W + scale · B A``, summed in fp32.

    base: a folder with safetensors and config.json. adapter: a folder that PEFT wrote. out: a new or empty folder; it
    gets the weights in the dtypes of `base`, and every other file of `base`, as its tokenizer, and of `adapter` where
    both have one. An adapter that was trained beside a quantised base is added to the weights before quantisation.

    Returns the names of the weights that changed. Raises ConfigError for an adapter that is not plain LoRA on linear
    layers, or whose beginning changed the base, as PiSSA's does; a weight that the base lacks or has in another shape;
    and an `out` with files. Raises PretrainedError for damaged files and a full disk; then nothing is left in `out`.
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
    for key, value in config.items():
        if value and key not in _READ | _NEEDLESS and (key, value) != ("bias", "none"):
            raise ConfigError(f"{adapter} has {key}={value}, which is not merged here: {_OTHERS}")
    init = str(config.get(key := "init_lora_weights", True)).lower()
    if init not in _BASE_UNCHANGED:
        raise ConfigError(
            f"{adapter} has {key}={init}, which changed the weights beside which the adapter was trained, "
            f"and those of the base are as they were: {_OTHERS if init in _CHANGED_AGAIN else _TRAINED}"
        )
    rank, alpha = config["r"], config["lora_alpha"]
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank), bool(config.get("fan_in_fan_out"))


_OTHERS = "load base and adapter with PEFT, and call merge_and_unload() and save_pretrained()"
_TRAINED = (
    "PEFT does not change the base in the same way again. Call merge_and_unload() and save_pretrained() on the model "
    "that was trained; or, unless it is loftq, save the adapter with PEFT's path_initial_model_for_weight_conversion, "
    "and merge that, which is plain LoRA"
)


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
