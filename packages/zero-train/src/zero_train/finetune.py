"""Fine-tunes a pretrained model with TRL's trainers: task=sft, dpo and reward. Reaches them through zero_hf.sharded.

TRL owns the data loader, the loss and the loop, see trainers.py. The plan, the store and the run folder are those of
any run, see train.py; a checkpoint is a Trainer's checkpoint-N, with zero_hf's shards in it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

import zero_offload
from zero_train import (
    answers,
    cached,
    conversations,
    early,
    engine,
    evaluating,
    mixture,
    passes,
    pretrained,
    resume,
    templates,
    train,
    trainers,
)
from zero_train import config as configuration
from zero_train.errors import ConfigError, RunError
from zero_train.loop import History
from zero_train.ranks import together
from zero_train.rows import COLUMNS, UNLEARNED
from zero_train.run_folder import replace
from zero_train.schema import Config, DataConfig
from zero_train.train import Outcome
from zero_train.watching import Watch

__all__ = ["run"]

_DATA = "data.json"  # in the run folder: which rows the run learns from, for run.resume=auto; how many are cut


def run(config: Config, on_end: Callable[[engine.Assembled], None] | None = None) -> Outcome:
    """Runs `config` on this rank, as `train.run` does."""
    return train.run(config, on_end, FineTune)


@dataclass
class FineTune(train.Run):
    """A run of one of TRL's trainers on one rank."""

    tokenizer: Any = None
    order: mixture.Order | None = None  # of the rows that the run learns from
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # of rows that data.sequence_length cuts, by part

    @property
    def unit(self) -> str:
        return "nats per token" if self.config.task.kind == "sft" else "nats per pair"

    def read(self) -> tuple[Any, nn.Module]:
        config = self.config
        early.tuning(config)
        folder = pretrained.local(config)
        needless = config.run.dry and not pretrained.has_tokenizer(folder)
        self.tokenizer = None if needless else pretrained.tokenizer_of(folder)
        if config.data.chat_template and self.tokenizer is not None:
            self.tokenizer.chat_template = templates.read(config.data.chat_template)
        read = self._marked(self._rows(), folder)
        if read is not None:
            early.held_out(config, read.validation is not None)
            self.order = self._order([len(part.training) for part in read.parts], read)
        return read, pretrained.build(folder, config)

    def _marked(self, found: list[tuple[DataConfig, conversations.Rows]] | None, folder: Path) -> Any:
        """The rows of all parts. Messages whose answers TRL would not find are tokens with marked answers."""
        if found is None:
            return None
        task = self.config.task
        for config, rows in found:
            if _has_messages(rows) and self.tokenizer.chat_template is None:
                raise ConfigError(
                    f"model.path={folder}: its tokenizer has no chat template, and {config.path} has messages; name a "
                    "model that was tuned for chats, a template with data.chat_template=FILE, or write the rows as "
                    "texts"
                )
            if task.loss_on == "everything" and any(UNLEARNED in remark for remark in rows.remarks):
                raise ConfigError(
                    f"task.loss_on=everything, and in {config.path} {UNLEARNED}; set task.loss_on=answers, or remove "
                    "`train` and `weight` from these messages"
                )
        if self.config.adapter.kind == "qlora" or self.config.adapter.dora:  # the model is read before TRL has the rows
            for config, rows in found:
                for part in (rows.training, rows.validation) if _has_messages(rows) else ():
                    answers.accepted(part or (), self.tokenizer, [config])
        marks = task.kind == "sft" and task.loss_on == "answers"
        return mixture.merged(
            [
                answers.marked(rows, self.tokenizer, folder, config) if marks and rows.kind == "messages" else rows
                for config, rows in found
            ]
        )

    def items(self, read: Any) -> float | None:
        return sum(self.order.sizes) if self.order else None

    def passed(self, read: Any, steps: int) -> str:
        order, run = self.order, self.config.run
        assert order is not None and run.global_batch is not None
        if order.weights is None:
            return f"{steps:,} steps, {passes.over(steps * run.global_batch, sum(order.sizes), self._rows_of(read))}"
        each = zip(order.sizes, order.passes(steps * run.global_batch), read.parts, strict=True)
        told = (passes.over(turns * size, size, f"{size:,} rows of {part.config.path}") for size, turns, part in each)
        return f"{steps:,} steps, {', '.join(told)}"

    def _rows_of(self, read: Any) -> str:
        packed = self.config.task.packing and self.config.task.kind == "sft" and self.counts
        return f"{sum(self.order.sizes) if self.order else 0:,} {'sequences of packed rows' if packed else 'rows'}"

    def _order(self, sizes: list[int], read: Any) -> mixture.Order:
        """The rows that the run learns from, in turn, once there are so many of each part."""
        weights = tuple(part.weight for part in read.parts)
        run = self.config.run
        samples = run.steps * (run.global_batch or 0)
        return mixture.Order(tuple(sizes), None if None in weights else weights, run.seed, samples)

    def before_all(self) -> None:
        """The first rank converts the data, which the others then find converted."""
        if self.ranks.world_size > 1:
            together(self.ranks, lambda: self._rows() if self.ranks.leader else None)

    def _rows(self) -> Any:
        config = self.config
        if config.run.dry and not early.names_data(config):
            return None
        return mixture.load(config.data, config.task.kind, cached.folder(), self._say)

    def announce_data(self, read: Any) -> str:
        if read is None:
            return "data: none, as data.path is not given"
        run, said = self.config.run, [f"data: {read.name}", *read.remarks]
        if run.dry:  # rows that have nothing to learn are still there
            said.append(f"{'at most ' if run.epochs else ''}{self.passed(read, run.steps)}")
        return "\n".join(said)

    def train_in(
        self,
        stack: ExitStack,
        read: Any,
        draft: engine.Draft,
        plan: zero_offload.Plan,
        checkpoint: resume.Checkpoint | None,
    ) -> Outcome:
        """Shards the model when the trainer asks for it, trains, evaluates and saves."""
        import transformers

        config, ranks, folder = self.config, self.ranks, self.folder
        if checkpoint:
            together(ranks, lambda: self._same_data(read))
            self.say_continued(checkpoint)
        history = History()
        watch = Watch(self, history, checkpoint.step if checkpoint else 0, read.validation is not None)
        try:
            trainer = self._trainer(stack, read, draft, plan, watch)
        except ConfigError:
            raise
        except (ValueError, TypeError) as error:  # of TRL, of transformers, of zero_hf
            raise ConfigError(f"task={config.task.kind}: {error}") from error
        resume.not_past(checkpoint, config)
        with stack, self.asked.gentle():
            if ranks.leader:  # the configuration first: a folder with anything else is refused without it
                configuration.save(config, folder / resume.CONFIG)
                replace(folder / _DATA, json.dumps({"digest": read.digest(), **self.counts}) + "\n")
                stack.callback(self._report, watch, plan)
            stack.enter_context(watch)
            stack.enter_context(zero_offload.explained(plan))
            if checkpoint and self._ended(checkpoint):  # a Trainer would take one more step
                trainer.create_optimizer_and_scheduler(config.run.steps)
                trainer._load_optimizer_and_scheduler(str(checkpoint.folder))
                trainer.state = transformers.TrainerState.load_from_json(str(checkpoint.folder / resume.TRAINER_STATE))
            else:
                trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)
            ready = cast(engine.Assembled, watch.ready)
            ready.wait()
            signal = ranks.most(self.asked.signal)
            if signal:
                self._say(self._stopped(trainer.state.global_step))
            else:
                self._say(f"trained {self.passed(read, trainer.state.global_step)}")
                self._take_best(trainer)
            if config.run.export and not signal:
                trainer.save_model(str(folder / "pretrained"))
                if config.adapter.merge:
                    together(ranks, self._merge)
            if self.on_end is not None:
                self.on_end(ready)
        self._say(f"results in {folder}")
        return Outcome(128 + signal if signal else 0, folder, history)

    def _ended(self, checkpoint: resume.Checkpoint) -> bool:
        """Whether nothing is left to train after this checkpoint."""
        run = self.config.run
        if checkpoint.step == run.steps or run.patience is None:
            return checkpoint.step == run.steps
        state = json.loads((checkpoint.folder / resume.TRAINER_STATE).read_text())
        return evaluating.verdict(run, state["log_history"]).stops

    def _take_best(self, trainer: Any) -> None:
        """Gives the model the weights of the checkpoint with the lowest validation loss, if the run keeps it."""
        found = evaluating.verdict(self.config.run, trainer.state.log_history)
        if not self.config.run.keep_best or not found.step:
            return
        said = f"the lowest validation loss was {found.loss:.4f} {self.unit}, after step {found.step}"
        folder = self.folder / "checkpoints" / f"checkpoint-{found.step}"
        if not resume.is_complete(folder):
            folder = Path(trainer.state.best_model_checkpoint or folder)  # of the run that this one continues
        if not resume.is_complete(folder):
            raise RunError(
                f"{said}, and its checkpoint {folder} is gone; set run.keep_best=false to export the last step's"
            )
        if found.step != trainer.state.global_step:
            trainer.state.best_model_checkpoint = str(folder)
            trainer._load_best_model()
        self._say(f"{said}: {folder}")
        if self.ranks.leader:
            told = {"step": found.step, "loss": found.loss, "checkpoint": os.path.relpath(folder, self.folder)}
            replace(self.folder / "best.json", json.dumps(told) + "\n")

    def _merge(self) -> None:
        if self.ranks.leader:
            import zero_hf

            folder = self.folder
            shutil.rmtree(folder / "merged", ignore_errors=True)  # of a run that is exported once more
            try:
                zero_hf.merge_adapter(pretrained.local(self.config), folder / "pretrained", folder / "merged")
            except zero_hf.ConfigError as error:
                raise ConfigError(f"adapter.merge=true: {error}") from error

    def _same_data(self, read: Any) -> None:
        """Raises ConfigError if run.resume=auto would go on with other rows."""
        saved = self.folder / _DATA
        if self.config.run.resume == "auto" and saved.is_file():
            before = json.loads(saved.read_text())["digest"]
            if before != read.digest():
                raise ConfigError(
                    f"run.resume=auto: the data differ from the saved run's: they are {read.digest()}, and were "
                    f"{before}; bring them back, or continue on purpose with run.resume={self.folder}"
                )

    def _trainer(self, stack: ExitStack, read: Any, draft: engine.Draft, plan: zero_offload.Plan, watch: Watch) -> Any:
        import datasets

        datasets.disable_progress_bars()
        config, ranks, folder = self.config, self.ranks, self.folder
        if config.tracker.kind != "none" and ranks.leader:
            (folder / "tracker").mkdir(exist_ok=True)
        for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_DIR"):  # what trackers write here belongs to the run
            if name not in os.environ:
                os.environ[name] = str(folder / "tracker")
                stack.callback(os.environ.pop, name, None)
        prepare = partial(self._prepare, read, watch.history)
        setting = trainers.Setting(
            config, ranks, stack, draft, plan, watch, self._say, prepare, lambda: cast(mixture.Order, self.order)
        )
        trainer = trainers.make(setting, read, self.tokenizer)
        self.settle(read)
        trainer.args.max_steps = config.run.steps
        self._say(self.passed(read, config.run.steps))
        return trainer

    def _prepare(self, read: Any, history: History, prepare: Any, dataset: Any, *given: Any) -> Any:
        """Has TRL prepare the rows of a part, which the last of `given` names. Says and counts what it cuts off."""
        import datasets

        def fitted(rows: Any, configs: list[DataConfig], of: str = "") -> Any:
            left, said, self.counts[given[-1] + of] = answers.fitted(prepare, rows, *given, configs=configs, of=of)
            if said:
                self._say(said)
                history.remarks.append(said)
            return left

        if given[-1] != "train":
            return fitted(dataset, [part.config for part in read.parts])
        several = len(read.parts) > 1
        parts = [
            fitted(part.training, [part.config], f" of {part.config.path}" if several else "") for part in read.parts
        ]
        self.order = self._order([len(part) for part in parts], read)
        return datasets.concatenate_datasets(parts)

    def _report(self, watch: Watch, plan: zero_offload.Plan) -> None:
        if watch.ready is not None:
            self._write_report(watch.ready, watch.history, plan)


def _has_messages(read: Any) -> bool:
    """Whether the rows hold messages, which only a chat template turns into text."""
    return isinstance(read.training[0][COLUMNS[read.kind][-1]], list)
