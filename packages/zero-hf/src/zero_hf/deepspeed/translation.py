"""`from_deepspeed`: what a JSON of DeepSpeed's becomes here, key by key. Owns the reading, "auto" and the table."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import zero_core

from ..config import ConfigError, ZeroConfig
from .keys import KEYS, RENAMED, SECTIONS, Key, nearest
from .optimizers import REFUSED, Kind, kind_of
from .schedules import make, params_of

__all__ = ["Row", "Translation", "from_deepspeed", "translate"]

Given = Mapping[str, Any] | str | os.PathLike[str]
_ABSENT: Any = object()


@dataclass(frozen=True)
class Row:
    """One key of the file. kind: "mapped", "needless" or "refused". ours: what it is here, empty unless mapped."""

    key: str
    value: Any
    ours: str
    kind: str
    remark: str = ""


@dataclass(frozen=True)
class Translation:
    """What a JSON of DeepSpeed's says, in this library's words.

    zero: stage, tiers and dtype of the parameters. rows: one for each key. micro_batch_size (of one rank), accumulate,
    train_batch_size: None where the file does not say. max_grad_norm: None does not clip. autocast: the dtype of
    torch_autocast. shard_options: further keyword arguments of zero_core.shard.
    """

    zero: ZeroConfig
    rows: tuple[Row, ...]
    micro_batch_size: int | None = None
    accumulate: int | None = None
    train_batch_size: int | None = None
    max_grad_norm: float | None = None
    autocast: torch.dtype | None = None
    drop_last: bool = False
    shard_options: dict[str, Any] = field(default_factory=dict)
    _optimizer: tuple[Kind, dict[str, Any]] | None = None
    _scheduler: tuple[str, dict[str, Any]] | None = None
    _scale: dict[str, Any] | None = None

    @property
    def refused(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == "refused")

    @property
    def loss_scale(self) -> zero_core.LossScale | None:
        """The scale of fp16's loss, a new one at each access; None: there is no fp16."""
        return None if self._scale is None else zero_core.LossScale(**self._scale)

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer | None:
        """Returns the optimizer over `parameters`, tensors or groups; None: the file has none.

        Raises:
            ImportError: the file has Lion, and zero-optim-cpu is not installed.
        """
        if self._optimizer is None:
            return None
        kind, params = self._optimizer
        return kind.make(parameters, params)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Returns the schedule of `optimizer`; None: the file has none. It sets the first learning rates at once."""
        if self._scheduler is None:
            return None
        name, params = self._scheduler
        return make(name, optimizer, params)

    def table(self, width: int = 140) -> str:
        """Returns the rows as lines of text: their key, its value, what it is here, and the remark."""
        cells = [("DeepSpeed", "value", "here", "remark")]
        for row in self.rows:
            ours = row.ours if row.kind == "mapped" else {"needless": "-", "refused": "REFUSED"}[row.kind]
            value = json.dumps(row.value, default=str)
            cells.append((row.key, textwrap.shorten(value, 32, placeholder=" ..."), ours, row.remark))
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        room = max(40, width - sum(widths) - 6)
        lines = []
        for *left, remark in cells:
            wrapped = textwrap.wrap(remark, room) or [""]
            start = "  ".join(cell.ljust(size) for cell, size in zip(left, widths, strict=True))
            lines += [f"{start}  {wrapped[0]}".rstrip()]
            lines += [" " * (sum(widths) + 6) + line for line in wrapped[1:]]
        return "\n".join(lines)


def from_deepspeed(
    config: Given,
    *,
    arguments: Any = None,
    model: Any = None,
    world_size: int | None = None,
    num_training_steps: int | None = None,
) -> Translation:
    """Reads a JSON of DeepSpeed's. Nothing of it is dropped: what cannot be followed is refused.

    config: a mapping, or the path of a file. arguments: transformers.TrainingArguments, by which "auto" is resolved and
    with which values must agree, as in transformers. model: a module or its config, for the values that depend on its
    hidden size. world_size: the ranks; None: those of `arguments`, of torch.distributed, or of the environment.
    num_training_steps: of the schedule, where it is "auto" and `arguments` has no max_steps.

    Raises:
        ConfigError: the file cannot be read, or keys cannot be followed. Each is named, with why and the way out.
    """
    found = translate(
        config, arguments=arguments, model=model, world_size=world_size, num_training_steps=num_training_steps
    )
    if found.refused:
        where = "the configuration" if isinstance(config, Mapping) else os.fspath(config)
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
) -> Translation:
    """As from_deepspeed, with the refused keys among the rows: it raises only where the file cannot be read."""
    ranks = world_size or _ranks(arguments)
    reading = _Reading(_Auto(arguments, model, ranks, num_training_steps), ranks)
    reading.read(_loaded(config))
    return reading.translation()


def _loaded(config: Given) -> Mapping[str, Any]:
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
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))


class _Auto:
    """What "auto" stands for in transformers, and which values must agree with the TrainingArguments."""

    def __init__(self, arguments: Any, model: Any, ranks: int, steps: int | None) -> None:
        self.arguments = arguments
        self.steps = steps
        if steps is None and arguments is not None and arguments.max_steps > 0:
            self.steps = arguments.max_steps
        self.hidden = _hidden_size(model)
        self.ranks = ranks

    def value(self, key: str) -> Any:
        return self._found(key)[0]

    def contradicts(self, key: str, value: Any) -> str | None:
        """Says which argument has another value; None: none has."""
        wanted, name = self._found(key)
        if name is None or wanted is _ABSENT or _same(value, wanted):
            return None
        return f'the TrainingArguments have {name}={wanted!r}: make them agree, or write "auto"'

    def _found(self, key: str) -> tuple[Any, str | None]:
        """The value, and the name of the argument that must agree with a given one; None: none must."""
        args, hidden = self.arguments, self.hidden
        if key == "zero_optimization.stage3_prefetch_bucket_size" and hidden is not None:
            return int(0.9 * hidden * hidden), None
        if args is None:
            return _ABSENT, None
        if key == "train_batch_size":
            rows = self.ranks * args.per_device_train_batch_size * args.gradient_accumulation_steps
            return rows, "train_batch_size (calculated)"
        if key in _ARGUMENTS:
            names = _ARGUMENTS[key]
            values = [getattr(args, name) for name in names]
            if key.endswith(".enabled"):
                return any(values), "|".join(names)
            return (values[0] if len(values) == 1 else tuple(values)), "+".join(names)
        if key == "scheduler.params.warmup_min_lr":
            return 0.0, None
        if key == "scheduler.params.total_num_steps" and self.steps is not None:
            return self.steps, "num_training_steps (calculated)"
        if key == "scheduler.params.warmup_num_steps":
            if self.steps is None and not args.warmup_steps >= 1:
                return _ABSENT, None
            return max(1, args.get_warmup_steps(self.steps or 0)), "warmup_steps"
        return _ABSENT, None


_ARGUMENTS = {
    "train_micro_batch_size_per_gpu": ("per_device_train_batch_size",),
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("max_grad_norm",),
    "optimizer.params.lr": ("learning_rate",),
    "optimizer.params.betas": ("adam_beta1", "adam_beta2"),
    "optimizer.params.eps": ("adam_epsilon",),
    "optimizer.params.weight_decay": ("weight_decay",),
    "scheduler.params.warmup_max_lr": ("learning_rate",),
    "fp16.enabled": ("fp16", "fp16_full_eval"),
    "bf16.enabled": ("bf16", "bf16_full_eval"),
}


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return tuple(one) == tuple(other)
    return bool(one == other)


def _hidden_size(model: Any) -> int | None:
    config = getattr(model, "config", model)
    for found in (config, getattr(config, "text_config", None)):
        size = getattr(found, "hidden_size", None) or max(getattr(found, "hidden_sizes", None) or [0])
        if size:
            return int(size)
    return None


class _Reading:
    """Goes through a file once: checks each key, keeps what is mapped, and says in `rows` what became of each."""

    def __init__(self, auto: _Auto, ranks: int) -> None:
        self.auto, self.ranks = auto, ranks
        self.order: list[tuple[str, Any]] = []
        self.rows: dict[str, Row] = {}
        self.values: dict[str, Any] = {}
        self.keys = dict(KEYS)
        self.kind: Kind | None = None

    # -- keys ----------------------------------------------------------------------------------------------------------

    def read(self, given: Mapping[str, Any]) -> None:
        for section, known in (("optimizer", self._optimizer_keys), ("scheduler", self._scheduler_keys)):
            found = given.get(section)
            name = found.get("type") if isinstance(found, Mapping) else None
            if isinstance(name, str):
                self.keys |= {f"{section}.params.{key}": made for key, made in (known(name) or {}).items()}
        for key, value in self._flat("", given):
            self._one(key, value)

    def _optimizer_keys(self, name: str) -> Mapping[str, Key] | None:
        self.kind = kind_of(name)
        return None if self.kind is None else self.kind.params

    def _scheduler_keys(self, name: str) -> Mapping[str, Key] | None:
        return params_of(name)

    def _flat(self, prefix: str, given: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        sections = SECTIONS | {"optimizer.params", "scheduler.params", *(k.rpartition(".")[0] for k in RENAMED)}
        for name, value in given.items():
            key = f"{prefix}{name}"
            if isinstance(value, Mapping) and key not in self.keys and key in sections:
                yield from self._flat(f"{key}.", value)
            else:
                yield key, value

    def say(self, key: str, value: Any, kind: str, remark: str = "", ours: str = "") -> None:
        self.rows[key] = Row(key, value, ours, kind, remark)

    def _one(self, written: str, value: Any) -> None:
        key = RENAMED.get(written, written)
        found = self.keys.get(key)
        if found is None:
            self.say(written, value, "refused", self._unknown(key))
            return
        meant = value
        if value == "auto":
            meant = self.auto.value(key)
            if meant is _ABSENT:
                meant = found.default
            if meant is None and found.kind == "mapped":
                self.say(written, value, "mapped", "nothing resolves it")
                return
        else:
            other = self.auto.contradicts(key, value)
            if other is not None:
                self.say(written, value, "refused", other)
                return
        try:
            meant = meant if meant is None else found.takes(meant)
        except ValueError as error:
            self.say(written, value, "refused", str(error))
            return
        if found.kind == "refused" and (meant is None or found.off(meant)):
            self.say(written, value, "needless", "it asks for nothing")
            return
        self.say(written, value, found.kind, found.remark)
        if found.kind == "mapped":
            self.values[key] = meant

    def _unknown(self, key: str) -> str:
        names = [*self.keys, *RENAMED]
        last = key.rpartition(".")[2]
        close = nearest(key, names) or next((name for name in names if name.rpartition(".")[2] == last), None)
        return "DeepSpeed has no such key" + (f": did you mean {close}?" if close else ": leave it out")

    # -- what they become ----------------------------------------------------------------------------------------------

    def get(self, key: str) -> Any:
        found = self.values.get(key)
        return KEYS[key].default if found is None else found

    def ours(self, key: str, text: str, remark: str = "") -> None:
        row = self.rows.get(key)
        if row is not None and row.kind == "mapped":
            self.say(key, row.value, "mapped", remark or row.remark, text)

    def translation(self) -> Translation:
        zero = self._zero()
        micro, accumulate, total = self._batch()
        scale = self._loss_scale()
        optimizer = self._section("optimizer")
        scheduler = self._section("scheduler")
        clip = self.get("gradient_clipping")
        self.ours("gradient_clipping", f"max_grad_norm={clip or None}")
        made = self.kind if optimizer is not None else None
        if made is not None:
            self.ours("optimizer.type", made.ours(optimizer or {}))
        elif optimizer is not None:
            name = self.values["optimizer.type"]
            remark = REFUSED.get(name.lower(), "neither DeepSpeed nor torch.optim has it")
            self.say("optimizer.type", name, "refused", remark)
        return Translation(
            zero=zero,
            rows=tuple(self.rows.values()),
            micro_batch_size=micro,
            accumulate=accumulate,
            train_batch_size=total,
            max_grad_norm=clip or None,
            _optimizer=None if made is None else (made, optimizer or {}),
            _scheduler=None if scheduler is None else (self.values["scheduler.type"], scheduler),
            _scale=scale,
        )

    def _section(self, section: str) -> dict[str, Any] | None:
        """The parameters of the section, None where it has no type."""
        if f"{section}.type" not in self.values:
            return None
        start = f"{section}.params."
        found = {key[len(start) :]: value for key, value in self.values.items() if key.startswith(start)}
        for name, value in found.items():
            self.ours(start + name, f"{name}={value!r}")
        self.ours(f"{section}.type", self.values[f"{section}.type"])
        return found

    def _zero(self) -> ZeroConfig:
        start = "zero_optimization."
        stage = self.get(f"{start}stage")
        self.ours(f"{start}stage", f"stage: {stage}")
        options: dict[str, Any] = {"stage": stage}
        paths: list[str] = []
        for theirs, kinds in (("offload_optimizer", ("optimizer", "gradients")), ("offload_param", ("parameters",))):
            device = self.get(f"{start}{theirs}.device")
            path = self.values.get(f"{start}{theirs}.nvme_path")
            place = {"none": "device", "cpu": "host", "nvme": "nvme"}[device]
            self.ours(f"{start}{theirs}.device", ", ".join(f"{kind}: {place}" for kind in kinds))
            options |= dict.fromkeys(kinds, place)
            if place == "nvme":
                paths += [path] if path and path not in paths else []
                self.ours(f"{start}{theirs}.nvme_path", "nvme_paths")
        if "nvme" in options.values() and not paths:
            return ZeroConfig(stage=stage)
        dtype = "bf16" if self.get("bf16.enabled") else None
        self.ours("bf16.enabled", f"param_dtype: {dtype}")
        return ZeroConfig(**options, nvme_paths=tuple(paths), param_dtype=dtype)

    def _batch(self) -> tuple[int | None, int | None, int | None]:
        keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
        micro, accumulate, total = (self.values.get(key) for key in keys)
        if total is not None and micro is None and accumulate is None:
            accumulate = 1
        if micro is not None and total is None:
            accumulate = accumulate or 1
            total = micro * accumulate * self.ranks
        elif total is not None and micro is not None and accumulate is None:
            accumulate = total // micro // self.ranks
        elif total is not None and micro is None and accumulate is not None:
            micro = total // self.ranks // accumulate
        for key, value, name in zip(
            keys, (micro, accumulate, total), ("micro_batch_size", "accumulate", "train_batch_size"), strict=True
        ):
            self.ours(key, f"{name}={value}")
        return micro, accumulate, total

    def _loss_scale(self) -> dict[str, Any] | None:
        if not self.get("fp16.enabled"):
            return None
        fixed = self.get("fp16.loss_scale")
        if fixed:
            return {"value": float(fixed), "dynamic": False}
        window = self.get("fp16.loss_scale_window")
        return {"value": 2.0 ** self.get("fp16.initial_scale_power"), "window": window}
