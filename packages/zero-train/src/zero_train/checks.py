"""Checks a configuration before anything is built: its values, and the packages that it needs.

Every check raises ConfigError with the key to change, and leaves no file behind. Whether the model fits in memory is
checked by the planner, see planning.py.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any

from zero_train import extras, places
from zero_train.errors import ConfigError, choices
from zero_train.schema import ROW_KINDS, Config, tenth

_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
_NULL = {"optim.max_grad_norm": "no clipping"}


def values(config: Config) -> None:
    """Checks every value against its declaration in schema.py, then the combinations that exclude each other.

    Raises:
        ConfigError: the first value or combination that cannot be run.
    """
    for section in fields(config):
        for key in fields(keys) if is_dataclass(keys := getattr(config, section.name)) else ():
            _declared(section.name, key, getattr(getattr(config, section.name), key.name))
    for name, folder in (("run.dir", config.run.dir), ("run.resume", config.run.resume)):
        if folder is not None and not folder.strip():  # a shell variable that is not set, for example
            raise ConfigError(f"{name} is empty; name a folder with {name}=…, or leave {name} out")
    if config.data.validation_fraction == 0 and config.data.kind not in (*ROW_KINDS, "mixture"):
        raise ConfigError(f"data.validation_fraction=0 must be above 0 with data={config.data.kind}")
    _texts("adapter.targets", config.adapter.targets, "layers, such as [q_proj,v_proj], or all-linear")
    if config.offload.nvme_paths:
        _texts("offload.nvme_paths", config.offload.nvme_paths, "folders, such as [/mnt/a,/mnt/b]")
    for check in (_task, _evaluation, _optim, _precision, _tiers, _activations, _update_in_backward, _durable, _shards):
        check(config)


def packages(config: Config) -> None:
    """Raises ConfigError, naming the extra to install, if a package that this run uses is not installed."""
    extras.installed("transformers", f"model={config.model.kind}")
    if config.optim.kind == "lion":
        extras.installed("zero_optim_cpu", "optim=lion", ", or choose optim=adamw")
    if config.offload.kind != "none":
        tier = "auto" if config.offload.kind == "auto" else "nvme" if places.uses_nvme(config) else "host"
        extras.installed("zero_optim_cpu", f"offload={tier}", ", or choose offload=none")
    if config.optim.schedule is not None:
        extras.installed("zero_deepspeed", "optim.schedule", ", or use optim.warmup_steps")
    if places.uses_nvme(config):
        extras.installed("zero_nvme", "offload=nvme", ", or choose offload=host")


def _loss_scale(given: Mapping[str, Any]) -> None:
    from zero_core import LossScale  # imports torch, which takes seconds that no other check needs

    try:
        LossScale(**given)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"precision.loss_scale={dict(given)} is no LossScale: {error}; give a number, dynamic, null, or arguments "
            "of zero_core.LossScale"
        ) from error


def _declared(section: str, key: Field[Any], value: Any) -> None:
    """Checks one value against the smallest or the allowed ones that schema.py declares for its key."""
    name = section if key.name == "kind" else f"{section}.{key.name}"
    bounds, allowed = key.metadata.get("bounds", {}), key.metadata.get("allowed")
    if value is None:
        return
    for number in value if isinstance(value, list) else [value]:
        if not all(_BOUNDS[word](number, bound) for word, bound in bounds.items()):  # which no NaN is
            said = " and ".join(f"{word.replace('_', ' ')} {bound:g}" for word, bound in bounds.items())
            way_out = f"; set it to null for {_NULL[name]}" if name in _NULL else ""
            raise ConfigError(f"{name}={value} must be {said}{way_out}")
    if allowed is not None and value not in allowed:
        raise choices(name, value, allowed)


def _texts(key: str, value: Any, what: str) -> None:
    """Raises ConfigError unless the value is a text, or a list of some, none of them empty."""
    texts = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        raise ConfigError(f"{key}={value} does not name {what}; change {key}")


def packs(config: Config) -> bool:
    """Returns whether several rows share a sequence."""
    return config.task.kind == "sft" and bool(config.trl.get("packing", config.task.packing))


def _task(config: Config) -> None:
    run, task = config.run, config.task
    if config.trl and task.kind == "pretrain":
        key = f"trl.{next(iter(config.trl))}"
        raise ConfigError(
            f"{key} is a setting of TRL's trainers, and task=pretrain has none; choose task=sft, or leave it out"
        )
    if task.kind == "grpo":
        if not task.reward or not all(task.reward.partition(":")):
            raise ConfigError(
                f"task=grpo needs task.reward=MODULE:FUNCTION, and it is {task.reward}; name a function that returns a "
                "number for each text that the model said"
            )
        if given := [name for name in ("keep_best", "patience") if getattr(run, name)]:
            raise ConfigError(
                f"run.{given[0]} goes by validation losses, and task=grpo takes none; leave run.{given[0]} out"
            )
        if config.data.validation_path:
            raise ConfigError(
                "data.validation_path has rows for a validation loss, and task=grpo takes none; leave it out"
            )
    elif task.reward:
        raise ConfigError(f"task.reward={task.reward} is for task=grpo, and this is task={task.kind}; leave it out")


def _evaluation(config: Config) -> None:
    run, tunes = config.run, config.task.kind != "pretrain"
    every = run.evaluate_every
    if every != "epoch" and (isinstance(every, bool) or not isinstance(every, int) or not 0 <= every <= 10**9):
        raise ConfigError(f"run.evaluate_every={every} is neither a number of steps, at least 0, nor epoch")
    if config.data.kind == "mixture" and not tunes:
        raise ConfigError(
            "data=mixture mixes rows for task=sft and the other tasks of TRL; choose one, or name a text with data.path"
        )
    if run.evaluate_batches is None and not tunes:
        raise ConfigError(
            "run.evaluate_batches=null takes every row that is held out, and task=pretrain has no rows; set "
            "run.evaluate_batches to a number of micro-batches"
        )
    if not (run.keep_best or run.patience) or not tunes:
        return
    given = "run.keep_best=true" if run.keep_best else f"run.patience={run.patience}"
    if not every:
        raise ConfigError(f"{given} needs validation losses, and run.evaluate_every=0 takes none; set it to epoch")
    if run.keep_best and not run.checkpoint_every:
        raise ConfigError(
            "run.keep_best=true keeps a checkpoint, and run.checkpoint_every=0 saves none; set run.checkpoint_every to "
            "a number of steps"
        )


def _optim(config: Config) -> None:
    optim = config.optim
    if len(optim.betas) != 2:
        raise ConfigError(f"optim.betas={list(optim.betas)} must be two numbers")
    if config.run.epochs is None:
        warmup(config)
    elif optim.schedule is not None:
        raise ConfigError(
            f"optim.schedule counts steps, and how many run.epochs={config.run.epochs:g} has is known only when the "
            "data are read; set run.steps, or leave optim.schedule out"
        )
    if optim.kind == "muon" and optim.schedule is not None:
        raise ConfigError(
            "optim.schedule gives all parameters one rate, and optim=muon has two, optim.matrix_lr and optim.lr: leave "
            "optim.schedule out, or choose optim=adamw"
        )
    kept = 1 - optim.lr * optim.weight_decay
    if kept <= 0 and optim.kind in ("adamw", "lion", "sgd", "muon"):  # the others divide the decay by a moment
        raise ConfigError(
            f"optim.weight_decay={optim.weight_decay:g} with optim.lr={optim.lr:g} leaves {kept:g} of the weights "
            "after a step; lower one of them"
        )


def warmup(config: Config) -> None:
    """Gives optim.warmup_steps its default. Raises ConfigError if the run has fewer steps."""
    run, optim = config.run, config.optim
    if optim.warmup_steps is None:
        optim.warmup_steps = tenth(run.steps)
    if optim.warmup_steps > run.steps:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} is more than run.steps={run.steps}, so the run would end "
            "before it reaches optim.lr; lower optim.warmup_steps, leave it out for a tenth of the run, or raise "
            f"{'run.steps' if run.epochs is None else 'run.epochs'}"
        )


def _precision(config: Config) -> None:
    scale = config.precision.loss_scale
    if isinstance(scale, Mapping):
        _loss_scale(scale)
    elif not (scale is None or scale == "dynamic" or (type(scale) in (int, float) and 0 < scale < float("inf"))):
        raise ConfigError(f"precision.loss_scale={scale} must be a positive number, dynamic or null")
    splits = config.precision.states.startswith("split") and config.offload.kind != "none"
    if splits and config.precision.parameters in ("fp32", "fp16"):
        raise ConfigError(
            f"precision.states={config.precision.states} splits the master into bf16 and a remainder, but "
            f"precision.parameters={config.precision.parameters}; set precision.states=fp32 or precision=bf16"
        )


def _tiers(config: Config) -> None:
    for name, given in config.offload.tiers.items():
        if not (isinstance(given, Mapping) and "." in str(given.get("_target_", ""))):
            raise ConfigError(
                f"offload.tiers.{name}={given} has no `_target_` that names the class of a ByteStore with its module; "
                "write one as in conf/tier/compressed.yaml"
            )
    for name in config.hardware.tiers:
        if name not in (*config.offload.tiers, "nvme"):
            raise ConfigError(
                f"hardware.tiers.{name} has figures of a tier that offload.tiers does not have; choose it with tier=…, "
                f"or leave the figures out: ~hardware.tiers.{name} deletes those of a file"
            )


def _activations(config: Config) -> None:
    given = config.offload.activations
    if not (given is None or isinstance(given, str) or (isinstance(given, Sequence) and given)):
        raise ConfigError(f"offload.activations={given} is neither a policy nor a list with one policy for each unit")
    if config.offload.kind == "none" and "nvme" in places.activations(config):
        raise ConfigError(
            "offload.activations=nvme needs nvme, and offload=none has none; "
            "set offload.activations=recompute, or choose offload=host or offload=nvme"
        )
    if config.offload.rows is not None and packs(config):
        raise ConfigError(
            f"offload.rows={config.offload.rows} cuts batches between rows, and task.packing=true puts the rows of a "
            "batch into one; set offload.tokens instead, which cuts such a row, or one of them to null or false"
        )


def _update_in_backward(config: Config) -> None:
    if not config.zero.update_in_backward:
        return
    if config.optim.max_grad_norm is not None:
        raise ConfigError(
            f"zero.update_in_backward=true cannot clip, but optim.max_grad_norm={config.optim.max_grad_norm}; "
            "set optim.max_grad_norm=null or zero.update_in_backward=false"
        )
    if config.run.accumulate > 1:
        raise ConfigError(
            "zero.update_in_backward=true updates a unit as soon as its gradient arrives, but run.accumulate="
            f"{config.run.accumulate} adds up several; set run.accumulate=1 or zero.update_in_backward=false"
        )


def _durable(config: Config) -> None:
    if config.run.durable is None:
        return
    if config.task.kind != "pretrain":
        raise ConfigError(
            f"run.durable={config.run.durable} keeps steps of task=pretrain only, and this is task={config.task.kind}; "
            "set run.durable=null, and run.checkpoint_every to a number of steps"
        )
    if config.offload.kind == "none":
        raise ConfigError(
            f"run.durable={config.run.durable} needs a store whose steps it keeps, which offload=none does not have; "
            "choose offload=nvme or offload=host, or set run.durable=null"
        )
    if config.zero.replicas > 1:
        raise ConfigError(
            f"run.durable={config.run.durable} keeps the steps of one group of ranks, and zero.replicas="
            f"{config.zero.replicas} makes several; set zero.replicas=1, or run.durable=null and run.checkpoint_every "
            "to a number of steps"
        )


def _shards(config: Config) -> None:
    if config.zero.replicas > 1 and config.zero.stage == 0:
        raise ConfigError(
            f"zero.replicas={config.zero.replicas} divides the ranks among which zero.stage shards, and zero.stage=0 "
            "shards nothing; set zero.replicas=1, or choose zero.stage=1, 2 or 3"
        )
    if config.zero.stage == 1 and config.zero.no_sync is False:
        raise ConfigError(
            "zero.no_sync=false, but zero.stage=1 always keeps whole gradients until the step; leave the key out, "
            "or choose zero.stage=2, which reduces every micro-batch"
        )
