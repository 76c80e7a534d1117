"""Translates a DeepSpeed JSON key by key (`from_deepspeed`), with a table of the result."""

from __future__ import annotations

import functools
import json
import os
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_core.comm.ranks import mesh_of_replicas
from zero_core.errors import ConfigError

from . import optimizers, schedules
from .reading import Reading, Row
from .sharding import Settings

_ZERO = "zero_optimization."
_OFFLOADS = (f"{_ZERO}offload_optimizer", f"{_ZERO}offload_param")
_TIERS = {"none": "device", "cpu": "host", "nvme": "nvme"}
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_NO_SETTINGS = ("zero", "rows", "ranks", "loss_scale_options", "_optimizer")
Given = Mapping[str, Any] | str | os.PathLike[str]


@dataclass(frozen=True)
class Translation:
    """A JSON of DeepSpeed's in this library's words.

    zero: stage, tiers and dtype of the parameters. rows: one for each key. ranks: for how many it was read.
    micro_batch_size (of one rank), accumulate, train_batch_size: None where the file does not say. max_grad_norm: None
    does not clip. autocast: the dtype of torch_autocast, or None. drop_last: of the data loader. shard_size: the ranks
    among which parameters are cut, where these are not all. reduce_dtype: of gradients between ranks; None: the
    parameters' own. schedule: its type and parameters. loss_scale_options: arguments of zero_core.LossScale.
    """

    zero: Any
    rows: tuple[Row, ...]
    ranks: int = 1
    micro_batch_size: int | None = None
    accumulate: int | None = None
    train_batch_size: int | None = None
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    drop_last: bool = False
    shard_size: int | None = None
    reduce_dtype: torch.dtype | None = None
    schedule: tuple[str, dict[str, Any]] | None = None
    loss_scale_options: dict[str, Any] | None = None
    _optimizer: tuple[str, dict[str, Any]] | None = None

    @property
    def refused(self) -> tuple[Row, ...]:
        """The keys that this library refuses, in the order of the file."""
        return tuple(row for row in self.rows if row.kind == "refused")

    @property
    def loss_scale(self) -> zero_core.LossScale | None:
        """The scale of fp16's loss, a new one at each access; None: there is no fp16."""
        return None if self.loss_scale_options is None else zero_core.LossScale(**self.loss_scale_options)

    @functools.cached_property
    def shard_options(self) -> dict[str, Any]:
        """Further keyword arguments of zero_core.shard. With mics_shard_size the first access is collective.

        Raises:
            ConfigError: mics_shard_size without torch.distributed, or with another number of ranks.
        """
        options = {} if self.reduce_dtype is None else {"reduce_dtype": self.reduce_dtype}
        if self.shard_size is None:
            return options
        here = dist.get_world_size() if dist.is_initialized() else 1
        if here != self.ranks:
            raise ConfigError(
                f"the JSON (mics_shard_size={self.shard_size}) was read for {self.ranks} ranks, but the number "
                f"of ranks is {here}. Call torch.distributed.init_process_group first, and then read the configuration"
            )
        return options | {"mesh": mesh_of_replicas(here // self.shard_size)}

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer | None:
        """Returns the optimizer over `parameters`, tensors or groups; None: the file has none.

        Raises:
            ConfigError: the file has Lion, and zero-optim-cpu is not installed.
        """
        return None if self._optimizer is None else optimizers.make(self._optimizer[0], parameters, self._optimizer[1])

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Returns the schedule of `optimizer`; None: the file has none. It sets the first learning rates at once."""
        return None if self.schedule is None else schedules.make(self.schedule[0], optimizer, self.schedule[1])

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the file makes, by their names here, without those that are off."""
        of_zero = {each.name: getattr(self.zero, each.name) for each in fields(Settings)} | self.zero.placements
        own = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in _NO_SETTINGS}
        found = of_zero | own | {"loss_scale": self.loss_scale_options}
        return {
            name: value for name, value in found.items() if value is not None and value is not False and value != ()
        }

    def table(self) -> str:
        """Returns the rows as lines of text, their key, its value, its name here, the remark, and then the settings."""
        cells = [("DeepSpeed", "value", "here", "remark")]
        for row in self.rows:
            value = "" if row.value is None else json.dumps(row.value, default=str)
            ours = {"needless": "-", "refused": "REFUSED"}.get(row.kind, row.ours)
            cells.append((row.key, value if len(value) <= 32 else f"{value[:29]}...", ours, row.remark))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in cells]
        return "\n".join([*lines, "here: " + ", ".join(f"{name}={value}" for name, value in self.settings().items())])


def from_deepspeed(config: Given, **options: Any) -> Translation:
    """Reads a JSON of DeepSpeed's. Each key is used, or refused by name.

    options: as `translate` takes them.

    Raises:
        ConfigError: the file cannot be read, or keys cannot be followed. Each is named, with why and the way out.
    """
    found = translate(config, **options)
    if found.refused:
        where = "the DeepSpeed configuration" if isinstance(config, Mapping) else os.fspath(config)
        lines = [f"- {row.key}={json.dumps(row.value, default=str)}: {row.remark}" for row in found.refused]
        raise ConfigError("\n".join([f"{where} has keys that are refused:", *lines]))
    return found


def translate(
    config: Given,
    *,
    arguments: Any = None,
    model: Any = None,
    world_size: int | None = None,
    num_training_steps: int | None = None,
    settings: Callable[..., Any] = Settings,
) -> Translation:
    """As from_deepspeed, with the refused keys among the rows: it raises only where the file cannot be read.

    config: a mapping, or the path of a file. arguments: transformers.TrainingArguments, by which "auto" is resolved and
    with which values must agree, as in transformers. model: a module or its config, for values that depend on the
    hidden size or on the number of parameters. world_size: the ranks; None: those of `arguments`, of torch.distributed,
    or of the environment. num_training_steps: of the schedule, where it is "auto" and `arguments` has no max_steps.
    settings: makes `Translation.zero` of stage, tiers and sizes.
    """
    ranks = _ranks(arguments) if world_size is None else world_size
    if ranks < 1:
        raise ConfigError(f"world_size={ranks}: give the number of ranks, at least 1")
    read = Reading(loaded(config), arguments, model, num_training_steps)
    _refuse_contradictions(read, ranks)
    zero, size = settings(**_zero(read, model, ranks)), read.get(f"{_ZERO}mics_shard_size")
    micro, accumulate, total = _batch(read, ranks)
    if "gradient_clipping" not in read.rows:
        remark = "DeepSpeed 0.19.8's default. Earlier versions did not clip: for that, write 0"
        read.rows["gradient_clipping"] = Row("gradient_clipping", None, "max_grad_norm", "mapped", remark)
    options: dict[str, Any] = {
        "max_grad_norm": read.get("gradient_clipping") or None,
        "autocast": torch.bfloat16 if read.get("torch_autocast.enabled") else None,
        "drop_last": read.get("dataloader_drop_last"),
        "shard_size": size if 0 < size < ranks else None,
        "reduce_dtype": _DTYPES.get(read.get("communication_data_type")),
        "schedule": _made(read, "scheduler", schedules),
        "loss_scale_options": _loss_scale(read, zero.stage) if zero.param_dtype == "fp16" else None,
        "_optimizer": _made(read, "optimizer", optimizers),
    }
    return Translation(zero, tuple(read.rows.values()), ranks, micro, accumulate, total, **options)


def loaded(config: Given) -> Mapping[str, Any]:
    """Returns the keys of a file, or the mapping itself. Raises ConfigError if it is no JSON object."""
    if isinstance(config, Mapping):
        return config
    where = os.fspath(config)
    try:
        found = json.loads(Path(where).read_text(encoding="utf-8"), object_pairs_hook=_unique)
        if isinstance(found, dict):
            return found
        raise ValueError(f"it holds a {type(found).__name__}")
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {where}: {error}. Give a file with JSON, without comments") from error


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    for name, count in Counter(name for name, _ in pairs).items():
        if count > 1:
            raise ValueError(f"the key {name} is there twice: keep one of them")
    return dict(pairs)


def _ranks(arguments: Any) -> int:
    if arguments is not None:
        return int(arguments.world_size)
    return dist.get_world_size() if dist.is_initialized() else int(os.environ.get("WORLD_SIZE", "1"))


# -- the sections: each function reads the keys of one, or refuses them ------------------------------------------------


def _refuse_contradictions(read: Reading, ranks: int) -> None:
    """Refuses keys that contradict others, or lack one."""
    stage, size, dtype = read.get(f"{_ZERO}stage"), read.get(f"{_ZERO}mics_shard_size"), _param_dtype(read)
    if dtype == "bf16" and read.get("fp16.enabled"):
        read.refuse("fp16.enabled", "bf16 is enabled, too: keep one of them")
    if dtype is not None and read.get("torch_autocast.enabled"):
        read.refuse("torch_autocast.enabled", f"{dtype} is enabled, too: keep one of them")
    if size > 0 and (stage != 3 or ranks % size):
        way_out = "take stage 3 and a divisor of the ranks, or pass the number of ranks as world_size="
        read.refuse(f"{_ZERO}mics_shard_size", f"the stage is {stage}, and there are {ranks} ranks: {way_out}")
    for section in _OFFLOADS:
        if read.get(f"{section}.device") == "nvme" and read.get(f"{section}.nvme_path") is None:
            read.refuse(f"{section}.device", "nvme_path is missing: name a folder on your fastest drive")


def _param_dtype(read: Reading) -> str | None:
    return next((name for name in ("bf16", "fp16") if read.get(f"{name}.enabled")), None)


def _zero(read: Reading, model: Any, ranks: int) -> dict[str, Any]:
    """Stage, dtype, tiers, folders and sizes, as arguments of `Settings`."""
    tiers: list[Any] = [_TIERS[read.get(f"{each}.device")] for each in _OFFLOADS]
    paths = [read.get(f"{each}.nvme_path") for each, tier in zip(_OFFLOADS, tiers, strict=True) if tier == "nvme"]
    states, parameters = tiers
    ratio, in_cpu = read.get(f"{_ZERO}offload_optimizer.ratio"), read.values.get(f"{_ZERO}offload_param.max_in_cpu")
    if ratio < 1 and states != "device":
        states = {"device": round(1 - ratio, 9), states: ratio} if ratio else "device"
    if in_cpu is not None and parameters == "nvme" and isinstance(model, nn.Module):
        share = min(1.0, in_cpu * ranks / max(1, sum(p.numel() for p in model.parameters())))
        parameters = {"host": round(share, 9), "nvme": round(1 - share, 9)}
    sizes, dtype = {}, _param_dtype(read)
    itemsize = 4 if dtype is None else 2
    prefetch = f"{_ZERO}stage3_prefetch_bucket_size"
    resident = [f"{_ZERO}stage3_{name}" for name in ("max_live_parameters", "max_reuse_distance")]
    if prefetch in read.values:
        sizes["prefetch_bytes"] = read.values[prefetch] * itemsize
    if any(key in read.values for key in resident):
        sizes["resident_bytes"] = min(map(read.get, resident)) * itemsize
    places = {"optimizer": states, "gradients": states, "parameters": parameters}
    stage = read.get(f"{_ZERO}stage")
    return {"stage": stage, "param_dtype": dtype, "nvme_paths": tuple(dict.fromkeys(paths)), **places, **sizes}


def _batch(read: Reading, ranks: int) -> tuple[int | None, int | None, int | None]:
    """Micro-batch, accumulation and whole batch. A missing one follows from the others, as in DeepSpeed."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    given: list[Any] = [read.values.get(key) for key in keys]
    micro, accumulate, total = given
    if micro is None and total is None:
        return micro, accumulate, total
    if accumulate is None:
        accumulate = 1 if micro is None or total is None else total // (micro * ranks)
    micro = total // (accumulate * ranks) if micro is None else micro
    total = micro * accumulate * ranks if total is None else total
    if total != micro * accumulate * ranks:
        said = ", ".join(f"{key}={value}" for key, value in zip(keys, given, strict=True) if value is not None)
        read.refuse(
            keys[2],
            f"{said}, and world_size={ranks}: micro-batch x accumulation steps x ranks must be train_batch_size, and "
            f"is {micro * accumulate * ranks}. Leave one of the keys out, or pass the number of ranks as world_size=",
        )
    return micro, accumulate, total


def _loss_scale(read: Reading, stage: int) -> dict[str, Any]:
    """Keyword arguments of LossScale. At stage 0 DeepSpeed knows no hysteresis and goes on at the minimum."""
    if fixed := read.get("fp16.loss_scale"):
        return {"value": float(fixed), "dynamic": False}
    window = read.get("fp16.loss_scale_window")
    return {
        "value": 2.0 ** read.get("fp16.initial_scale_power"),
        "window": window,
        "first_window": window + 1,
        "hysteresis": read.get("fp16.hysteresis") if stage else 1,
        "consecutive_hysteresis": read.get("fp16.consecutive_hysteresis") and stage > 0,
        "minimum": read.get("fp16.min_loss_scale"),
        "fails_at_minimum": stage > 0,
    }


def _made(read: Reading, section: str, module: Any) -> tuple[str, dict[str, Any]] | None:
    """The type of a section and its parameters; None: it has none, or is refused."""
    key, params = f"{section}.type", read.params(section)
    name = read.values.get(key)
    if name is None:
        if key not in read.rows and any(each.startswith(f"{section}.params.") for each in read.rows):
            read.refuse(key, "it is missing, and there are parameters: name the type")
        return None
    if module.defaults_of(name) is None:
        read.refuse(key, f"there is none of this name here: take one of {', '.join(module.TYPES)}")
        return None
    if not any(row.kind == "refused" and written.startswith(section) for written, row in read.rows.items()):
        try:
            made = _tried(module, name, params)
        except (TypeError, ValueError, ArithmeticError) as error:
            read.refuse(key, f"{name} cannot be made: {error}")
            return None
        read.rows[key] = replace(read.rows[key], ours=made)
    return name, params


def _tried(module: Any, name: str, params: Mapping[str, Any]) -> str:
    """Makes an optimizer or a schedule over stand-ins. Returns its name here, and passes on its class's errors."""
    over: Any = [nn.Parameter(torch.zeros(1))]
    if module is optimizers:
        made = type(optimizers.make(name, over, params))
        return f"{made.__module__.rpartition('.')[0]}.{made.__name__}"
    over = torch.optim.AdamW(over)
    schedule = schedules.make(name, over, params)
    over.step()
    schedule.step()
    return f"{name}, step for step"
