"""Builds a transformers model without weights; each rank reads its slices of them when the model is sharded.

Owns the mapping from tensors in the files to parameters, by transformers' own table of conversions. zero-core reads the
bytes: the model is built under `zero_core.deferred_init`, and holds no weights before `shard`, `Accelerator.prepare` or
a Trainer shards it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    build_glob_alternation,
    dot_natural_key,
    rename_source_key,
)

import zero_core
from zero_core.checkpoint.pretrained import FileValues, differ, fill
from zero_core.checkpoint.safetensors import Entry, Reader, open_index
from zero_core.errors import PretrainedError
from zero_core.model.parameter_names import Part, named_tensors

from .config import ConfigError
from .weights_4bit import Quantiser

_REFUSED = {  # arguments of transformers that place a whole model or replace its weights
    "device_map": "the model is sharded, not placed as a whole. Leave device_map= out",
    "state_dict": "weights are read from files: zero_core.load_pretrained takes renamed ones",
    "distributed_config": "zero_hf shards the model itself. Leave distributed_config= out",
}
_IGNORED = "gguf_file low_cpu_mem_usage local_files_only use_safetensors weights_only token revision".split()


def from_pretrained(
    cls: Any,
    folder: str | Path,
    *,
    config: Any = None,
    dtype: torch.dtype | str | None = "auto",
    ignore_mismatched_sizes: bool = False,
    key_mapping: Mapping[str, str] | None = None,
    output_loading_info: bool = False,
    quantization_config: Any = None,
    seed: int | None = None,
    **kwargs: Any,
) -> Any:
    """Builds the model that `cls.from_pretrained(folder)` would, without its weights: sharding reads those.

    cls: an Auto class, or a class of model. folder: a local one with config.json and safetensors, in one file or with
    an index. config, dtype, ignore_mismatched_sizes, key_mapping, output_loading_info and further keywords are as
    transformers takes them: those that the config knows change the config, and the rest goes to the model's class.
    seed: of parameters that the files lack; None: torch's own seed, which must then be the same on all ranks.

    Each rank reads its slices of each parameter, once, when the model is sharded. A parameter that transformers
    computes from several tensors, other than by stacking experts, is computed whole by each rank, one at a time.
    Parameters that the files lack are initialised as in transformers, with a warning. There is a warning too for
    tensors that no parameter takes. The model is in evaluation mode, as from transformers. A Trainer calls train(); in
    a loop of your own, call it yourself.

    quantization_config: a BitsAndBytesConfig with load_in_4bit. Each rank quantises the same linear layers as
    transformers, one at a time, and holds their bytes and all unquantised values but experts in memory until the model
    is sharded. Stacks of experts, which transformers does not quantise, are quantised block by block as sharding reads
    them, with scales in fp32 (no double quantisation), and are dequantised where they are used. Both are frozen, and
    need bitsandbytes.

    Raises:
        ConfigError: the folder is not local, or has no safetensors, or an argument would load the model whole, or
            quantise it to something else.
        zero_core.errors.PretrainedError: shapes differ, or the files are damaged.
    """
    folder = Path(folder)
    _check(cls, folder, kwargs)
    entries = open_index(folder)
    if config is None:
        own = getattr(cls, "config_class", None) or AutoConfig
        config, kwargs = own.from_pretrained(folder, return_unused_kwargs=True, **kwargs)
    config = copy.deepcopy(config)
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None and _method(quantised) == "gguf":  # the weights are dequantised already
        del config.quantization_config
    elif quantised is not None:
        raise ConfigError(
            f"{folder} holds quantised weights: load them with {cls.__name__}.from_pretrained, on every rank whole, "
            "and shard the model then"
        )
    found = _dtype(kwargs.pop("torch_dtype", None) or dtype, config, entries)
    quantiser = None if quantization_config is None else Quantiser(quantization_config)
    config.name_or_path = str(folder)
    with zero_core.deferred_init(seed):
        build = cls.from_config if hasattr(cls, "from_config") else cls._from_config
        model: PreTrainedModel = build(config, dtype=found, **kwargs)
    _keep_in_fp32(model, found)
    if quantiser is not None:
        quantiser.replace_linears(model, found)
    info = _attach(model, folder, entries, key_mapping, ignore_mismatched_sizes, quantiser)
    if model.can_generate() and (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    if quantiser is not None:
        quantiser.finish(model)
    model.eval()
    return (model, info) if output_loading_info else model


def _check(cls: Any, folder: Path, kwargs: dict[str, Any]) -> None:
    """Raises ConfigError for files that cannot be read slice by slice, and for arguments that need a whole model."""
    for key, reason in _REFUSED.items():
        if kwargs.pop(key, None) is not None:
            raise ConfigError(f"from_pretrained({key}=...): {reason}")
    gguf = folder.suffix == ".gguf" or kwargs.get("gguf_file") is not None
    for key in _IGNORED:
        kwargs.pop(key, None)
    if not folder.is_dir() and not gguf:
        raise ConfigError(
            f"{folder} is not a local folder: fetch it with huggingface_hub.snapshot_download, and give the folder "
            "that it returns"
        )
    if gguf or not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
        raise ConfigError(
            f"{folder} must hold config.json and *.safetensors, because other formats cannot be read in parts. Convert "
            f"the model once: call {cls.__name__}.from_pretrained(...) of transformers, and save the result with "
            "zero_core.save_pretrained(model, another_folder). Then load another_folder"
        )


def _dtype(dtype: torch.dtype | str | None, config: Any, entries: Mapping[str, Entry]) -> torch.dtype:
    """Returns the dtype that transformers would choose. "auto": the config's dtype, else that of the first tensor (by
    file, then by name) of floats with 16 bits or more."""
    if dtype == "auto":
        dtype = getattr(config, "dtype", None)
        if dtype is None:
            wide = [each for each in entries.items() if each[1].dtype.is_floating_point and each[1].dtype.itemsize > 1]
            dtype = min(wide, key=lambda each: (each[1].path, each[0]))[1].dtype if wide else None
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype or torch.get_default_dtype()
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigError(f"dtype={dtype!r}: give a floating-point torch.dtype, its name, or 'auto'")
    return found


def _method(quantised: Any) -> Any:
    return quantised.get("quant_method") if isinstance(quantised, Mapping) else getattr(quantised, "quant_method", None)


def _keep_in_fp32(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Converts to fp32 the parameters that the model's class wants in fp32 although the model is in 16 bits."""
    if kept := model._get_dtype_plan(dtype):
        wanted, *_ = build_glob_alternation(list(kept))
        for name, parameter in model.named_parameters():
            if wanted.search(name) and parameter.is_floating_point():
                parameter.data = parameter.data.float()


def _attach(
    model: PreTrainedModel,
    folder: Path,
    entries: Mapping[str, Entry],
    key_mapping: Mapping[str, str] | None,
    ignore_mismatched_sizes: bool,
    quantiser: Quantiser | None,
) -> dict[str, Any]:
    """Gives each parameter the place of its values in the files. Returns transformers' loading info."""
    reader = Reader()
    sources, shapes, unexpected = _sources(model, entries, key_mapping, reader)
    values: dict[str, Any] = {}
    info: Any = SimpleNamespace(missing_keys=set(), unexpected_keys=set(unexpected), mismatched_keys=set())
    for named in named_tensors(model):
        given = [name for name in named.names if name in sources]
        wrong = {(n, shapes[n], tuple(named.tensor.shape)) for n in given if shapes[n] != tuple(named.tensor.shape)}
        info.mismatched_keys |= wrong
        if given and not wrong:
            values[named.name] = sources[given[0]]
            _check_tied(folder, given, sources, named.tensor.numel())
        elif not wrong:
            info.missing_keys.add(named.name)
    if info.mismatched_keys and not ignore_mismatched_sizes:
        listed = "; ".join(f"{name}: file {file}, model {own}" for name, file, own in sorted(info.mismatched_keys))
        raise PretrainedError(
            f"{folder} does not fit {type(model).__name__}: shapes differ: {listed}. Give the config that fits. Or "
            "pass ignore_mismatched_sizes=True, which initialises these parameters again"
        )
    if quantiser is not None:
        quantiser.fill(model, values)
    fill(model, values)
    _warn(model, folder, info)
    return vars(info)


def _sources(
    model: PreTrainedModel, entries: Mapping[str, Entry], key_mapping: Mapping[str, str] | None, reader: Reader
) -> tuple[dict[str, Any], dict[str, tuple[int, ...]], list[str]]:
    """Returns, by the names in the model, the source of the values and their shape in the files. And unknown names.

    The order and the conditions are those of transformers' convert_and_load_state_dict_in_model.
    """
    known = {name: named.tensor for named in named_tensors(model) for name in named.names}
    transforms = get_model_conversion_mapping(model, dict(key_mapping) if key_mapping else None)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    sources: dict[str, Any] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    unexpected: list[str] = []
    groups: dict[str, tuple[WeightConverter, dict[str, list[str]]]] = {}
    for key in sorted(entries, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = rename_source_key(key, [], [], prefix, known)
        if name not in known:
            unexpected.append(name)
        elif pattern is None:
            sources[name] = FileValues([Part(key, 0, entries[key].numel)], reader, entries)
            shapes[name] = entries[key].shape
        else:
            _, keys = groups.setdefault(name, (by_pattern[pattern], {}))
            keys.setdefault(pattern, []).append(key)
    for name, (converter, keys) in groups.items():
        converted = _Converted(name, converter, keys, reader, entries, model)
        for target, shape in converted.shapes().items():
            parts = converted.parts(shape)
            sources[target] = _Target(converted, target) if parts is None else FileValues(parts, reader, entries)
            shapes[target] = shape
    model.__dict__["_weight_conversions"] = [t for t in transforms if t.was_used()]  # its save_pretrained reverts these
    return sources, shapes, unexpected


@dataclass(frozen=True)
class _Converted:
    """A group of parameters that transformers' converter computes from tensors of the files."""

    name: str
    converter: WeightConverter
    keys: Mapping[str, Sequence[str]]
    reader: Reader
    entries: Mapping[str, Entry]
    model: PreTrainedModel

    def _convert(self, read: Any) -> dict[str, Tensor]:
        converter: Any = copy.deepcopy(self.converter)
        for pattern, keys in self.keys.items():
            for key in keys:
                entry = self.entries[key]
                converter.add_tensor(self.name, key, pattern, lambda entry=entry: read(entry))
        made = converter.convert(self.name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of the computed parameters, without reading the files."""
        made = self._convert(lambda entry: torch.empty(entry.shape, dtype=entry.dtype, device="meta"))
        return {name: tuple(value.shape) for name, value in made.items()}

    def values(self, target: str) -> Tensor:
        """Returns one whole parameter, in the file's dtype."""
        return self._convert(lambda entry: self.reader.read(entry, 0, entry.numel).view(entry.shape))[target]

    def parts(self, shape: tuple[int, ...]) -> list[Part] | None:
        """Returns the tensors that, end to end, form the parameter, as for stacked experts. None: it is computed."""
        operations = [(type(o), getattr(o, "dim", None)) for o in self.converter.operations]
        columns = [self.keys.get(pattern, []) for pattern in self.converter.source_patterns]
        stacked = operations == [(MergeModulelist, 0)] and len(columns) == 1
        stacked |= operations == [(MergeModulelist, 0), (Concatenate, 1)]
        if not stacked or len({len(column) for column in columns}) > 1:
            return None
        parts = [Part(key, 0, self.entries[key].numel) for row in zip(*columns, strict=True) for key in row]
        return parts if sum(part.numel for part in parts) == math.prod(shape) else None


@dataclass(frozen=True)
class _Target:
    """One parameter of a group. Fills zero-core's `init_replay.Source`."""

    group: _Converted
    name: str

    def read(self, start: int, stop: int) -> Tensor:
        """Elements [start, stop) of the row-major parameter, in the file's dtype."""
        return self.group.values(self.name).reshape(-1)[start:stop].clone()


def _check_tied(folder: Path, names: Sequence[str], sources: Mapping[str, Any], numel: int) -> None:
    """Raises PretrainedError where files hold different values for one parameter: transformers would not tie it."""
    for other in names[1:]:
        if differ(sources[names[0]], sources[other], numel):
            raise PretrainedError(
                f"{folder} holds different values for {names[0]} and {other}, which the config ties to one "
                "parameter: pass tie_word_embeddings=False"
            )


def _warn(model: PreTrainedModel, folder: Path, info: Any) -> None:
    """Gives the same warnings as transformers. Of `info`, takes away the names that the model's class leaves out."""
    model._adjust_missing_and_unexpected_keys(info)
    if anew := sorted(info.missing_keys | {name for name, *_ in info.mismatched_keys}):
        warnings.warn(
            f"{len(anew)} weights of {type(model).__name__} are not in {folder} and are newly initialised: "
            f"{', '.join(anew)}. Train the model before you use it",
            stacklevel=4,
        )
    if needless := sorted(info.unexpected_keys):
        warnings.warn(
            f"{len(needless)} tensors of {folder} are not used by {type(model).__name__}: {', '.join(needless)}",
            stacklevel=4,
        )
