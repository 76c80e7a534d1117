"""Refuses keys on the command line that the chosen options do not use, so that no key is ignored silently.

Owns the table of those keys. Every run uses the keys that are not in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from zero_train import places
from zero_train.errors import ConfigError
from zero_train.schema import OPTIMIZERS, ROW_KINDS, TUNES, Config, rate

_TASKS = " ".join(TUNES)
_TUNE = "choose task=sft, task=dpo or task=reward"


class Row(NamedTuple):
    """Keys that only some runs use."""

    keys: str  # separated by spaces
    chosen: str  # the key or group that decides
    used: str  # its values that use the keys, separated by spaces; with a test, the way out
    test: Callable[[Config], bool] | None = None  # whether a run uses the keys


def _is_number(key: str, config: Config) -> bool:
    return _value(config, key) not in ("0", "null")


_ROWS, _SIZES = " ".join(ROW_KINDS), "model.hidden_size model.intermediate_size model.layers model.heads"
_PLACES = "offload.parameters offload.gradients offload.optimizer"
_ADAPTERS = "rank alpha dropout rslora dora targets merge"
_BEST = "run.keep_best run.patience run.min_improvement"
TABLE = (
    Row(f"{_SIZES} model.vocab_size model.tie_embeddings", "model", "llama gpt2 moe"),
    Row("model.key_value_heads", "model", "llama moe"),
    Row("model.experts model.experts_per_token", "model", "moe"),
    Row("model.path data.as_bytes", "model", "hf"),
    Row("model.checkpointing", "offload.activations", "null"),
    Row("data.path", "data", f"text {_ROWS}"),
    Row("data.sources", "data", "mixture"),
    Row("data.chat_template", "task", _TASKS),
    Row("data.tokenizer", "task", "pretrain"),
    Row("data.pattern", "data", "text jsonl parquet csv"),
    Row("data.validation_path", "data", _ROWS),
    Row("data.validation_fraction", "data.validation_path", "null"),
    Row("zero.resident_bytes zero.expert_bytes", "zero.stage", "3"),
    Row(_PLACES, "offload", "host nvme"),
    Row("tier", "offload", "place something there with offload=host offload.optimizer=NAME", places.uses_tiers),
    Row("offload.tile_numel offload.slots offload.overlap optim.threads", "offload", "host nvme auto"),
    Row("precision.states", "offload", "host nvme auto"),
    Row(
        "offload.nvme_paths io io.backend",
        "offload",
        "choose offload=nvme or auto",
        lambda config: config.offload.kind == "auto" or places.uses_nvme(config),
    ),
    *(
        Row(f"optim.{key}", "optim", " ".join(kind for kind, keys in OPTIMIZERS.items() if key in keys))
        for key in sorted({key for keys in OPTIMIZERS.values() for key in keys})
    ),
    Row(
        "optim.base_lr",
        "optim.lr",
        "leave optim.lr out, which base_lr decides if it is not given",
        lambda config: config.optim.lr == rate(config.optim.base_lr, config.optim.kind, config.adapter.kind),
    ),
    Row("optim.final_fraction", "optim.schedule", "null"),
    Row(
        "optim.lr optim.base_lr",
        "optim.schedule",
        "give the schedule this rate, such as params: {warmup_max_lr: …}",
        lambda config: _takes(config, config.optim.lr, ("WarmupCosineLR", ""), ("WarmupLR", "warmup_max_lr")),
    ),
    Row(
        "optim.warmup_steps",
        "optim.schedule",
        "give the schedule these steps, such as params: {warmup_num_steps: …}",
        lambda config: _takes(config, config.optim.warmup_steps),
    ),
    Row("task.loss_on task.packing", "task", "sft"),
    Row("task.beta", "task", "dpo kto"),
    Row(" ".join(f"adapter.{key}" for key in _ADAPTERS.split()), "adapter", "lora qlora"),
    Row("adapter", "task", _TUNE, lambda config: config.adapter.kind == "none" or config.task.kind != "pretrain"),
    Row("tracker", "task", _TUNE, lambda config: config.tracker.kind == "none" or config.task.kind != "pretrain"),
    Row("zero.no_sync run.sample_bytes", "task", "pretrain"),
    Row("run.steps", "run.epochs", "null"),
    Row("run.accumulate", "run.global_batch", "null"),
    *(
        Row(keys, chosen, f"set {chosen} to a number", partial(_is_number, chosen))
        for keys, chosen in (
            ("run.keep_checkpoints", "run.checkpoint_every"),
            (f"run.evaluate_batches {_BEST}", "run.evaluate_every"),
            ("run.min_improvement", "run.patience"),
            ("run.sample_prompt run.sample_temperature", "run.sample_bytes"),
        )
    ),
    Row("run.durable_every", "run.durable", "power process"),
    Row(_BEST, "task", _TASKS),
)


def check(given: Iterable[str], jobs: Sequence[Config]) -> None:
    """Refuses a key of the command line that none of its jobs uses. Recipes may hold keys that are not used.

    Raises:
        ConfigError: names the key, the choice that leaves it unused, and a choice that would use it.
    """
    for key, row in ((key, row) for key in given for row in TABLE if key in row.keys.split()):
        if not any(config.run.probe or _uses(row, config) for config in jobs):
            values = sorted({f"{row.chosen}={_value(config, row.chosen)}" for config in jobs})
            way_out = row.used if row.test else f"choose {row.chosen}={row.used.replace(' ', ' or ')}"
            raise ConfigError(
                f"{key} is given, but nothing uses it with {' or '.join(values)}; leave {key} out, or {way_out}"
            )


def _uses(row: Row, config: Config) -> bool:
    return row.test(config) if row.test else _value(config, row.chosen) in row.used.split()


def _takes(config: Config, value: float | None, *kinds: tuple[str, str]) -> bool:
    """Returns whether optim.schedule, if there is one, uses a value of the run's: it names it, or is one of `kinds`.

    kinds: types of schedules that take it where they lack a parameter of this name.
    """
    schedule = config.optim.schedule
    if not isinstance(schedule, Mapping) or not isinstance(params := schedule.get("params") or {}, Mapping):
        return True  # none, or one that cannot be made
    return value in params.values() or any(
        schedule.get("type") == kind and params.get(name) is None for kind, name in kinds
    )


def _value(config: Config, key: str) -> str:
    """Returns the value of a key, or the option of a group as far as its kind tells it."""
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name or "kind")
    return {"placed": "host", "None": "null"}.get(str(value), str(value))  # nvme uses the same keys as host
