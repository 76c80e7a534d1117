"""Fine-tunes a pretrained model with TRL's trainers, which it reaches through zero_hf.sharded.

TRL owns the data loader, the loss and the loop, see trainers.py. The plan, the store and the run folder are those of
any run, see run/train.py; a checkpoint is a Trainer's checkpoint-N, with zero_hf's shards in it.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

import zero_offload
from zero_train.data import row_sets
from zero_train.errors import ConfigError, RunError, told
from zero_train.model import folders, pretrained
from zero_train.report.metrics import History, replace
from zero_train.run import resume, train
from zero_train.run.assemble import Assembled, Draft
from zero_train.run.loop import passes_over
from zero_train.run.ranks import together
from zero_train.run.resume import Checkpoint
from zero_train.run.train import Outcome
from zero_train.schema import Config
from zero_train.settings import checks, placement
from zero_train.settings import compose as configuration
from zero_train.tune import answers, trainers, validation
from zero_train.tune.callback import Watch

_ORDER = 3  # version of the rows' order and of the held-out part: raise it when a run would draw them otherwise
_DATA = "data.json"  # in the run folder: which rows the run learns from, for run.resume=auto; how many are cut


def run(config: Config, on_end: Callable[[Assembled], None] | None = None) -> Outcome:
    """Runs `config` on this rank, as `train.run` does."""
    return train.run(config, on_end, FineTune)


@dataclass
class FineTune(train.Run):
    """A run of one of TRL's trainers on one rank."""

    arguments: Any = None  # of TRL
    size: int = 0  # rows of a pass, or sequences of packed rows
    counts: dict[str, dict[str, int]] = field(default_factory=dict)  # of rows that data.sequence_length cuts, by part

    @property
    def unit(self) -> str:
        tokens = self.config.task.kind in ("sft", "grpo")
        return "nats per token" if tokens else f"nats per {'row' if self.config.task.kind == 'kto' else 'pair'}"

    def read(self) -> tuple[Any, nn.Module]:
        config = self.config
        read = row_sets.learned(config)
        folder = folders.local(config.model.path)
        if pretrained.tokenizer_files(folder) or not config.run.dry:
            self.tokenizer = pretrained.tokenizer_of(folder)
            if config.data.chat_template:
                answers.take_template(self.tokenizer, config.data.chat_template)
        if read is not None:
            read = self._learnable(read, folder)
        if read is not None or config.trl:
            self.arguments = trainers.arguments(config, self.ranks.device.type == "cpu", read, self.done == 0)
        if read is not None:
            self.size = len(read.training) * getattr(self.arguments, "num_generations", 1)
            if config.task.kind == "grpo":
                answers.roomy(read, self.tokenizer, self.arguments, config)
        return read, pretrained.build(folder, config)

    def _learnable(self, read: row_sets.Rows, folder: Path) -> row_sets.Rows:
        """Returns the rows in a form from which TRL learns the tokens of task.loss_on."""
        config = self.config
        if read.of_messages and self.tokenizer.chat_template is None:
            raise ConfigError(
                f"model.path={folder}: its tokenizer has no chat template, and {read.name.split(',')[0]} has messages; "
                "name a model that was tuned for chats, a template with data.chat_template=FILE, or write the rows as "
                "texts"
            )
        whole = config.adapter.kind == "qlora" or config.adapter.dora  # the model is read before TRL has the rows
        for part in (read.training, read.validation) if config.task.kind != "grpo" and read.of_messages else ():
            answers.accepted((part if whole else part.select(range(1))) if part else (), self.tokenizer)
        return answers.mapped(read, self.tokenizer, folder, config) if config.task.kind == "sft" else read

    def items(self, read: Any) -> float | None:
        return self.size or None

    def passed(self, read: Any, steps: int) -> str:
        packed = "sequences of packed rows" if checks.packs(self.config) and self.counts else "rows"
        what = "texts for all rows" if self.config.task.kind == "grpo" else packed
        samples = steps * (self.config.run.global_batch or 0)
        return f"{steps:,} steps, {passes_over(samples, self.size, f'{self.size:,} {what}')}"

    def announce_data(self, read: Any) -> str:
        if read is None:
            return "data: none, as data.path is not given"
        run, said = self.config.run, [f"data: {read.name}", *read.remarks]
        if self.config.task.kind == "grpo" and not self.arguments.ds3_gather_for_generation:
            where = "" if placement.on(self.config.offload.parameters, "device") else " that are not on the device"
            said.append(f"generation: each token of a batch reads all parameters{where} once, in every forward")
        if run.dry:  # rows that have nothing to learn are still there
            said.append(f"{'at most ' if run.epochs else ''}{self.passed(read, run.steps)}")
        return "\n".join(said)

    def train_in(
        self, stack: ExitStack, read: Any, draft: Draft, plan: zero_offload.Plan, checkpoint: Checkpoint | None
    ) -> Outcome:
        """Shards the model when the trainer asks for it, trains, evaluates and saves."""
        import transformers

        config, ranks, folder = self.config, self.ranks, self.folder
        if checkpoint:
            together(ranks, lambda: self._same_data(read))
            self.say_continued(checkpoint)
        done, validates = checkpoint.step if checkpoint else 0, read.validation is not None
        watch = Watch(self, stack, draft, plan, done, validates)
        with told(f"task={config.task.kind}: ", ValueError, TypeError):  # of TRL, of transformers, of zero_hf
            trainer = self._trainer(read, watch)
        resume.not_past(checkpoint, config)
        with stack, self.asked.gentle():
            if ranks.leader:  # the configuration first: a folder with anything else is refused without it
                replace(folder / resume.CONFIG, configuration.as_yaml(config))
                replace(folder / _DATA, json.dumps({"digest": read.digest, "order": _ORDER, **self.counts}) + "\n")
                stack.callback(lambda: self._write_report(watch.ready, watch.history, plan))
            watch.begin()
            if checkpoint and self._ended(checkpoint):  # a Trainer would take one more step
                trainer.create_optimizer_and_scheduler(config.run.steps)
                trainer._load_optimizer_and_scheduler(str(checkpoint.folder))
                trainer.state = transformers.TrainerState.load_from_json(str(checkpoint.folder / resume.TRAINER_STATE))
            else:
                trainer.train(resume_from_checkpoint=str(checkpoint.folder) if checkpoint else None)
            ready = watch.ready
            ready.wait()
            signal = ranks.most(self.asked.signal)
            if signal:
                self.say(self._stopped(trainer.state.global_step))
            else:
                self.say(f"trained {self.passed(read, trainer.state.global_step)}")
                self._take_best(trainer)
            if config.run.export and not signal:
                trainer.save_model(str(folder / "pretrained"))
                if config.adapter.merge:
                    together(ranks, self._merge)
            if self.on_end is not None:
                self.on_end(ready)
        self.say(f"results in {folder}")
        return Outcome(128 + signal if signal else 0, folder, watch.history)

    def _ended(self, checkpoint: Checkpoint) -> bool:
        """Whether nothing is left to train after this checkpoint."""
        run = self.config.run
        if checkpoint.step == run.steps or run.patience is None:
            return checkpoint.step == run.steps
        state = json.loads((checkpoint.folder / resume.TRAINER_STATE).read_text())
        return validation.verdict(run, state["log_history"]).stops

    def _take_best(self, trainer: Any) -> None:
        """Gives the model the weights of the checkpoint with the lowest validation loss, if the run keeps it."""
        found = validation.verdict(self.config.run, trainer.state.log_history)
        if not self.config.run.keep_best or not found.step:
            return
        said = f"the lowest validation loss was {found.loss:.4f} {self.unit}, after step {found.step}"
        folder = self.folder / "checkpoints" / f"checkpoint-{found.step}"
        if not resume.complete(folder):
            folder = Path(trainer.state.best_model_checkpoint or folder)  # of the run that this one continues
        if not resume.complete(folder):
            raise RunError(f"{said}, and {folder} is gone; set run.keep_best=false to export the last step's")
        if found.step != trainer.state.global_step:
            trainer.state.best_model_checkpoint = str(folder)
            trainer._load_best_model()
        self.say(f"{said}: {folder}")
        if self.ranks.leader:
            told = {"step": found.step, "loss": found.loss, "checkpoint": os.path.relpath(folder, self.folder)}
            replace(self.folder / "best.json", json.dumps(told) + "\n")

    def _merge(self) -> None:
        if self.ranks.leader:
            import zero_hf

            folder = self.folder
            shutil.rmtree(folder / "merged", ignore_errors=True)  # of a run that is exported once more
            with told("adapter.merge=true: ", zero_hf.ConfigError):
                zero_hf.merge_adapter(str(self.config.model.path), folder / "pretrained", folder / "merged")

    def _same_data(self, read: Any) -> None:
        """Raises ConfigError if run.resume=auto would go on with other rows, or in another order."""
        saved, now = self.folder / _DATA, {"digest": read.digest, "order": _ORDER}
        if self.config.run.resume == "auto" and saved.is_file():
            before = {name: json.loads(saved.read_text()).get(name) for name in now}
            if before != now:
                raise ConfigError(
                    f"run.resume=auto: the saved run had other rows, or took them in another order (None is that of "
                    f"zero-train 0.2): {before}, now {now}; bring its rows back, or continue from its weights with "
                    f"run.resume={self.folder} and another run.dir"
                )

    def _trainer(self, read: Any, watch: Watch) -> Any:
        import datasets

        datasets.disable_progress_bars()
        config, ranks, folder = self.config, self.ranks, self.folder
        if config.tracker.kind != "none" and ranks.leader:
            (folder / "tracker").mkdir(exist_ok=True)
        for name in ("TENSORBOARD_LOGGING_DIR", "WANDB_DIR"):  # what trackers write here belongs to the run
            if name not in os.environ:
                os.environ[name] = str(folder / "tracker")
                watch.stack.callback(os.environ.pop, name, None)
        trainer = trainers.make(watch, read, self.tokenizer)
        self.settle(read)
        trainer.args.max_steps = config.run.steps
        self.say(self.passed(read, config.run.steps))
        return trainer

    def prepare(self, history: History, prepare: Any, dataset: Any, *given: Any) -> Any:
        """Has TRL prepare the rows of the part that given[-1] names. Reports and counts the rows that it cuts."""
        left, said, self.counts[given[-1]] = answers.fitted(prepare, dataset, *given)
        if said:
            self.say(said)
            history.remarks.append(said)
        if given[-1] == "train":
            self.size = len(left)
        return left
