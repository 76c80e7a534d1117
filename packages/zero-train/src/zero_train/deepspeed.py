"""`deepspeed=ds_config.json` on the command line: which keys of a run the file sets. zero-deepspeed reads it."""

from __future__ import annotations

import dataclasses
import importlib
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError
from zero_train.schema import OPTIMIZERS

WORD = "deepspeed"
_FORMATS = {"torch.float32": "fp32", "torch.bfloat16": "bf16", "torch.float16": "fp16"}
_OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam", "Lion": "lion", "Adagrad": "adagrad", "SGD": "sgd"}
_ZERO = "zero_optimization."
_AUTO = 'nothing resolves "auto"'  # there, and here the run's own keys do
_RANKS = ("say the ranks with world_size=", "start as many ranks with torchrun")
_PLACES = {
    "parameters": (f"{_ZERO}offload_param.device", f"{_ZERO}offload_param.max_in_cpu", f"{_ZERO}cpu_offload_param"),
    "optimizer": (f"{_ZERO}offload_optimizer.device", f"{_ZERO}offload_optimizer.ratio", f"{_ZERO}cpu_offload"),
}
_OWN = {  # "auto" in these is what the run's own key says
    "warmup_min_lr": 0.0,
    "warmup_max_lr": "${optim.lr}",
    "warmup_num_steps": "${optim.warmup_steps}",
    "total_num_steps": "${run.steps}",
}


def read(path: str, given: Collection[str]) -> tuple[list[str], str]:
    """Returns what a DeepSpeed JSON sets, as words of a command line, and the table that says so.

    given: the keys and groups on the command line, which win. A value of "auto" leaves the run's own.

    Raises:
        ConfigError: zero-deepspeed is not installed, or the file cannot be read. Refused keys are in the table, marked.
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
    made = _Words(found, given)
    table = dataclasses.replace(found, rows=tuple(made.rows.values())).table()
    refused = [row.key for row in made.rows.values() if row.kind == "refused"]
    if refused:
        raise Refused(
            f"{WORD}={path} has keys that cannot be followed: {', '.join(refused)}; the table says why, and what to "
            "write instead",
            table,
        )
    return made.words, table


class Refused(ConfigError):
    """A file with keys that cannot be followed. table: its translation, to print before the error."""

    def __init__(self, text: str, table: str) -> None:
        super().__init__(text)
        self.table = table


class _Words:
    """Goes through a translation once: `words` for a command line, and `rows` that name this program's keys."""

    def __init__(self, found: Any, given: Collection[str]) -> None:
        self.found, self.given, self.words = found, given, list[str]()
        told = [dataclasses.replace(row, remark=row.remark.replace(*_RANKS)) for row in found.rows]
        self.rows = {row.key: row for row in told}
        for row in told:
            if row.value == "auto" and (row.kind == "mapped" or _AUTO in row.remark):
                self._say(row.key, "the run's own", kind="mapped")
        self._zero()
        self._offload()
        self._precision()
        self._optimizer()
        self._schedule()
        self._loop()

    def _zero(self) -> None:
        zero = self.found.zero
        self._set("zero.stage", zero.stage, f"{_ZERO}stage", group="zero")
        if zero.stage == 3:
            self._set("zero.prefetch_bytes", zero.prefetch_bytes, f"{_ZERO}stage3_prefetch_bucket_size", only=True)
            for key in ("stage3_max_live_parameters", "stage3_max_reuse_distance"):
                self._set("zero.resident_bytes", zero.resident_bytes, f"{_ZERO}{key}", only=True)
        replicas = 1 if self.found.shard_size is None else self.found.ranks // self.found.shard_size
        self._set("zero.replicas", replicas, f"{_ZERO}mics_shard_size", only=True)

    def _offload(self) -> None:
        zero = self.found.zero
        places = zero.placements
        tiers = {tier for place in places.values() for tier in ([place] if isinstance(place, str) else place)}
        self._set("offload", "nvme" if "nvme" in tiers else "host" if "host" in tiers else "none")
        if tiers == {"device"}:
            for keys in _PLACES.values():
                for key in keys:
                    self._set("offload", "none", key, only=True)
            return
        for kind in ("parameters", "gradients", "optimizer"):
            self._set(f"offload.{kind}", places[kind], *_PLACES.get(kind, ()), group="offload")
        if "nvme" in tiers:
            theirs = (f"{_ZERO}{section}.nvme_path" for section in ("offload_param", "offload_optimizer"))
            self._set("offload.nvme_paths", list(zero.nvme_paths), *theirs)

    def _precision(self) -> None:
        auto = any(self._is_auto(f"{name}.enabled") for name in ("bf16", "fp16"))
        if not auto:
            dtype = self.found.zero.param_dtype or "fp32"
            self._set("precision", dtype, "data_types.param_dtype", "bf16.enabled", "bfloat16.enabled", "fp16.enabled")
        scale = self.found.loss_scale_options
        if scale is not None:
            value = scale if scale.get("dynamic", True) else scale["value"]
            keys = [key for key in self.rows if key.startswith("fp16.") and self.rows[key].ours != "-"]
            self._set("precision.loss_scale", value, *(key for key in keys if key != "fp16.enabled"), group="precision")
        if self.found.reduce_dtype is not None:
            self._set("precision.reduce", _FORMATS[str(self.found.reduce_dtype)], "communication_data_type")
        if self.found.autocast is not None:
            self._refuse("torch_autocast.enabled", "zero-train computes in the parameters' format: write bf16 instead")

    def _optimizer(self) -> None:
        import torch  # seconds, which a command line without a file should not cost

        optimizer = self.found.optimizer([torch.nn.Parameter(torch.zeros(1))])
        if optimizer is None:
            return
        kind = _OPTIMIZERS.get(type(optimizer).__name__)
        if kind is None:
            self._refuse("optimizer.type", f"zero-train has {', '.join(_OPTIMIZERS.values())}: take one of them")
            return
        self._set("optim", kind, "optimizer.type")
        options = optimizer.param_groups[0]
        for key in ("lr", "weight_decay", *OPTIMIZERS[kind]):
            value = list(options[key]) if key == "betas" else options[key]
            if not self._is_auto(f"optimizer.params.{key}"):
                self._set(f"optim.{key}", value, f"optimizer.params.{key}", group="optim")
        if "optimizer.params.weight_decay" in self.rows:
            self._say("optimizer.params.weight_decay", remark="matrices alone are decayed here, and all in DeepSpeed")
        known = {"lr", "weight_decay", *OPTIMIZERS[kind], "adam_w_mode", "torch_adam"}
        default = type(optimizer)([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
        for name in set(options) & set(default) - known - {"params"}:
            if options[name] != default[name]:
                self._refuse(f"optimizer.params.{name}", "zero-train has no key for it: leave it out")

    def _schedule(self) -> None:
        if self.found.schedule is None:
            return
        name, params = self.found.schedule
        if name not in importlib.import_module("zero_deepspeed.schedules").SCHEDULES:
            self._refuse("scheduler.type", "zero-train takes DeepSpeed's own schedules only, or optim.warmup_steps")
            return
        values = dict(params)
        for key in list(_OWN):
            if self._is_auto(f"scheduler.params.{key}"):
                values[key] = _OWN[key]
        keys = [key for key in self.rows if key.startswith("scheduler.")]
        own = [key for key in ("optim.final_fraction", "optim.warmup_steps") if key in self.given]
        if "${optim.warmup_steps}" in values.values():
            own = [key for key in own if key != "optim.warmup_steps"]
        self._set(
            "optim.schedule", {"type": name, "params": values}, *keys,
            group=own[0] if own else "", shown=f"optim.schedule={{type:{name}}}",
        )  # fmt: skip

    def _loop(self) -> None:
        found = self.found
        for ours, theirs, value in (
            ("run.micro_batch", "train_micro_batch_size_per_gpu", found.micro_batch_size),
            ("run.accumulate", "gradient_accumulation_steps", found.accumulate),
        ):
            if value is not None and not self._is_auto(theirs):
                self._set(ours, value, theirs)
        if found.micro_batch_size is not None:
            product = "run.micro_batch × run.accumulate × ranks"
            self._say("train_batch_size", product, only=True)
        if not self._is_auto("gradient_clipping"):
            self._set("optim.max_grad_norm", found.max_grad_norm, "gradient_clipping")
        self._say("dataloader_drop_last", "every batch is whole", only=True)

    # -- rows and words ------------------------------------------------------------------------------------------------

    def _is_auto(self, key: str) -> bool:
        return key in self.rows and self.rows[key].value == "auto"

    def _set(
        self, key: str, value: Any, *theirs: str, group: str = "", only: bool = False, shown: str | None = None
    ) -> None:
        """Adds KEY=VALUE unless the command line says it. only: if the file has `theirs`."""
        there = [row for row in theirs if row in self.rows and not self._is_auto(row)]
        if only and not there:
            return
        won = key if key in self.given else group if group in self.given else ""
        word = f"{key}={_text(value)}"
        if not won and word not in self.words:
            self.words.append(word)
        for row in there:
            self._say(row, f"{won} of the command line" if won else shown or word)

    def _say(self, key: str, ours: str = "", *, remark: str = "", kind: str = "", only: bool = True) -> None:
        row = self.rows.get(key)
        if row is None or row.kind == "refused" and not kind:
            return
        kind = kind or row.kind
        said = row.remark if row.kind == kind else ""
        self.rows[key] = dataclasses.replace(row, ours=ours or row.ours, kind=kind, remark=remark or said)

    def _refuse(self, key: str, remark: str) -> None:
        row = self.rows.get(key)
        if row is not None:
            self.rows[key] = dataclasses.replace(row, kind="refused", remark=remark)


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
