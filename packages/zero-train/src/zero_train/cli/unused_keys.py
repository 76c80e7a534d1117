"""Refuses keys on the command line that the chosen options do not use, so that no key is ignored silently.

Owns the table of those keys. Every run uses the keys that are not in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from zero_train.declare import OPTIMIZERS, ROW_KINDS, TUNES, rate
from zero_train.errors import ConfigError
from zero_train.schema import Config
from zero_train.settings import placement

_TUNES, _ROWS, _OFFLOADS = " ".join(TUNES), " ".join(ROW_KINDS), "host nvme auto"


class Row(NamedTuple):
    """Keys that only some runs use."""

    keys: str  # separated by spaces
    chosen: str  # the key or group that decides
    used: str  # its values that use the keys, separated by spaces; NUMBER: all but 0 and null; "": it is left out
    test: Callable[[Config], bool] | None = None  # whether a run uses the keys, where `used` is the way out alone


def _follows(config: Config) -> bool:
    """Returns whether optim.lr was left to follow from optim.base_lr."""
    return config.optim.lr == rate(config.optim.base_lr, config.optim.kind, config.adapter.kind)


NUMBER = "NUMBER"
TABLE = (
    Row("model.hidden_size model.intermediate_size model.layers model.heads", "model", "llama gpt2 moe"),
    Row("model.vocab_size model.tie_embeddings", "model", "llama gpt2 moe"),
    Row("model.key_value_heads", "model", "llama moe"),
    Row("model.experts model.experts_per_token", "model", "moe"),
    Row("model.path data.as_bytes", "model", "hf"),
    Row("data.path", "data", f"text {_ROWS}"),
    Row("data.sources", "data", "mixture"),
    Row("data.chat_template", "task", _TUNES),
    Row("adapter", "task", _TUNES, lambda config: config.adapter.kind == "none" or config.task.kind != "pretrain"),
    Row("tracker", "task", _TUNES, lambda config: config.tracker.kind == "none" or config.task.kind != "pretrain"),
    Row("data.tokenizer zero.no_sync run.sample_bytes", "task", "pretrain"),
    Row("data.pattern", "data", "text jsonl parquet csv"),
    Row("data.pattern", "data.path", "FOLDER", lambda config: not Path(str(config.data.path)).is_file()),
    Row("data.validation_path", "data", _ROWS),
    Row("data.validation_fraction", "data.validation_path", "null"),
    Row("zero.resident_bytes zero.expert_bytes", "zero.stage", "3"),
    Row("offload.parameters offload.gradients offload.optimizer", "offload", "host nvme"),
    Row("offload.planned", "offload", "auto"),
    Row("offload.update_share", "offload", _OFFLOADS),
    Row("tier", "offload.optimizer", "compressed", placement.uses_tiers),
    Row("offload.tile_numel offload.slots offload.overlap optim.threads precision.states", "offload", _OFFLOADS),
    Row("offload.nvme_paths io io.backend", "offload", "nvme auto", placement.uses_nvme),
    *(
        Row(f"optim.{key}", "optim", " ".join(kind for kind, keys in OPTIMIZERS.items() if key in keys))
        for key in sorted({key for keys in OPTIMIZERS.values() for key in keys})
    ),
    Row("optim.base_lr", "optim.lr", "", _follows),
    Row("task.loss_on task.packing", "task", "sft"),
    Row("task.beta", "task", "dpo kto"),
    Row("adapter.rank adapter.alpha adapter.dropout adapter.rslora adapter.dora", "adapter", "lora qlora"),
    Row("adapter.targets adapter.merge", "adapter", "lora qlora"),
    Row("run.steps", "run.epochs", "null"),
    Row("run.accumulate", "run.global_batch", "null"),
    Row("run.keep_checkpoints", "run.checkpoint_every", NUMBER),
    Row("run.evaluate_batches run.keep_best run.patience", "run.evaluate_every", NUMBER),
    Row("run.sample_prompt run.sample_temperature", "run.sample_bytes", NUMBER),
    Row("run.keep_best run.patience", "task", _TUNES),
)


def check(given: Iterable[str], jobs: Sequence[Config]) -> None:
    """Refuses a key of the command line that none of its jobs uses. Recipes may hold keys that are not used.

    Raises:
        ConfigError: names the key, the choice that leaves it unused, and a choice that would use it.
    """
    for key, row in ((key, row) for key in given for row in TABLE if key in row.keys.split()):
        if not any(config.run.probe or _uses(row, config) for config in jobs):
            values = sorted({f"{row.chosen}={_value(config, row.chosen)}" for config in jobs})
            way_out = f"choose {row.chosen}={row.used.replace(' ', ' or ')}" if row.used else row.chosen
            raise ConfigError(f"{key} is given and not used with {' or '.join(values)}; leave {key} out, or {way_out}")


def _uses(row: Row, config: Config) -> bool:
    value = _value(config, row.chosen)
    if row.test is not None:
        return row.test(config)
    return value not in ("0", "null") if row.used == NUMBER else value in row.used.split()


def _value(config: Config, key: str) -> str:
    """Returns the value of a key, or the option of a group as far as its kind tells it."""
    section, _, name = key.partition(".")
    value = getattr(getattr(config, section), name or "kind")
    return {"placed": "host", "None": "null"}.get(str(value), str(value))  # nvme uses the same keys as host
