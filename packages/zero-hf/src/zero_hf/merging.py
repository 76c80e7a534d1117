"""Adds a LoRA adapter of PEFT to the weights of a folder, from file to file, and names a model's adapters.

One process, no model: weights are read, changed and written tile by tile, so memory does not grow with the model. Other
kinds of adapters need PEFT's own merge_and_unload. LoRA: Hu et al. 2021, section 4.1. PiSSA (Meng et al. 2024) and
OLoRA (Büyükakyüz 2024) begin by changing the base: PEFT merges these, one matrix at a time.
"""

from __future__ import annotations

import json
import math
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from zero_core.checkpoint.pretrained import FileValues, write_pretrained
from zero_core.checkpoint.safetensors import Entry, Reader, open_index
from zero_core.model.parameter_names import Part

from .config import ConfigError

_PREFIX = "base_model.model."
_CONFIG, _WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# Keys of adapter_config.json that may have any value. All others have to be off, so a key of a later PEFT is refused.
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
_FORMULA = ("r", "lora_alpha", "use_rslora", "fan_in_fan_out", "init_lora_weights")


def merge_adapter(
    base: str | Path, adapter: str | Path, out: str | Path, *, max_file_bytes: int = 5 << 30
) -> tuple[str, ...]:
    """Writes the model of `base` with the LoRA adapter of `adapter` added: ``W + scale · B A``, summed in fp32; for
    PiSSA and OLoRA the weights as PEFT merges them, which needs PEFT.

    base: a folder with safetensors and config.json. adapter: a folder that PEFT wrote. out: a new or empty folder; it
    gets the weights in the dtypes of `base`, and every other file of `base`, as its tokenizer, and of `adapter` where
    both have one. An adapter that was trained beside a quantised base is added to the weights before quantisation.

    Returns the names of the weights that changed. Raises ConfigError for an adapter that is not plain LoRA on linear
    layers, or whose initialisation changed the base in a way that PEFT does not repeat; for a weight that the base
    lacks or has in another shape; and for an `out` with files. Raises PretrainedError for damaged files and a full
    disk. Nothing is then left in `out`.
    """
    base, adapter, out = Path(base), Path(adapter), Path(out)
    if not (base / "config.json").is_file():
        raise ConfigError(f"the base {base} has no config.json: name the folder of the adapter's base model")
    if out.is_dir() and any(out.iterdir()):
        raise ConfigError(f"the output folder {out} has files already: name a new folder")
    config = _config(adapter)
    entries, reader = open_index(base), Reader()
    changes = _changes(adapter, entries, reader, config)
    kinds = {name: (entry.dtype, entry.shape) for name, entry in entries.items()}
    merged: Any = partial(_MergedByPeft, config=config) if config["init_lora_weights"] in _CHANGED_AGAIN else _Merged
    values = {n: FileValues([Part(n, 0, e.numel)], reader, entries) for n, e in entries.items()}
    values |= {name: merged(reader, entries[name], change) for name, change in changes.items()}
    write_pretrained(out, kinds, values, max_file_bytes)
    for folder in (base, adapter):
        for file in folder.iterdir():
            ours = file.suffix in (".safetensors", ".bin", ".gguf", ".pt") or file.name.endswith(".index.json")
            if file.is_file() and not ours and file.name not in (_CONFIG, "README.md"):
                shutil.copyfile(file, out / file.name)
    return tuple(changes)


def _config(adapter: Path) -> dict[str, Any]:
    """Returns the keys of adapter_config.json that the sum depends on."""
    try:
        config: dict[str, Any] = json.loads((adapter / _CONFIG).read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{adapter} holds no adapter of PEFT's: {_CONFIG}: {error}") from error
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{adapter} is of type {config.get('peft_type')}, and only LORA is merged here: {_OTHERS}")
    for key, value in config.items():
        if value and key not in {"peft_type", *_FORMULA} | _NEEDLESS and (key, value) != ("bias", "none"):
            raise ConfigError(f"{adapter} has {key}={value}, which merge_adapter does not support: {_OTHERS}")
    init = str(config.get(key := "init_lora_weights", True)).lower()
    if init not in _BASE_UNCHANGED + _CHANGED_AGAIN:
        raise ConfigError(
            f"{adapter} has {key}={init}. For this, PEFT changed the base weights before training, but the base folder "
            "has the original ones. Call merge_and_unload() and save_pretrained() on the trained PEFT model"
            f"{'' if init == 'loftq' else _AS_LORA}"
        )
    return {**{name: config.get(name, False) for name in _FORMULA}, key: init}


_OTHERS = "load base and adapter with PEFT, and call merge_and_unload() and save_pretrained()"
_AS_LORA = ". Or save the adapter as plain LoRA, with PEFT's path_initial_model_for_weight_conversion, and merge it"


@dataclass(frozen=True)
class _Change:
    """The sum that is added to a weight (rows, columns): left[rows] @ right, both fp32."""

    left: Tensor  # (rows, rank)
    right: Tensor  # (rank, columns)
    parts: Mapping[str, Tensor]  # lora_A and lora_B, fp32


def _changes(
    adapter: Path, entries: Mapping[str, Entry], reader: Reader, config: Mapping[str, Any]
) -> dict[str, _Change]:
    """Returns the changes by the name of the weight in the base."""
    scale = config["lora_alpha"] / (math.sqrt(config["r"]) if config["use_rslora"] else config["r"])
    if not (adapter / _WEIGHTS).is_file():
        raise ConfigError(f"{adapter} has no {_WEIGHTS}: save the adapter with save_pretrained")
    found: dict[str, dict[str, Tensor]] = {}
    for name, entry in open_index(adapter / _WEIGHTS).items():
        module, _, part = name.removeprefix(_PREFIX).removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B"):
            raise ConfigError(f"{adapter}: {name} is not A or B of a linear layer, and cannot be merged: {_OTHERS}")
        values = reader.read(entry, 0, entry.numel).view(entry.shape)
        found.setdefault(f"{module}.weight", {})[part] = values.float()
    changes = {}
    for name, parts in found.items():
        if set(parts) != {"lora_A", "lora_B"}:
            raise ConfigError(f"{adapter} has only {', '.join(parts)} of {name}: the adapter is damaged")
        if name not in entries:
            raise ConfigError(
                f"{adapter} adapts {name}, which the base folder lacks: name the folder of the base model that "
                f"the adapter was trained on. If transformers renames or fuses this model's weights, {_OTHERS}"
            )
        left, right = parts["lora_B"] * scale, parts["lora_A"]
        if config["fan_in_fan_out"]:  # weights are laid out (inputs, outputs), as GPT-2's
            left, right = right.T.contiguous(), left.T.contiguous()
        shape = (left.shape[0], right.shape[1])
        if entries[name].shape != shape:
            raise ConfigError(
                f"{adapter} adds a matrix of shape {shape} to {name}, which has shape {entries[name].shape}: name the "
                "folder of the base model that the adapter was trained on"
            )
        changes[name] = _Change(left, right, parts)
    return changes


@dataclass(frozen=True)
class _Merged:
    """A weight of the base with its change as a Source."""

    reader: Reader
    entry: Entry
    change: _Change

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major weight, in the dtype of the base."""
        values = self.reader.read(self.entry, start, stop)
        columns = self.entry.shape[1]
        first, last = start // columns, -(-stop // columns)
        added = (self.change.left[first:last] @ self.change.right).view(-1)
        offset = start - first * columns
        return (values.float() + added[offset : offset + stop - start]).to(values.dtype)


class _MergedByPeft:
    """A weight of the base whose layer PEFT makes, begins and merges, as a Source: whole from its first element on."""

    def __init__(self, reader: Reader, entry: Entry, change: _Change, config: Mapping[str, Any]) -> None:
        self._reader, self._entry, self._change, self._config = reader, entry, change, config
        self._peft = import_module("peft")  # before anything is written
        self._whole: Tensor | None = None

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major weight, in the dtype of the base."""
        if self._whole is None:
            self._whole = self._merged()
        values = self._whole[start:stop]
        if stop == self._entry.numel:
            self._whole = None
        return values

    @torch.no_grad()
    def _merged(self) -> Tensor:
        rows, columns = self._entry.shape
        layer = Conv1D(columns, rows) if self._config["fan_in_fan_out"] else nn.Linear(columns, rows, bias=False)
        layer.weight = nn.Parameter(self._reader.read(self._entry, 0, self._entry.numel).view(rows, columns))
        config, host = self._peft.LoraConfig(**self._config, target_modules=["it"]), nn.ModuleDict({"it": layer})
        adapted = self._peft.inject_adapter_in_model(config, host)["it"]
        for name, values in self._change.parts.items():
            getattr(adapted, name)["default"].weight.data = values  # fp32, as PEFT has it beside 16 bits too
        adapted.merge()
        return adapted.get_base_layer().weight.detach().reshape(-1)


def adapters_of(model: nn.Module) -> tuple[str, ...]:
    """Returns the names of PEFT's adapters in the model."""
    return tuple(getattr(model, "peft_config", None) or ())


def written_with_adapters(model: nn.Module) -> Callable[[str], bool]:
    """Returns a predicate on parameter names: whether PEFT writes the parameter into an adapter's files. Collective.

    PEFT also writes parameters that are not trained: an embedding that was resized or that an adapter targets, and
    projections that all layers share. PEFT makes the choice from stand-ins of the same shapes, on rank 0 for all ranks,
    because it may ask the Hub for the base model's configuration.
    """
    wanted: set[str] = set()
    if adapters := adapters_of(model):
        from peft import get_peft_model_state_dict

        state: dict[str, Any] = {
            name: torch.zeros(()).expand(value.shape) if isinstance(value, Tensor) else value
            for name, value in model.state_dict(keep_vars=True).items()
        }
        names = {id(value): name for name, value in state.items()}
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # PEFT says the same again when it writes
            for adapter in adapters:
                chosen = get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
                wanted |= {names[id(value)] for value in chosen.values() if id(value) in names}
        wanted = broadcast_object_list([wanted])[0]
    return wanted.__contains__
