"""`from_deepspeed` translates a JSON of DeepSpeed's key by key, and has a table that says how."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_core.comm.ranks import mesh_of_replicas
from zero_core.errors import ConfigError

from . import optimizers, schedules
from .reading import Reading, Row, known
from .sharding import Settings

__all__ = ["Row", "Translation", "from_deepspeed", "loaded", "translate"]

_ZERO = "zero_optimization."
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}
_OPTIMIZERS, _SCHEDULES = ", ".join(optimizers.TYPES), ", ".join(schedules.SCHEDULES)
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
                f"mics_shard_size={self.shard_size} was read for {self.ranks} ranks and there are {here}: call "
                "torch.distributed.init_process_group first, and read the file for these ranks"
            )
        device = None if dist.get_backend() == "gloo" else torch.accelerator.current_accelerator()
        mesh = mesh_of_replicas("cpu" if device is None else device.type, here // self.shard_size, here)
        return options | {"mesh": mesh}

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
        raise ConfigError("\n".join([f"{where} has what cannot be followed here:", *lines]))
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
    read = Reading(loaded(config), known(arguments, model, ranks, num_training_steps))
    _refuse_contradictions(read, ranks)
    zero, size = settings(**_zero(read, model, ranks)), read.get(f"{_ZERO}mics_shard_size")
    micro, accumulate, total = _batch(read, ranks)
    reduce_dtype = read.get("communication_data_type")
    if "gradient_clipping" not in read:
        remark = "DeepSpeed 0.19.8's default. Earlier versions did not clip: for that, write 0"
        read.rows["gradient_clipping"] = Row("gradient_clipping", None, "max_grad_norm", "mapped", remark)
    options: dict[str, Any] = {
        "max_grad_norm": read.get("gradient_clipping") or None,
        "autocast": torch.bfloat16 if read.get("torch_autocast.enabled") else None,
        "drop_last": read.get("dataloader_drop_last"),
        "shard_size": size if 0 < size < ranks else None,
        "reduce_dtype": None if reduce_dtype is None else _DTYPES[reduce_dtype],
        "schedule": _made(read, "scheduler", schedules, f"take {_SCHEDULES}, or a class of torch", _make_schedule),
        "loss_scale_options": _loss_scale(read, zero.stage) if zero.param_dtype == "fp16" else None,
        "_optimizer": _made(read, "optimizer", optimizers, f"take one of {_OPTIMIZERS}", _make_optimizer),
    }
    return Translation(zero, tuple(read.rows.values()), ranks, micro, accumulate, total, **options)


def loaded(config: Given) -> Mapping[str, Any]:
    """Returns the keys of a file, or the mapping itself. Raises ConfigError for what is no JSON object."""
    if isinstance(config, Mapping):
        return config
    where = os.fspath(config)
    try:
        found = json.loads(Path(where).read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{where}: {error}; give the path of a JSON file of DeepSpeed's, without comments") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} holds a {type(found).__name__}: DeepSpeed's JSON is an object of keys")
    return found


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"{', '.join(twice)} is there twice: keep one of them")
    return dict(pairs)


def _ranks(arguments: Any) -> int:
    if arguments is not None:
        return int(arguments.world_size)
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


# -- the sections: each function reads the keys of one, or refuses them ------------------------------------------------


def _refuse_contradictions(read: Reading, ranks: int) -> None:
    """Refuses keys that contradict others, or lack one."""
    stage, dtype = read.get(f"{_ZERO}stage"), _param_dtype(read)
    size, wanted = read.get(f"{_ZERO}mics_shard_size"), read.get("data_types.param_dtype")
    casts, ratio = read.get("torch_autocast.enabled"), f"{_ZERO}offload_optimizer.ratio"
    half = casts and _DTYPES[read.get("torch_autocast.dtype")] != torch.bfloat16
    one_of = "is enabled, too: keep one of them"
    other = f"parameters are in {dtype or 'fp32'}: enable bf16 or fp16, or leave it out"
    scaler = "autocast in fp16 needs torch's GradScaler, which reads whole gradients: write bf16"
    part = f"DeepSpeed offloads a part at stage 3 only, and the stage is {stage}: write 1"
    mics = f"MiCS is for stage 3, and the stage is {stage}: change one of them"
    groups = f"{ranks} ranks are no multiple of it: take a divisor, or say the ranks with world_size="
    rules = [
        ("fp16.enabled", read.get("bf16.enabled") and read.get("fp16.enabled"), f"bf16 {one_of}"),
        ("data_types.param_dtype", wanted and _DTYPES[wanted] != _DTYPES[dtype or "fp32"], other),
        ("torch_autocast.dtype", half, scaler),
        ("torch_autocast.enabled", casts and dtype, f"{dtype} {one_of}"),
        (f"{_ZERO}mics_shard_size", size > 0 and ranks % size, groups),
        (f"{_ZERO}mics_shard_size", size > 0 and stage != 3, mics),
        (ratio, read.get(ratio) < 1 and stage != 3, part),
    ]
    for section, least in (("offload_optimizer", 1), ("offload_param", 3)):
        path, device = (f"{_ZERO}{section}.{name}" for name in ("nvme_path", "device"))
        tier = read.get(device)
        late = f"DeepSpeed offloads this from stage {least} on, and the stage is {stage}: change one of them"
        rules.append((device, tier != "none" and stage < least, late))
        missing = tier == "nvme" and stage >= least and read.get(path) is None
        rules.append((path, missing, "it is missing: name a folder on your fastest drive"))
    for key, wrong, why in rules:
        if wrong:
            read.refuse(key, why)


def _param_dtype(read: Reading) -> str | None:
    return next((name for name in ("bf16", "fp16") if read.get(f"{name}.enabled")), None)


def _zero(read: Reading, model: Any, ranks: int) -> dict[str, Any]:
    """Stage, dtype, tiers, folders and sizes, as arguments of `Settings`."""
    tiers, paths, dtype = list[Any](), dict[str, None](), _param_dtype(read)
    for section in ("offload_optimizer", "offload_param"):
        tier, path = read.get(f"{_ZERO}{section}.device"), read.get(f"{_ZERO}{section}.nvme_path")
        tiers.append("device" if tier == "none" else "nvme" if tier == "nvme" and path else "host")
        paths |= {path: None} if tiers[-1] == "nvme" else {}
    states, parameters = tiers
    ratio, in_cpu = read.get(f"{_ZERO}offload_optimizer.ratio"), read.values.get(f"{_ZERO}offload_param.max_in_cpu")
    if ratio < 1 and states != "device":
        states = {"device": round(1 - ratio, 9), states: ratio} if ratio else "device"
    if in_cpu is not None and parameters == "nvme" and isinstance(model, nn.Module):
        share = min(1.0, in_cpu * ranks / max(1, sum(p.numel() for p in model.parameters())))
        parameters = {"host": round(share, 9), "nvme": round(1 - share, 9)}
    sizes, itemsize = {}, 4 if dtype is None else 2
    prefetch = f"{_ZERO}stage3_prefetch_bucket_size"
    resident = [f"{_ZERO}stage3_{name}" for name in ("max_live_parameters", "max_reuse_distance")]
    if prefetch in read.values:
        sizes["prefetch_bytes"] = read.values[prefetch] * itemsize
    if any(key in read.values for key in resident):
        sizes["resident_bytes"] = min(map(read.get, resident)) * itemsize
    places = {"optimizer": states, "gradients": states, "parameters": parameters}
    stage = read.get(f"{_ZERO}stage")
    return {"stage": stage, "param_dtype": dtype, "nvme_paths": tuple(paths), **places, **sizes}


def _batch(read: Reading, ranks: int) -> tuple[int | None, int | None, int | None]:
    """Micro-batch, accumulation and whole batch. A missing one follows from the others, as in DeepSpeed."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    given: list[Any] = [read.values.get(key) for key in keys]
    micro, accumulate, total = given
    if micro is None and total is None:
        return micro, accumulate, total
    if micro is None or total is None:
        accumulate = accumulate or 1
        micro = total // (accumulate * ranks) if micro is None else micro
        total = micro * accumulate * ranks if total is None else total
    elif accumulate is None:
        accumulate = total // (micro * ranks)
    if total != micro * accumulate * ranks:
        said = ", ".join(f"{key}={value}" for key, value in zip(keys, given, strict=True) if value is not None)
        read.refuse(
            keys[2],
            f"{said}, and world_size={ranks}: train_batch_size is the product of the micro-batch, the accumulation "
            "steps and the ranks. Leave one of them out, or say the ranks with world_size=",
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


def _made(
    read: Reading, section: str, module: Any, way_out: str, make: Callable[..., str]
) -> tuple[str, dict[str, Any]] | None:
    """The type of a section and its parameters; None: it has none, or is refused. make: returns its name here."""
    name = read.values.get(f"{section}.type")
    if name is None or module.params_of(name) is None:
        if name is not None:
            read.refuse(f"{section}.type", f"there is none of this name here: {way_out}")
        elif any(key.startswith(f"{section}.params") for key in read.rows):
            read.refuse(f"{section}.type", "it is missing, and there are parameters: name the type")
        return None
    params = read.params(section)
    if not any(row.kind == "refused" and key.startswith(section) for key, row in read.rows.items()):
        try:
            read.say(f"{section}.type", make(name, params))
        except (TypeError, ValueError, ArithmeticError) as error:
            read.refuse(f"{section}.type", f"{name} cannot be made: {error}")
            return None
    return name, params


def _make_optimizer(name: str, params: dict[str, Any]) -> str:
    made = type(optimizers.make(name, [nn.Parameter(torch.zeros(1))], params))
    return f"{'torch.optim' if made.__module__.startswith('torch.') else 'zero_optim_cpu'}.{made.__name__}"


def _make_schedule(name: str, params: dict[str, Any]) -> str:
    groups = max((len(value) for value in params.values() if isinstance(value, tuple)), default=1)
    over = torch.optim.AdamW([{"params": [nn.Parameter(torch.zeros(1))]} for _ in range(groups)])
    made = schedules.make(name, over, params)
    over.step()
    made.step()
    return f"{name}, step for step"
