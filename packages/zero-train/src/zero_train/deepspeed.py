"""`deepspeed=ds_config.json` on the command line: which keys of a run the file sets. zero-deepspeed reads it."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError
from zero_train.schema import OPTIMIZERS

WORD = "deepspeed"
_FORMATS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "Lion": "lion", "Adagrad": "adagrad", "SGD": "sgd"}
_AUTO = 'nothing resolves "auto"'  # there, and here the run's own keys do
_RANKS = ("say the ranks with world_size=", "start as many ranks with torchrun")
_NOT_OF_A_GROUP = ("offload.nvme_paths", "optim.max_grad_norm", "optim.schedule", "precision.reduce")
_DECAY = {"optimizer.params.weight_decay": "matrices alone are decayed here, and all in DeepSpeed"}
_OWN = {  # "auto" in these is what the run's own key says
    "warmup_min_lr": 0.0,
    "warmup_max_lr": "${optim.lr}",
    "warmup_num_steps": "${optim.warmup_steps}",
    "total_num_steps": "${run.steps}",
}


def read(path: str, given: Collection[str], say: Callable[[str], None]) -> list[str]:
    """Returns the settings of a DeepSpeed JSON as words of a command line, and says it in a table.

    given: the keys and groups on the command line, which win. A value of "auto" leaves the run's own.

    Raises:
        ConfigError: zero-deepspeed is not installed, or the file cannot be read or has keys that cannot be followed.
    """
    try:
        translation: Any = importlib.import_module("zero_deepspeed.translation")
        found = translation.translate(path, world_size=int(os.environ.get("WORLD_SIZE", "1")))
    except ImportError as error:
        raise ConfigError(
            f"{WORD}={path} needs zero-deepspeed ({error}); pip install 'zero-train[deepspeed]'"
        ) from error
    except ValueError as error:  # zero_deepspeed.ConfigError
        raise ConfigError(str(error)) from error
    import torch  # seconds, which a command line without a file should not cost

    optimizer = found.optimizer([torch.nn.Parameter(torch.zeros(1))])
    rows = {}
    for row in found.rows:
        if row.value == "auto" and (row.kind == "mapped" or _AUTO in row.remark):
            row = replace(row, kind="mapped", ours="the run's own", remark="")
        rows[row.key] = replace(row, remark=_DECAY.get(row.key, row.remark.replace(*_RANKS)))
    for key, remark in _refusals(found, optimizer):
        if key in rows:
            rows[key] = replace(rows[key], kind="refused", remark=remark)
    refused = [row.key for row in rows.values() if row.kind == "refused"]
    say(replace(found, rows=tuple(rows.values())).table())
    if refused:
        raise ConfigError(
            f"{WORD}={path} has keys that cannot be followed: {', '.join(refused)}; the table says why, and what to "
            "write instead"
        )
    words, lost = [], []
    for key, value in _settings(found, optimizer, given):
        group = key.partition(".")[0]
        if key in given or group in given and key not in _NOT_OF_A_GROUP:
            lost.append(key)
        else:
            words.append(f"{key}={_text(value)}")
    say(f"in this run: {' '.join(words)}")
    if lost:
        say(f"of the command line: {', '.join(lost)}")
    return words


def _refusals(found: Any, optimizer: Any) -> Iterator[tuple[str, str]]:
    """Keys of the file that zero-deepspeed follows, and this program does not, each with the way out."""
    if found.autocast is not None:
        yield "torch_autocast.enabled", "zero-train computes in the parameters' format: write bf16 instead"
    if optimizer is not None and type(optimizer).__name__ not in _OPTIMIZERS:
        yield "optimizer.type", f"zero-train has {', '.join(_OPTIMIZERS.values())}: take one of them"
    elif optimizer is not None:
        known = {"lr", "weight_decay", *OPTIMIZERS[_OPTIMIZERS[type(optimizer).__name__]], "params"}
        default = type(optimizer)(optimizer.param_groups[0]["params"]).param_groups[0]
        for name, value in optimizer.param_groups[0].items():
            if name in default and name not in known and value != default[name]:
                yield f"optimizer.params.{name}", "zero-train has no key for it: leave it out"
    own = importlib.import_module("zero_deepspeed.schedules").SCHEDULES
    if found.schedule is not None and found.schedule[0] not in own:
        yield "scheduler.type", "zero-train takes DeepSpeed's own schedules only, or optim.warmup_steps"


def _settings(found: Any, optimizer: Any, given: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Keys of a run, and the values that the file gives them."""
    auto = {row.key for row in found.rows if row.value == "auto"}
    said = {row.ours for row in found.rows if row.kind == "mapped" and row.key not in auto}
    zero, places = found.zero, found.zero.placements
    tiers = {tier for place in places.values() for tier in ([place] if isinstance(place, str) else place)}
    yield "zero.stage", zero.stage
    for name in ("prefetch_bytes", "resident_bytes"):
        if zero.stage == 3 and name in said:
            yield f"zero.{name}", getattr(zero, name)
    if "shard_size" in said:
        yield "zero.replicas", 1 if found.shard_size is None else found.ranks // found.shard_size
    yield "offload", "nvme" if "nvme" in tiers else "host" if "host" in tiers else "none"
    if tiers != {"device"}:
        yield from ((f"offload.{kind}", places[kind]) for kind in ("parameters", "gradients", "optimizer"))
    if "nvme" in tiers:
        yield "offload.nvme_paths", list(zero.nvme_paths)
    if not auto & {"bf16.enabled", "fp16.enabled", "bfloat16.enabled"}:
        yield "precision", zero.param_dtype or "fp32"
    scale = found.loss_scale_options
    if scale is not None:
        yield "precision.loss_scale", scale if scale.get("dynamic", True) else scale["value"]
    if found.reduce_dtype is not None:
        yield "precision.reduce", _FORMATS[str(found.reduce_dtype)]
    if optimizer is not None:
        kind, options = _OPTIMIZERS[type(optimizer).__name__], optimizer.param_groups[0]
        yield "optim", kind
        for key in ("lr", "weight_decay", *OPTIMIZERS[kind]):
            if f"optimizer.params.{key}" not in auto:
                yield f"optim.{key}", list(options[key]) if key == "betas" else options[key]
    if found.schedule is not None:
        params = found.schedule[1] | {key: own for key, own in _OWN.items() if f"scheduler.params.{key}" in auto}
        rates = {"optim.final_fraction", "optim.warmup_steps"} & set(given)
        if "${optim.warmup_steps}" in params.values():
            rates.discard("optim.warmup_steps")
        if not rates:
            yield "optim.schedule", {"type": found.schedule[0], "params": params}
    for key, theirs, value in (
        ("run.micro_batch", "train_micro_batch_size_per_gpu", found.micro_batch_size),
        ("run.accumulate", "gradient_accumulation_steps", found.accumulate),
    ):
        if value is not None and theirs not in auto:
            yield key, value
    if "gradient_clipping" not in auto:
        yield "optim.max_grad_norm", found.max_grad_norm


def _text(value: Any) -> str:
    """Returns a value as Hydra reads it on a command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(map(_text, value)) + "]"
    if isinstance(value, str) and not value.isidentifier() and not value.startswith("${"):
        return "'" + value.replace("'", "\\'") + "'"
    return str(value)


def split(words: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns the words without `deepspeed=PATH`, and the path; None: there is none.

    Raises:
        ConfigError: there are two, or the path is empty.
    """
    found = [word.partition("=")[2] for word in words if word.startswith(f"{WORD}=")]
    if not found:
        return list(words), None
    if len(found) > 1 or not found[0]:
        raise ConfigError(f"{WORD}= names one file: write {WORD}=ds_config.json once")
    return [word for word in words if not word.startswith(f"{WORD}=")], str(Path(found[0]))
