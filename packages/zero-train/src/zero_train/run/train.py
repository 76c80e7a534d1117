"""Trains one run: check ─> plan ─> assemble ─> loop ─> report.

Reaches the siblings through assemble.py and planning.py.

Nothing is written before every rank has passed its checks and the first rank has locked the run folder. A run that is
refused later leaves no file there but the lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from signal import SIGINT
from typing import Any

import torch
from torch import nn

import zero_core
import zero_offload
from zero_offload.oom_hints import is_out_of_memory
from zero_train.data import text as data
from zero_train.data import tokens
from zero_train.errors import ConfigError, RunError
from zero_train.model import causal_lm, dtypes, pretrained
from zero_train.report import picture
from zero_train.report.metrics import History, replace
from zero_train.report.progress import Told, say
from zero_train.run import assemble, durable, interrupt, planning, resume
from zero_train.run import cpu_affinity as cores
from zero_train.run.assemble import Assembled, Draft
from zero_train.run.loop import Loop, passes_over, settle_steps
from zero_train.run.probing import measured
from zero_train.run.ranks import Ranks, joined, same_folder, same_text, together
from zero_train.run.resume import Checkpoint
from zero_train.run.run_folder import claimed
from zero_train.schema import Config
from zero_train.settings import checks
from zero_train.settings import compose as configuration


@dataclass(frozen=True)
class Outcome:
    """The result of a run."""

    exit_code: int = 0
    folder: Path | None = None  # None: a dry run
    history: History = field(default_factory=History)
    sample: str = ""

    @property
    def losses(self) -> list[float]:
        """The validation losses, or those of the steps where none was taken. Optuna minimises the last."""
        return [loss for _, loss in self.history.validation] or [step.loss for step in self.history.steps]


def run(config: Config, on_end: Callable[[Assembled], None] | None = None, made: type[Run] | None = None) -> Outcome:
    """Runs `config` on this rank. `on_end` is given the engine after the last step, before it is closed.

    made: the class that runs it; None: Run, which pretrains.

    Raises:
        ConfigError: raised on every rank if any rank cannot run it. No result is left behind.
        RunError: training failed: the disk is full, an I/O error, no memory, a lost rank. The plots are written.
    """
    with interrupt.handled() as asked:
        try:
            ranks = joined(config.hardware.get("device"), config.run.timeout)
            return (made or Run)(config, ranks, asked, on_end).go()
        except (zero_core.ZeroError, zero_offload.OffloadError, OSError) as error:
            raise RunError(f"the run stopped: {planning.keyed(str(error), config)}") from error
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(f"out of memory before training: {str(error).strip() or type(error).__name__}") from error
        except KeyboardInterrupt:
            say("interrupted; nothing was trained")
            return Outcome(128 + (asked.signal or SIGINT))


@dataclass
class Run:
    """A run on one rank. `go` runs it, the other methods are its parts."""

    config: Config
    ranks: Ranks
    asked: interrupt.Interrupt
    on_end: Callable[[Assembled], None] | None
    format_reason: str = ""  # why precision=auto chose its format
    batch_told: str = ""  # that run.accumulate follows from run.global_batch
    cores: Any | None = None  # zero_optim_cpu.Cores, beside a GPU
    tokenizer: Any = None  # of transformers; None: text is read as bytes
    done: int = 0  # steps that the checkpoint to continue from has taken

    @property
    def folder(self) -> Path:
        """The run folder."""
        return Path(self.config.run.dir)

    @property
    def unit(self) -> str:
        """The unit of losses."""
        return "nats per byte" if tokens.folder_of(self.config) is None else "nats per token"

    def go(self) -> Outcome:
        config, ranks = self.config, self.ranks
        config.run.dir = ranks.agree(config.run.dir)
        with cores.claimed(config, ranks) as self.cores:
            if config.run.threads:
                torch.set_num_threads(config.run.threads)
            if config.run.probe:
                pool = self.cores and self.cores.pool
                self.say(together(ranks, lambda: measured(config, ranks, pool)))
                return Outcome()
            if ranks.world_size > 1 and tokens.folder_of(config) is not None:  # one rank reads text into tokens
                together(ranks, lambda: self._corpus() if ranks.leader else None)
            corpus, draft, plan = together(ranks, self.prepared)
            if corpus is not None:
                source = f"data={config.data.kind}" if config.data.path is None else f"data.path={config.data.path}"
                same_text(ranks, corpus, source)
            self._announce(corpus, draft, plan)
            return Outcome() if config.run.dry else self._run(corpus, draft, plan)

    def _run(self, corpus: Any, draft: Draft, plan: zero_offload.Plan) -> Outcome:
        config, ranks, folder = self.config, self.ranks, self.folder
        with ExitStack() as stack:
            unlocked = together(ranks, lambda: stack.enter_context(claimed(folder)) if ranks.leader else "")
            if unlocked:
                self.say(f"run.dir={folder} cannot be locked ({unlocked}), so a second run can write into it as well")
            self.say(together(ranks, lambda: durable.as_checkpoint(config, draft, plan, ranks)))
            if ranks.local_world_size < ranks.world_size and (config.run.checkpoint_every or config.run.export):
                same_folder(ranks, folder)
            checkpoint = self._checkpoint()  # once more: the folder is ours from here on
            durable.on_their_disks(config, ranks)
            if plan.shape.discrete and config.offload.kind != "none":
                config.offload.update_share = plan.shape.update_share
            if config.offload.kind == "auto" and plan.shape.discrete and config.run.durable is None:
                config.offload.planned = ranks.gather(dict(plan.placements))
            with zero_offload.explained(plan):
                return self.train_in(stack, corpus, draft, plan, checkpoint)

    def train_in(
        self, stack: ExitStack, corpus: Any, draft: Draft, plan: zero_offload.Plan, checkpoint: Checkpoint | None
    ) -> Outcome:
        """Trains in the locked folder, from `checkpoint` on. `stack` holds the lock."""
        config, ranks = self.config, self.ranks
        with stack:
            ready = stack.enter_context(assemble.assembled(draft, plan, config, ranks))
            for remark in ready.remarks:
                self.say(remark)
            done, loop = 0, Loop(ready, corpus, config, ranks, self.asked)
            if config.run.durable is not None:
                text = corpus.digest
                done, remark = together(ranks, lambda: durable.go_on(ready, config, text, lambda: loop.step))
                if done:
                    self.say(f"continuing after step {done}, the last on nvme")
                    self.say(remark)
            if checkpoint and checkpoint.step > done:
                done = checkpoint.step
                said = together(ranks, lambda: resume.load(checkpoint, ready, config, ranks, corpus.digest))
                self.say_continued(checkpoint, said)
            elif config.run.resume and not done:
                self.say(f"run.resume=auto: no checkpoint in {self.folder}, beginning at step 1")
            return self._train(loop, ready, corpus, plan, done + 1)

    def say_continued(self, checkpoint: Checkpoint, more: Sequence[str] = ()) -> None:
        """Says which run goes on, and how it differs from the saved one."""
        rest = "" if checkpoint.step < self.config.run.steps else ", the last: nothing is left to train"
        self.say(f"continuing after step {checkpoint.step}, from {checkpoint.folder}{rest}")
        for remark in (resume.differing(resume.saved(checkpoint), self.config), *more):
            self.say(remark)

    def _checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint to continue from, the same on every rank."""
        found = together(self.ranks, lambda: resume.found(self.config))
        resume.not_past(found, self.config)
        seen = self.ranks.gather(str(found.step) if found else "none")
        if len(set(seen)) > 1:
            raise ConfigError(
                f"run.resume={self.config.run.resume}: ranks see different last checkpoints, after steps "
                f"{', '.join(map(str, seen))}; name a folder that is the same on every machine with run.dir=…"
            )
        return found

    def _corpus(self) -> data.Corpus | None:
        """Returns the text of the run, or None in a dry run whose text a tokenizer would have to read."""
        config = self.config
        folder = tokens.folder_of(config)
        if folder is None:
            return data.load(config.data, config.run.seed)
        self.tokenizer = pretrained.tokenizer_of(folder)
        return None if config.run.dry else tokens.load(config, self.tokenizer, folder, self.say)

    def prepared(self) -> tuple[Any, Draft, zero_offload.Plan]:
        """Does everything that can lead to a refusal. It is quick and writes nothing."""
        config, ranks = self.config, self.ranks
        checks.values(config)
        self.format_reason = dtypes.resolve(config, ranks.device)
        checks.values(config)  # again, because auto may have chosen a format that excludes another choice
        checks.packages(config)
        if not config.run.dry:
            planning.here(config, ranks)
        found = resume.found(config)
        self.done = found.step if found else 0
        facts = planning.hardware(config, ranks) if config.run.dry else None
        count = planning.described_ranks(facts, config, ranks)
        self.batch_told = resume.keep_batch(found, config, count)
        resume.keep_plan(found, config, count)
        read, model = self.read()
        self.settle(read)
        resume.not_past(found, config)
        on_gpu = (config.hardware.get("device") or ranks.device.type) != "cpu"  # of the machine that is planned for
        draft = assemble.draft(config, self.cores and self.cores.pool, on_gpu=on_gpu, model=model)
        plan = planning.make(config, model, ranks, draft.step)
        if not config.run.dry:
            planning.room(plan, config, ranks, self.done, len(resume.checkpoints(self.folder)))
        return read, draft, plan

    def settle(self, read: Any) -> None:
        """Sets run.steps where run.epochs says how many passes over `read` the run has."""
        config = self.config
        items = self.items(read)
        if items is not None:
            settle_steps(config, items)
        elif config.run.epochs is not None:
            raise ConfigError(
                f"run.epochs={config.run.epochs:g} counts passes over data that this dry run does not read; give "
                "run.steps in its place"
            )

    def items(self, read: Any) -> float | None:
        """Returns how many samples a pass over `read` has; None: it is not read."""
        return None if read is None else read.training.numel() / self.config.data.sequence_length

    def passed(self, read: Any, steps: int) -> str:
        """Returns the number of `steps` and their passes over `read`, as text."""
        batch, items = self.config.run.global_batch or 0, self.items(read) or 1
        return f"{steps:,} steps, {passes_over(steps * batch, items, shown_size(read))}"

    def read(self) -> tuple[Any, nn.Module]:
        """Returns the training data, and the model without memory."""
        corpus, model = self._corpus(), assemble.model_of(self.config)
        if self.tokenizer is not None:
            causal_lm.check_vocabulary(model, self.config.model, len(self.tokenizer))
        return corpus, model

    def _announce(self, corpus: Any, draft: Draft, plan: zero_offload.Plan) -> None:
        config, ranks = self.config, self.ranks
        numel = causal_lm.numel(draft.model)
        planned = planning.described_ranks(plan.hardware, config, ranks)
        machine = plan.hardware.name if plan.hardware else ranks.device.type
        self.say(
            f"{config.model.kind}: {numel / 1e6:.1f} M parameters in "
            f"{self.format_reason or config.precision.parameters}; stage {config.zero.stage} on {planned} "
            f"rank{'s' if planned > 1 else ''}, {machine}"
        )
        self.say(self.batch_told)
        self.say(self.announce_data(corpus))
        self.say(planning.described(plan, config, ranks, self.done))
        if self.cores:
            self.say(f"update of each rank: {self.cores}" if ranks.world_size > 1 else f"update: {self.cores}")

    def announce_data(self, corpus: Any) -> str:
        """Returns a description of the training data."""
        if corpus is None:
            return f"data: not read, as a dry run does not read text with a tokenizer ({len(self.tokenizer):,} tokens)"
        held_out, unit = corpus.validation.numel() / 1e6, "MB" if corpus.unit == "byte" else "M tokens"
        said = f"data: {corpus.name}; {shown_size(corpus)} to train on, {held_out:.1f} {unit} held out"
        return f"{said}; {self.passed(corpus, self.config.run.steps)}"

    def _train(self, loop: Loop, ready: Assembled, corpus: Any, plan: zero_offload.Plan, first: int) -> Outcome:
        config, ranks, folder = self.config, self.ranks, self.folder
        run, sample = config.run, ""
        with ExitStack() as stack:
            stack.enter_context(self.asked.gentle())
            if ranks.leader:
                replace(folder / resume.CONFIG, configuration.as_yaml(config))
                stack.callback(self._write_report, ready, loop.history, plan)
            text = corpus.digest if run.checkpoint_every else ""
            savings: list[Any] = []
            with Told(folder, run, first - 1, ranks.leader) as told:
                signal = loop.run(
                    first, told, lambda step: savings.append(resume.save(folder, step, ready, config, ranks, text))
                )
                if savings:
                    savings[-1].wait()
                    resume.delete_old(folder, config, ranks)
            if run.durable is not None and loop.history.steps:
                zero_core.commit(ready.model)
            if signal:
                self.say(self._stopped(len(loop.history.steps) + first - 1))
            else:
                self.say(f"trained {self.passed(corpus, run.steps)}")
                sample = self._sample(ready)
                if run.export:
                    zero_core.save_pretrained(ready.model, folder / "pretrained")
                    if self.tokenizer is not None and ranks.leader:
                        self.tokenizer.save_pretrained(folder / "pretrained")
            if self.on_end is not None:
                self.on_end(ready)
            if not signal and (run.checkpoint_every or run.export) and ready.slab is not None:
                ready.slab.unlink()  # of run.durable, whose last step is saved elsewhere now
        self.say(f"results in {folder}")
        return Outcome(128 + signal if signal else 0, folder, loop.history, sample)

    def _sample(self, ready: Assembled) -> str:
        run = self.config.run
        if not run.sample_bytes:
            return ""
        context, device = self.config.data.sequence_length, self.ranks.device
        text = causal_lm.sample(
            ready.model, run, context, device, lambda: bool(self.ranks.most(self.asked.signal)), self.tokenizer
        )
        self.say(f"--- sample ---\n{text}\n--------------")
        return text

    def _stopped(self, step: int) -> str:
        """Returns the text of a stopped run: its last step, and how to continue."""
        run, how = self.config.run, "it goes on with the same command and run.resume=auto"
        if not run.checkpoint_every and run.durable is None:
            how = "nothing was saved, as run.checkpoint_every=0"
        return f"stopped after step {step} of {run.steps}; {how}"

    def _write_report(self, ready: Assembled | None, history: History, plan: zero_offload.Plan) -> None:
        if ready is not None:  # else the run ended before there was one
            figures = picture.planned(plan) if self.config.run.plots else None
            for said in picture.write(self.folder, history, ready.timeline, figures, self.unit):
                self.say(said)

    def say(self, text: str) -> None:
        """Prints `text` on the first rank, unless it is empty."""
        if text and self.ranks.leader:
            say(text)


def shown_size(corpus: data.Corpus) -> str:
    return f"{corpus.training.numel() / 1e6:.1f} {'MB' if corpus.unit == 'byte' else 'M tokens'}"
