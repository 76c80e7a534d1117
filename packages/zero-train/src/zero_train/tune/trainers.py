"""Makes TRL's trainers for a run of fine-tuning: their class, their arguments, and models beside the policy.

Not here: the rows, the run folder and the messages (in finetune.py). Needs the extra `finetune`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any, cast

import torch

from zero_train.data import rows
from zero_train.errors import ConfigError, told
from zero_train.model import folders, pretrained
from zero_train.run import assemble, resume
from zero_train.run.loop import share
from zero_train.schema import Config
from zero_train.settings import extras, placement
from zero_train.tune import validation as evaluating
from zero_train.tune.callback import Watch

_Base: Any = object
_TRAINERS = {"sft": "SFT", "dpo": "DPO", "reward": "Reward", "kto": "KTO", "grpo": "GRPO"}  # names of TRL's classes
_OURS = {  # fields of TRL's configurations that a key of this program sets
    "max_length": "data.sequence_length",
    "learning_rate": "optim.lr",
    "assistant_only_loss": "task.loss_on",
    "completion_only_loss": "task.loss_on",
    "chat_template_path": "data.chat_template",
    "activation_offloading": "offload.activations",
    "model_init_kwargs": "model.path",
    "trust_remote_code": "model.path",
    "dataset_text_field": "a column named `text`",
    "dataset_kwargs": "data.path",
}


def make(watch: Watch, read: Any, tokenizer: Any) -> Any:
    """Returns TRL's trainer for the rows of `read`, which shards the model when its optimizer is created.

    Raises:
        ValueError, TypeError: TRL, transformers or zero_hf refuse something.
    """
    import transformers
    import trl

    import zero_hf

    config, draft, task = watch.run.config, watch.draft, watch.run.config.task.kind
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # what TRL still calls
    more: dict[str, Any] = {}
    if task in ("dpo", "kto") and config.adapter.kind == "none":
        more["ref_model"] = pretrained.base(folders.local(config.model.path), config)
    if task == "grpo":
        more["reward_funcs"] = extras.named("task.reward", str(config.task.reward), "function")
    trainer = type("Trainer", (_OfRun, zero_hf.sharded(getattr(trl, f"{_TRAINERS[task]}Trainer"))), {"of": watch})(
        draft.model,
        args=watch.run.arguments,
        train_dataset=read.training.remove_columns(rows.PLACE) if task == "grpo" else read.training,
        eval_dataset=_part(read.validation, config),
        processing_class=tokenizer,
        callbacks=[watch],
        optimizers=(draft.optimizer, None),
        zero=_zero_config(config),
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # zero-train prints its own lines
    if "ref" in getattr(draft.model, "peft_config", ()):
        # TRL's reference is a copy of the initial adapters, which change nothing: the model without them is the same.
        cast(Any, draft.model).delete_adapter("ref")
    return trainer


@dataclass(frozen=True)
class Order:
    """The numbers of the rows that a run learns from, in turn: a sampler for torch's DataLoader.

    Each pass is the permutation that accelerate draws, with a seed of its own. Row number N of a run is the same at any
    number of ranks, and a resumed run continues with the next row, so there is no state to save.
    """

    size: int  # rows
    seed: int | None  # None: in the order of the rows
    samples: int  # of the whole run

    def __len__(self) -> int:
        return self.samples

    def __iter__(self) -> Iterator[int]:
        return islice((at for turn in count() for at in self._pass(turn)), self.samples)

    def _pass(self, turn: int) -> list[int] | range:
        if self.seed is None:
            return range(self.size)
        found = torch.randperm(self.size, generator=torch.Generator().manual_seed(self.seed + turn))
        return cast("list[int]", found.tolist())


class _OfRun(_Base):
    """A mixin of zero-train's overrides. TRL's trainer class comes after it."""

    of: Watch
    optimizer: Any
    lr_scheduler: Any

    def zero_make_run(self, optimizer: torch.optim.Optimizer | None) -> Any:
        import zero_hf

        run, draft, plan = self.of.run, self.of.draft, self.of.plan
        made = assemble.assembled(draft, plan, run.config, run.ranks, clips=False, steady=False)
        ready = self.of.stack.enter_context(made)
        self.of.ready = ready
        for remark in ready.remarks:
            run.say(remark)
        return zero_hf.Run(draft.model, ready.optimizer, self.zero_config, ready.store, plan, ExitStack())

    def _prepare_dataset(self, dataset: Any, *given: Any) -> Any:
        return self.of.run.prepare(self.of.history, super()._prepare_dataset, dataset, *given)

    def _get_train_sampler(self, *given: Any) -> Any:
        run, task = self.of.run.config.run, self.of.run.config.task.kind
        if task == "grpo":  # which repeats each prompt
            return super()._get_train_sampler(*given)
        return Order(self.of.run.size, None if task == "kto" else run.seed, run.steps * (run.global_batch or 0))

    def evaluation_loop(self, dataloader: Any, *given: Any, **more: Any) -> Any:
        from transformers.trainer_utils import EvalLoopOutput

        config, ranks, asked = self.of.run.config, self.of.run.ranks, self.of.run.asked
        if self.zero_run is None:
            self.create_optimizer()
        rows = dataloader.dataset
        batches = evaluating.batches_of(len(rows), config.run.micro_batch, ranks.rank, ranks.world_size)
        told = (ranks, lambda: asked.signal, config.task.kind == "reward")
        loss = evaluating.mean_loss(self, rows, self.data_collator, batches, *told)
        return EvalLoopOutput(None, None, {} if loss is None else {"eval_loss": loss}, len(rows))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        config, optimizer = self.of.run.config, optimizer or self.optimizer
        self.lr_scheduler = self.lr_scheduler or torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: share(config.optim, done + 1, config.run.steps)
        )
        return self.lr_scheduler

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        config, rates = self.of.run.config, self.lr_scheduler.base_lrs
        with resume.own_options(self.optimizer, config):
            super()._load_optimizer_and_scheduler(checkpoint)
        self.lr_scheduler.base_lrs = rates  # the checkpoint's, with run.resume=FOLDER, may be others
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * share(config.optim, self.lr_scheduler.last_epoch + 1, config.run.steps)

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        with self.of.phase("forward"):
            return super().compute_loss(*given, **more)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        backward = self.accelerator.backward

        def timed(*given: Any, **more: Any) -> None:
            with self.of.phase("backward"):
                backward(*given, **more)

        self.accelerator.backward = timed  # of this trainer's own object


def arguments(config: Config, on_cpu: bool, read: Any, first: bool) -> Any:
    """Returns TRL's arguments: those of trl.*, and what follows from other keys. read: the rows, or None in a plan.

    Raises:
        ConfigError: TRL's configuration of the task has no such field or refuses its value, or another key sets it.
    """
    import transformers
    import trl

    run, task = config.run, config.task
    options = getattr(trl, f"{_TRAINERS[task.kind]}Config", None)
    if options is None:
        raise ConfigError(f"task={task.kind} is not in TRL {trl.__version__}; upgrade it with pip install -U trl")
    trainers = {field.name for field in dataclasses.fields(transformers.TrainingArguments)}
    for name in config.trl:
        if name in _OURS:
            raise ConfigError(f"trl.{name} follows from {_OURS[name]} and cannot be set; leave it out")
        if name in trainers:
            raise ConfigError(
                f"trl.{name} is a setting of transformers' Trainer, which keys of run, optim, zero and offload decide; "
                "leave it out"
            )
    validates = read is not None and bool(run.evaluate_every) and read.validation is not None
    more: dict[str, Any] = {"max_length": config.data.sequence_length} if hasattr(options, "max_length") else {}
    if task.kind == "sft":
        more |= {"packing": task.packing, "eval_packing": False}
        if read is not None and read.kind == ("messages",):
            more["assistant_only_loss"] = task.loss_on == "answers"
        elif read is not None and read.kind == ("prompt", "completion"):
            more["completion_only_loss"] = task.loss_on == "answers"
    elif task.kind in ("dpo", "kto"):
        more["beta"] = task.beta
    elif task.kind == "grpo":
        extras.named("task.reward", str(task.reward), "function")
        more["ds3_gather_for_generation"] = False
    way_out = "; set them with trl.NAME=…, or change the keys of run and task that they follow from"
    with told(f"task={task.kind}: TRL refuses its settings: ", ValueError, TypeError, way_out=way_out):
        return options(
            output_dir=str(Path(run.dir) / "checkpoints"),
            max_steps=run.steps,
            per_device_train_batch_size=run.micro_batch,
            gradient_accumulation_steps=run.accumulate,
            max_grad_norm=config.optim.max_grad_norm or 0.0,
            seed=run.seed,
            use_cpu=on_cpu,
            bf16=False,
            activation_checkpointing=False,
            logging_steps=1,
            logging_nan_inf_filter=False,
            disable_tqdm=True,
            eval_on_start=validates and first,  # callback.py asks for the others
            save_strategy="steps" if run.checkpoint_every else "no",
            save_steps=run.checkpoint_every or 500,
            save_total_limit=max(run.keep_checkpoints, 1 + run.keep_best),  # the last one as well, to go on from
            report_to=config.tracker.kind,
            **{**more, **config.trl},
        )


def _part(validation: Any, config: Config) -> Any:
    """Returns the rows of run.evaluate_batches micro-batches, which all ranks share, or None."""
    run = config.run
    if validation is None or not run.evaluate_every or run.evaluate_batches is None:
        return validation if run.evaluate_every else None
    return validation.select(range(min(len(validation), run.evaluate_batches * run.micro_batch)))


def _zero_config(config: Config) -> Any:
    """Stage and tiers of models beside the policy, such as a reference: those of the policy's parameters."""
    import zero_hf

    shards = zero_hf.ZeroConfig(stage=config.zero.stage, replicas=config.zero.replicas)
    if config.offload.kind != "placed":
        return shards
    place = {kind: getattr(config.offload, kind) for kind in placement.STATE_KINDS}
    paths = placement.nvme_paths(config, 0) if placement.uses_nvme(config) else ()
    return dataclasses.replace(shards, nvme_paths=tuple(map(str, paths)), **place)
