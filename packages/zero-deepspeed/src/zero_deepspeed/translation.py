"""`from_deepspeed` translates a JSON of DeepSpeed's key by key, and has a table that says how."""

from __future__ import annotations

import functools
import json
import os
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

import zero_core
from zero_core.comm.ranks import mesh_of_replicas
from zero_core.errors import ConfigError

from . import optimizers, sections
from .reading import Auto, Reading, Row
from .schedules import make
from .sharding import Settings

__all__ = ["Row", "Translation", "from_deepspeed", "loaded", "translate"]

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
        options: dict[str, Any] = {}
        if self.reduce_dtype is not None:
            options["reduce_dtype"] = self.reduce_dtype
        if self.shard_size is not None:
            here = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
            if here != self.ranks:
                raise ConfigError(
                    f"mics_shard_size={self.shard_size} was read for {self.ranks} ranks and there are {here}: call "
                    "torch.distributed.init_process_group first, and read the file for these ranks"
                )
            gloo = torch.distributed.get_backend() == "gloo"
            found = None if gloo else torch.accelerator.current_accelerator()
            device = "cpu" if found is None else found.type
            options["mesh"] = mesh_of_replicas(device, self.ranks // self.shard_size, here)
        return options

    def optimizer(self, parameters: Any) -> torch.optim.Optimizer | None:
        """Returns the optimizer over `parameters`, tensors or groups; None: the file has none.

        Raises:
            ConfigError: the file has Lion, and zero-optim-cpu is not installed.
        """
        if self._optimizer is None:
            return None
        name, params = self._optimizer
        return optimizers.make(name, parameters, params)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler | None:
        """Returns the schedule of `optimizer`; None: the file has none. It sets the first learning rates at once."""
        if self.schedule is None:
            return None
        name, params = self.schedule
        return make(name, optimizer, params)

    def settings(self) -> dict[str, Any]:
        """Returns the settings that the file makes, by their names here, without those that are off."""
        found = {each.name: getattr(self.zero, each.name) for each in fields(Settings)} | self.zero.placements
        own = ("micro_batch_size", "accumulate", "train_batch_size", "autocast", "drop_last", "shard_size")
        found |= {name: getattr(self, name) for name in (*own, "reduce_dtype", "schedule")}
        found |= {"loss_scale": self.loss_scale_options, "max_grad_norm": self.max_grad_norm}
        return {
            name: value for name, value in found.items() if value is not None and value is not False and value != ()
        }

    def table(self, width: int = 150) -> str:
        """Returns the rows as lines of text, their key, its value, its name here, the remark, and then the settings."""
        cells = [("DeepSpeed", "value", "here", "remark")]
        for row in self.rows:
            ours = row.ours if row.kind == "mapped" else {"needless": "-", "refused": "REFUSED"}[row.kind]
            value = "" if row.value is None else json.dumps(row.value, default=str)
            cells.append((row.key, value if len(value) <= 32 else f"{value[:29]}...", ours, row.remark))
        widths = [max(len(row[column]) for row in cells) for column in range(3)]
        room = max(40, width - sum(widths) - 6)
        lines = []
        for *left, remark in cells:
            wrapped = textwrap.wrap(remark, room, break_long_words=False, break_on_hyphens=False) or [""]
            start = "  ".join(cell.ljust(size) for cell, size in zip(left, widths, strict=True))
            lines.append(f"{start}  {wrapped[0]}".rstrip())
            lines += [" " * (sum(widths) + 6) + line for line in wrapped[1:]]
        said = "here: " + ", ".join(f"{name}={value}" for name, value in self.settings().items())
        return "\n".join([*lines, *textwrap.wrap(said, width, subsequent_indent="  ", break_on_hyphens=False)])


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
    read = Reading(loaded(config), Auto(arguments, model, ranks, num_training_steps))
    dtype = sections.param_dtype(read)
    zero = settings(**sections.zero(read, dtype, model, ranks))
    micro, accumulate, total = sections.batch(read, ranks)
    reduce_dtype = read.get("communication_data_type")
    if "gradient_clipping" not in read:
        remark = "DeepSpeed 0.19.8's default. Earlier versions did not clip: for that, write 0"
        read.rows["gradient_clipping"] = Row("gradient_clipping", None, "max_grad_norm", "mapped", remark)
    options: dict[str, Any] = {
        "max_grad_norm": read.get("gradient_clipping") or None,
        "autocast": sections.autocast(read, dtype),
        "drop_last": read.get("dataloader_drop_last"),
        "shard_size": sections.shard_size(read, zero.stage, ranks),
        "reduce_dtype": None if reduce_dtype is None else sections.DTYPES[reduce_dtype],
        "schedule": sections.scheduler(read),
        "loss_scale_options": sections.loss_scale(read, zero.stage, dtype),
        "_optimizer": sections.optimizer(read),
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
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))
