"""Which keys the chosen options use, so that a key given on the command line is never ignored in silence.

Owns the table. A row names keys, when a run uses them, and what to choose for it to use them; keys in no row are used
by every run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from zero_train import checks
from zero_train.errors import ConfigError
from zero_train.schema import Config


@dataclass(frozen=True)
class Row:
    """Keys that only some runs use."""

    keys: str  # separated by spaces
    used: Callable[[Config], bool]
    chosen: str  # the key or group whose value decides
    way_out: str


def _model(*kinds: str) -> Callable[[Config], bool]:
    return lambda config: config.model.kind in kinds


def _optim(*kinds: str) -> Callable[[Config], bool]:
    return lambda config: config.optim.kind in kinds


def _placed(config: Config) -> bool:
    return config.offload.kind == "placed"


def _stored(config: Config) -> bool:
    return config.offload.kind != "none"


def _nvme(config: Config) -> bool:
    return config.offload.kind == "auto" or checks.uses_nvme(config)


TABLE = (
    Row(
        "model.hidden_size model.intermediate_size model.layers model.heads model.vocab_size model.tie_embeddings",
        _model("llama", "gpt2", "moe"),
        "model",
        "choose model=llama, gpt2 or moe (the sizes of model=hf are those of its folder)",
    ),
    Row("model.key_value_heads", _model("llama", "moe"), "model", "choose model=llama or moe"),
    Row("model.experts model.experts_per_token", _model("moe"), "model", "choose model=moe"),
    Row("model.path data.as_bytes", _model("hf"), "model", "choose model=hf"),
    Row(
        "model.checkpointing",
        lambda config: config.offload.activations is None,
        "offload.activations",
        "set offload.activations=null",
    ),
    Row("data.path data.pattern", lambda config: config.data.kind == "text", "data", "choose data=text"),
    Row("zero.resident_bytes", lambda config: config.zero.stage == 3, "zero.stage", "set zero.stage=3"),
    Row(
        "offload.parameters offload.gradients offload.optimizer",
        _placed,
        "offload",
        "choose offload=host or nvme, whose placements these keys change",
    ),
    Row(
        "offload.tile_numel offload.slots offload.overlap optim.threads precision.states",
        _stored,
        "offload",
        "choose offload=host, nvme or auto",
    ),
    Row("offload.nvme_paths io io.backend", _nvme, "offload", "choose offload=nvme or auto"),
    Row("optim.betas", _optim("adamw", "adam", "lion"), "optim", "choose optim=adamw, adam or lion"),
    Row("optim.eps", _optim("adamw", "adam", "adagrad"), "optim", "choose optim=adamw, adam or adagrad"),
    Row("optim.momentum", _optim("sgd"), "optim", "choose optim=sgd"),
    Row(
        "run.keep_checkpoints",
        lambda config: config.run.checkpoint_every > 0,
        "run.checkpoint_every",
        "set run.checkpoint_every to a number of steps",
    ),
    Row(
        "run.evaluate_batches",
        lambda config: config.run.evaluate_every > 0,
        "run.evaluate_every",
        "set run.evaluate_every to a number of steps",
    ),
    Row(
        "run.sample_prompt run.sample_temperature",
        lambda config: config.run.sample_bytes > 0,
        "run.sample_bytes",
        "set run.sample_bytes to a length",
    ),
)


def check(given: Iterable[str], jobs: Sequence[Config]) -> None:
    """Refuses a key of the command line that none of its jobs uses. Recipes may carry keys for others.

    Raises:
        ConfigError: naming the key, the choice that makes it useless, and the choice that would use it.
    """
    rows = {key: row for row in TABLE for key in row.keys.split()}
    for key in given:
        row = rows.get(key)
        if row is not None and not any(config.run.probe or row.used(config) for config in jobs):
            values = sorted({f"{row.chosen}={_chosen(config, row.chosen)}" for config in jobs})
            raise ConfigError(
                f"{key} is given, but nothing uses it with {' or '.join(values)}; leave {key} out, or {row.way_out}"
            )


def _chosen(config: Config, key: str) -> object:
    """The value of a key, or the option of a group as far as its kind tells it."""
    section, _, name = key.partition(".")
    if name:
        return getattr(getattr(config, section), name)
    kind = getattr(config, section).kind
    return "host" if kind == "placed" else kind  # what is placed on nvme uses every key of offload
