"""Refuses keys on the command line that the chosen options do not use, so that no key is ignored silently.

Owns the table of those keys. Every run uses the keys that are not in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from zero_train import places
from zero_train.errors import ConfigError
from zero_train.schema import OPTIMIZERS, ROW_KINDS, Config, rate

ABOVE_ZERO = "above 0"
_TUNE = "choose task=sft, task=dpo or task=reward"


@dataclass(frozen=True)
class Row:
    """Keys that only some runs use."""

    keys: str  # separated by spaces
    chosen: str  # the key or group that decides
    used: str | Callable[[Config], bool]  # its values that use the keys, separated by spaces; or a test of the whole
    way_out: str = ""  # if not to choose one of those values

    def is_used(self, config: Config) -> bool:
        """Returns whether a run with this configuration uses the keys."""
        value = _value(config, self.chosen)
        if callable(self.used):
            return self.used(config)
        return (value == "epoch" or int(value) > 0) if self.used == ABOVE_ZERO else value in self.used.split()


TABLE = (
    Row(
        "model.hidden_size model.intermediate_size model.layers model.heads model.vocab_size model.tie_embeddings",
        "model",
        "llama gpt2 moe",
        "choose model=llama, gpt2 or moe (model=hf takes its sizes from its folder)",
    ),
    Row("model.key_value_heads", "model", "llama moe"),
    Row("model.experts model.experts_per_token", "model", "moe"),
    Row("model.path data.as_bytes", "model", "hf"),
    Row("model.checkpointing", "offload.activations", "null"),
    Row("data.path", "data", " ".join(("text", *ROW_KINDS))),
    Row("data.sources", "data", "mixture"),
    Row("data.chat_template", "task", "sft dpo reward"),
    Row("data.tokenizer", "task", "pretrain"),
    Row("data.pattern", "data", "text jsonl parquet csv"),
    Row("data.validation_path", "data", " ".join(ROW_KINDS)),
    Row("data.validation_fraction", "data.validation_path", "null"),
    Row("zero.resident_bytes zero.expert_bytes", "zero.stage", "3"),
    Row(
        "offload.parameters offload.gradients offload.optimizer",
        "offload",
        "host",
        "choose offload=host or nvme, whose placements these keys change",
    ),
    Row(
        "tier",
        "offload",
        places.uses_tiers,
        "place something there, for instance with offload=host offload.optimizer=NAME",
    ),
    Row(
        "offload.tile_numel offload.slots offload.overlap optim.threads precision.states",
        "offload",
        "host auto",
        "choose offload=host, nvme or auto",
    ),
    Row(
        "offload.nvme_paths io io.backend",
        "offload",
        lambda config: config.offload.kind == "auto" or places.uses_nvme(config),
        "choose offload=nvme or auto",
    ),
    *(
        Row(f"optim.{key}", "optim", " ".join(kind for kind, keys in OPTIMIZERS.items() if key in keys))
        for key in ("betas", "eps", "momentum", "matrix_lr", "adjust_lr", "orthogonal")
    ),
    Row(
        "optim.base_lr",
        "optim.lr",
        lambda config: config.optim.lr == rate(config.optim.base_lr, config.optim.kind, config.adapter.kind),
        "leave optim.lr out, which base_lr decides if it is not given",
    ),
    Row("optim.final_fraction", "optim.schedule", "null", "leave optim.schedule out"),
    Row(
        "optim.lr optim.base_lr",
        "optim.schedule",
        lambda config: _takes(config, config.optim.lr, ("WarmupCosineLR", ""), ("WarmupLR", "warmup_max_lr")),
        "give the schedule this rate, such as params: {warmup_max_lr: …}",
    ),
    Row(
        "optim.warmup_steps",
        "optim.schedule",
        lambda config: _takes(config, config.optim.warmup_steps),
        "give the schedule these steps, such as params: {warmup_num_steps: …}",
    ),
    Row("task.loss_on task.packing", "task", "sft"),
    Row("task.beta", "task", "dpo"),
    Row(
        "adapter.rank adapter.alpha adapter.dropout adapter.rslora adapter.dora adapter.targets adapter.merge",
        "adapter",
        "lora qlora",
    ),
    Row("adapter", "task", lambda config: config.adapter.kind == "none" or config.task.kind != "pretrain", _TUNE),
    Row("tracker", "task", lambda config: config.tracker.kind == "none" or config.task.kind != "pretrain", _TUNE),
    Row("zero.no_sync run.sample_bytes", "task", "pretrain"),
    Row("run.steps", "run.epochs", "null", "leave run.epochs out, from which run.steps follows"),
    Row("run.accumulate", "run.global_batch", "null", "leave run.global_batch out"),
    Row("run.keep_checkpoints", "run.checkpoint_every", ABOVE_ZERO, "set run.checkpoint_every to a number of steps"),
    Row("run.durable_every", "run.durable", "power process", "choose run.durable=power or run.durable=process"),
    Row(
        "run.evaluate_batches run.keep_best run.patience run.min_improvement",
        "run.evaluate_every",
        ABOVE_ZERO,
        "set run.evaluate_every to a number of steps",
    ),
    Row("run.keep_best run.patience run.min_improvement", "task", "sft dpo reward"),
    Row(
        "run.min_improvement",
        "run.patience",
        lambda config: config.run.patience is not None,
        "set run.patience to a number of validation losses",
    ),
    Row("run.sample_prompt run.sample_temperature", "run.sample_bytes", ABOVE_ZERO, "set run.sample_bytes to a length"),
)


def check(given: Iterable[str], jobs: Sequence[Config]) -> None:
    """Refuses a key of the command line that none of its jobs uses. Recipes may hold keys that are not used.

    Raises:
        ConfigError: names the key, the choice that leaves it unused, and a choice that would use it.
    """
    for key, row in ((key, row) for key in given for row in TABLE if key in row.keys.split()):
        if not any(config.run.probe or row.is_used(config) for config in jobs):
            values = sorted({f"{row.chosen}={_value(config, row.chosen)}" for config in jobs})
            way_out = row.way_out or f"choose {row.chosen}={str(row.used).replace(' ', ' or ')}"
            raise ConfigError(
                f"{key} is given, but nothing uses it with {' or '.join(values)}; leave {key} out, or {way_out}"
            )


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
