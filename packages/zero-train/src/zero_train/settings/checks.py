"""Checks a configuration before anything is built: its values, and the packages that it needs.

Every check raises ConfigError with the key to change, and leaves no file behind. Whether the model fits in memory is
checked by the planner, see run/planning.py.
"""

from __future__ import annotations

import importlib.util
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from typing import Any

from zero_train.declare import ROW_KINDS, tenth
from zero_train.errors import ConfigError, choices
from zero_train.schema import Config
from zero_train.settings import extras, placement

_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}
_NULL = {"optim.max_grad_norm": "no clipping"}

Refusals = Iterator[tuple[Any, str]]  # whether something is wrong, and what to say then


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
    _texts("adapter.targets", config.adapter.targets, "layers, such as [q_proj,v_proj], or all-linear")
    if config.offload.nvme_paths:
        _texts("offload.nvme_paths", config.offload.nvme_paths, "folders, such as [/mnt/a,/mnt/b]")
    if config.run.epochs is None:
        warmup(config)
    _loss_scale(config.precision.loss_scale)
    tunes = config.task.kind != "pretrain"
    for check in (_tuning if tunes else _pretraining, _evaluation, _optim, _offload, _durable, _shards):
        for wrong, why in check(config):
            if wrong:
                raise ConfigError(why)


def packages(config: Config) -> None:
    """Raises ConfigError, naming the extra to install, if a package that this run uses is not installed."""
    extras.installed("transformers", f"model={config.model.kind}")
    if config.optim.kind == "lion":
        extras.installed("zero_optim_cpu", "optim=lion", ", or choose optim=adamw")
    tier = "auto" if config.offload.kind == "auto" else "nvme" if placement.uses_nvme(config) else "host"
    if config.offload.kind != "none":
        extras.installed("zero_optim_cpu", f"offload={tier}", ", or choose offload=none")
    if placement.uses_nvme(config):
        extras.installed("zero_nvme", f"offload={tier}", ", or choose offload=host")


def tuning_packages(config: Config, planned: bool) -> None:
    """Raises ConfigError if a package of fine-tuning is missing. planned: the run has no rows, and is a plan."""
    needed = ["zero_hf", *([] if config.adapter.kind == "none" else ["peft"]), *([] if planned else ["trl"])]
    if config.adapter.kind == "qlora" and not config.run.dry:
        needed.append("bitsandbytes")
    if (tracker := config.tracker.kind) != "none" and not config.run.dry and not importlib.util.find_spec(tracker):
        raise ConfigError(f"tracker={tracker} needs {tracker}, which is not installed; pip install {tracker}")
    for module in needed:
        extras.installed(module, f"task={config.task.kind}", extra="finetune")


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


def warmup(config: Config) -> None:
    """Gives optim.warmup_steps its default. Raises ConfigError if the run has fewer steps."""
    run, optim = config.run, config.optim
    if optim.warmup_steps is None:
        optim.warmup_steps = tenth(run.steps)
    if optim.warmup_steps > run.steps:
        raise ConfigError(
            f"optim.warmup_steps={optim.warmup_steps} is more than the {run.steps} steps of the run, which would end "
            "before it reaches optim.lr; lower optim.warmup_steps, leave it out (it is then a tenth of the steps), or "
            f"raise {'run.steps' if run.epochs is None else 'run.epochs'}"
        )


def _loss_scale(scale: Any) -> None:
    if scale is None or scale == "dynamic" or (type(scale) in (int, float) and 0 < scale < float("inf")):
        return
    why = ""
    if isinstance(scale, Mapping):
        from zero_core import LossScale  # imports torch, which takes seconds that no other check needs

        try:
            LossScale(**scale)
            return
        except (TypeError, ValueError) as error:
            why = f": {error}"
    raise ConfigError(
        f"precision.loss_scale={scale} is no loss scale{why}; give a number, dynamic, null, or arguments of "
        "zero_core.LossScale"
    )


def _pretraining(config: Config) -> Refusals:
    data, run = config.data, config.run
    yield (
        config.trl,
        f"trl.{next(iter(config.trl), '')} is a setting of TRL's trainers, and task=pretrain has none; choose "
        "task=sft, or leave it out",
    )
    yield (
        run.evaluate_batches is None,
        "run.evaluate_batches=null takes every row that is held out, and task=pretrain has no rows; set "
        "run.evaluate_batches to a number of micro-batches",
    )
    yield (
        data.validation_fraction == 0 and data.kind not in ROW_KINDS,
        f"data.validation_fraction=0 must be above 0 with data={data.kind}",
    )


def _tuning(config: Config) -> Refusals:
    run, task, adapter = config.run, config.task, config.adapter
    yield (
        config.model.kind != "hf" and not run.probe,
        f"task={task.kind} needs a pretrained model, but model={config.model.kind}; name one with model.path=FOLDER",
    )
    yield (
        adapter.dora and adapter.kind == "qlora",
        "adapter.dora=true measures the weights, and adapter=qlora holds them in 4 bits, which is not supported; "
        "choose adapter=lora, or set adapter.dora=false",
    )
    for trained in ("adapter.dora=true also scales them", "task=reward trains a head beside them"):
        yield (
            adapter.merge and (adapter.dora if "dora" in trained else task.kind == "reward"),
            f"adapter.merge=true adds A and B to the weights, and {trained}; set adapter.merge=false, and merge with "
            "PEFT's merge_and_unload()",
        )
    yield (
        adapter.merge and not run.export,
        "adapter.merge=true merges what run.export=true writes; set run.export=true",
    )
    yield (
        config.precision.parameters == "fp16" or config.precision.loss_scale is not None,
        f"task={task.kind} has no loss scaling; set precision=bf16 or precision=fp32, with precision.loss_scale=null",
    )


def _evaluation(config: Config) -> Refusals:
    run, task = config.run, config.task
    every, keeps = run.evaluate_every, [name for name in ("keep_best", "patience") if getattr(run, name)]
    yield (
        every != "epoch" and (type(every) is not int or not 0 <= every <= 10**9),
        f"run.evaluate_every={every} must be a number of steps, 0 or more, or epoch",
    )
    if task.kind == "grpo":
        yield (
            not task.reward or not all(task.reward.partition(":")),
            f"task=grpo needs task.reward=MODULE:FUNCTION, and it is {task.reward}; name a function that returns a "
            "number for each text that the model said",
        )
        needless = {f"run.{name}": True for name in keeps} | {"data.validation_path": config.data.validation_path}
        for name, given in needless.items():
            yield given, f"{name} is for validation losses, and task=grpo takes none; leave {name} out"
    else:
        yield task.reward, f"task.reward={task.reward} is for task=grpo, and this is task={task.kind}; leave it out"
    if keeps and task.kind != "pretrain":
        yield (
            not every,
            f"run.{keeps[0]} needs validation losses, and run.evaluate_every=0 takes none; set it to epoch",
        )
        yield (
            run.keep_best and not run.checkpoint_every,
            "run.keep_best=true keeps a checkpoint, and run.checkpoint_every=0 saves none; set run.checkpoint_every to "
            "a number of steps",
        )


def _optim(config: Config) -> Refusals:
    optim, precision = config.optim, config.precision
    yield len(optim.betas) != 2, f"optim.betas={list(optim.betas)} must be two numbers"
    kept = 1 - optim.lr * optim.weight_decay
    yield (
        kept <= 0 and optim.kind in ("adamw", "lion", "sgd", "muon"),  # the others divide the decay by a moment
        f"optim.weight_decay={optim.weight_decay:g} with optim.lr={optim.lr:g} leaves {kept:g} of the weights after a "
        "step; lower one of them",
    )
    splits = precision.states.startswith("split") and config.offload.kind != "none"
    yield (
        splits and precision.parameters in ("fp32", "fp16"),
        f"precision.states={precision.states} splits the master into bf16 and a remainder, but precision.parameters="
        f"{precision.parameters}; set precision.states=fp32 or precision=bf16",
    )


def _offload(config: Config) -> Refusals:
    offload, given = config.offload, config.offload.activations
    for name, tier in offload.tiers.items():
        yield (
            not (isinstance(tier, Mapping) and "." in str(tier.get("_target_", ""))),
            f"offload.tiers.{name}={tier} has no `_target_` that names the class of a ByteStore with its module; "
            "write one as in conf/tier/compressed.yaml",
        )
    for name in config.hardware.get("tiers") or {}:
        yield (
            name not in (*offload.tiers, "nvme"),
            f"hardware.tiers.{name} describes a tier that offload.tiers does not have; choose it with tier=…, or "
            f"delete its description with ~hardware.tiers.{name}",
        )
    yield (
        not (given is None or isinstance(given, str) or (isinstance(given, Sequence) and given)),
        f"offload.activations={given} is neither a policy nor a list with one policy for each unit",
    )
    yield (
        offload.kind == "none" and given is not None and "nvme" in placement.activations(config),
        "offload.activations=nvme needs nvme, and offload=none has none; "
        "set offload.activations=recompute, or choose offload=host or offload=nvme",
    )
    yield (
        offload.rows is not None and packs(config),
        f"offload.rows={offload.rows} cuts batches between rows, and task.packing=true puts the rows of a batch into "
        "one; set offload.tokens instead, which cuts such a row, or one of them to null or false",
    )


def _durable(config: Config) -> Refusals:
    durable = f"run.durable={config.run.durable}"
    if config.run.durable is None:
        return
    yield (
        config.task.kind != "pretrain",
        f"{durable} keeps steps of task=pretrain only, and this is task={config.task.kind}; set run.durable=null, and "
        "run.checkpoint_every to a number of steps",
    )
    yield (
        config.offload.kind == "none",
        f"{durable} needs a store whose steps it keeps, which offload=none does not have; choose offload=nvme or "
        "offload=host, or set run.durable=null",
    )
    yield (
        config.zero.replicas > 1,
        f"{durable} keeps the steps of one group of ranks, and zero.replicas={config.zero.replicas} makes several; set "
        "zero.replicas=1, or run.durable=null and run.checkpoint_every to a number of steps",
    )


def _shards(config: Config) -> Refusals:
    zero = config.zero
    yield (
        zero.replicas > 1 and zero.stage == 0,
        f"zero.replicas={zero.replicas} makes groups of ranks that shard, and zero.stage=0 does not shard; set "
        "zero.replicas=1, or choose zero.stage=1, 2 or 3",
    )
    yield (
        zero.stage == 1 and zero.no_sync is False,
        "zero.no_sync=false, but zero.stage=1 always keeps whole gradients until the step; leave the key out, or "
        "choose zero.stage=2, which reduces every micro-batch",
    )
