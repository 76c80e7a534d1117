"""TRL's trainers as a run of fine-tuning uses them: their class, their arguments, and models beside the policy.

The rows, the run folder and what is said are finetune.py's. Needs the extra `finetune`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

import zero_offload
from zero_train import engine, evaluating, mixture, places, pretrained
from zero_train.loop import schedule_of, share
from zero_train.ranks import Ranks
from zero_train.schema import Config
from zero_train.watching import Watch

__all__ = ["Setting", "make"]

_Base: Any = object


@dataclass(frozen=True)
class Setting:
    """What a trainer takes from its run."""

    config: Config
    ranks: Ranks
    stack: ExitStack  # which ends the store
    draft: engine.Draft
    plan: zero_offload.Plan
    watch: Watch
    say: Callable[[str], None]
    prepare: Callable[..., Any]  # of a part's rows: TRL's `_prepare_dataset`, and the arguments of it
    order: Callable[[], mixture.Order]  # of the rows that are learned from, once they are prepared


def make(setting: Setting, read: Any, tokenizer: Any) -> Any:
    """Returns TRL's trainer for the rows of `read`, which shards the model when its optimizer is created.

    Raises:
        ValueError, TypeError: TRL, transformers or zero_hf refuse something.
    """
    import transformers
    import trl

    import zero_hf

    config, draft = setting.config, setting.draft
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")  # what TRL still calls
    kind, options = {
        "sft": (trl.SFTTrainer, trl.SFTConfig),
        "dpo": (trl.DPOTrainer, trl.DPOConfig),
        "reward": (trl.RewardTrainer, trl.RewardConfig),
    }[config.task.kind]
    more: dict[str, Any] = {}
    if config.task.kind == "dpo" and config.adapter.kind == "none":
        more["ref_model"] = pretrained.base(pretrained.local(config), config)
    trainer = type("Trainer", (_OfRun, zero_hf.sharded(kind)), {"of": setting})(
        draft.model,
        args=_arguments(config, options, setting.ranks.device.type == "cpu", read, setting.watch.done == 0),
        train_dataset=read.training,
        eval_dataset=_part(read.validation, config),
        processing_class=tokenizer,
        callbacks=[setting.watch.callback()],
        zero=_zero_config(config),
        **more,
    )
    trainer.remove_callback(transformers.PrinterCallback)  # zero-train prints its own lines
    if config.task.kind == "dpo" and config.adapter.kind != "none":
        # TRL's reference is a copy of the adapters as they begin, which change nothing yet: so is the model alone.
        cast(Any, draft.model).delete_adapter("ref")
    return trainer


class _OfRun(_Base):
    """What of zero-train's a trainer of TRL uses. Its class comes after this one."""

    of: Setting
    optimizer: Any
    lr_scheduler: Any

    def make_run(self, optimizer: torch.optim.Optimizer | None) -> Any:
        import zero_hf

        config, draft, plan = self.of.config, self.of.draft, self.of.plan
        made = engine.assembled(draft, plan, config, self.of.ranks, clips=False, steady=False)
        ready = self.of.stack.enter_context(made)
        self.of.watch.assembled(ready)
        for remark in ready.remarks:
            self.of.say(remark)
        return zero_hf.Run(draft.model, ready.optimizer, self.zero_config, ready.store, plan, ExitStack())

    def _prepare_dataset(self, dataset: Any, *given: Any) -> Any:
        return self.of.prepare(super()._prepare_dataset, dataset, *given)

    def _get_train_sampler(self, *given: Any) -> Any:
        run = self.of.config.run
        return dataclasses.replace(self.of.order(), samples=run.steps * (run.global_batch or 0))

    def evaluation_loop(self, dataloader: Any, *given: Any, **more: Any) -> Any:
        from transformers.trainer_utils import EvalLoopOutput

        config, ranks, watch = self.of.config, self.of.ranks, self.of.watch
        if self.zero_run is None:
            self.create_optimizer()
        rows = dataloader.dataset
        batches = evaluating.batches_of(len(rows), config.run.micro_batch, ranks.rank, ranks.world_size)
        told = (ranks, lambda: watch.run.asked.signal, config.task.kind == "reward")
        loss = evaluating.mean_loss(self, rows, self.data_collator, batches, *told)
        return EvalLoopOutput(None, None, {} if loss is None else {"eval_loss": loss}, len(rows))

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        self.optimizer = self.optimizer or self.of.draft.optimizer
        return cast(torch.optim.Optimizer, super().create_optimizer(model))

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        config, optimizer = self.of.config, optimizer or self.optimizer
        self.lr_scheduler = self.lr_scheduler or schedule_of(config.optim, optimizer)
        if self.lr_scheduler is None:
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
                optimizer, lambda done: share(config.optim, done + 1, config.run.steps)
            )
        return self.lr_scheduler

    def compute_loss(self, *given: Any, **more: Any) -> Any:
        with self.of.watch.phase("forward"):
            return super().compute_loss(*given, **more)

    def create_accelerator_and_postprocess(self) -> None:
        super().create_accelerator_and_postprocess()
        backward = self.accelerator.backward

        def timed(*given: Any, **more: Any) -> None:
            with self.of.watch.phase("backward"):
                backward(*given, **more)

        self.accelerator.backward = timed  # of this trainer's own object


def _arguments(config: Config, options: type[Any], on_cpu: bool, read: Any, first: bool) -> Any:
    """TRL's arguments. What zero-train does itself is switched off in them."""
    run, task = config.run, config.task
    validates = bool(run.evaluate_every) and read.validation is not None
    more: dict[str, Any] = {}
    if task.kind == "sft":
        only_answers = task.loss_on == "answers"
        more = {"packing": task.packing, "eval_packing": False}
        if read.kind == "messages":
            more["assistant_only_loss"] = only_answers
        elif read.kind == "prompt-completion":
            more["completion_only_loss"] = only_answers
    elif task.kind == "dpo":
        more = {"beta": task.beta}
    return options(
        output_dir=str(Path(config.run.dir) / "checkpoints"),
        max_steps=run.steps,
        per_device_train_batch_size=run.micro_batch,
        per_device_eval_batch_size=run.micro_batch,
        gradient_accumulation_steps=run.accumulate,
        learning_rate=config.optim.lr,
        max_grad_norm=config.optim.max_grad_norm or 0.0,
        max_length=config.data.sequence_length,
        seed=run.seed,
        use_cpu=on_cpu,
        bf16=False,
        activation_checkpointing=False,
        logging_steps=1,
        logging_first_step=True,
        logging_nan_inf_filter=False,
        disable_tqdm=True,
        eval_strategy="no",  # watching.py asks for each
        eval_on_start=validates and first,
        save_strategy="steps" if run.checkpoint_every else "no",
        save_steps=run.checkpoint_every or 500,
        save_total_limit=max(run.keep_checkpoints, 1 + run.keep_best),  # the last one as well, to go on from
        report_to=config.tracker.kind,
        **more,
    )


def _part(validation: Any, config: Config) -> Any:
    """The rows of run.evaluate_batches micro-batches, which all ranks share."""
    batches = config.run.evaluate_batches
    if validation is None or not config.run.evaluate_every:
        return None
    return (
        validation
        if batches is None
        else validation.select(range(min(len(validation), batches * config.run.micro_batch)))
    )


def _zero_config(config: Config) -> Any:
    """Stage and tiers of models beside the policy, such as a reference: those of the policy's parameters."""
    import zero_hf

    shards = zero_hf.ZeroConfig(stage=config.zero.stage, replicas=config.zero.replicas)
    if config.offload.kind != "placed":
        return shards
    place = {kind: getattr(config.offload, kind) for kind in places.STATE_KINDS}
    paths = places.nvme_paths(config, 0) if places.uses_nvme(config) else ()
    return dataclasses.replace(shards, nvme_paths=tuple(map(str, paths)), **place)
