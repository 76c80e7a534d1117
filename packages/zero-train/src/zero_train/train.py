"""One run: check ─> plan ─> assemble ─> loop ─> report. Knows the siblings through engine.py and planning.py only.

Nothing is written before every rank has passed its checks and the first one has locked the run folder; what a refused
run made by then is taken away again.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import zero_core
import zero_offload
from zero_offload.advice import is_out_of_memory
from zero_train import checks, data, engine, formats, interrupt, planning, probing, progress, report, resume, sampling
from zero_train import config as configuration
from zero_train import threads as cores
from zero_train.errors import ConfigError, RunError
from zero_train.folder import claimed
from zero_train.loop import History, Loop, Step
from zero_train.ranks import Ranks, joined
from zero_train.schema import Config

Result = TypeVar("Result")


@dataclass(frozen=True)
class Outcome:
    """What a run came to."""

    exit_code: int = 0
    folder: Path | None = None  # None: a dry run
    history: History = field(default_factory=History)
    sample: str = ""


def run(config: Config, on_end: Callable[[engine.Engine], None] | None = None) -> Outcome:
    """Does what `config` says on this rank. `on_end` sees the engine after the last step, before it is taken apart.

    Raises:
        ConfigError: on every rank, where any rank cannot run it. Nothing is left behind then.
        RunError: training failed: a disk that filled up, an I/O error, a device without room, a rank that is gone. The
            plots are written.
    """
    with interrupt.handled() as asked:
        try:
            with joined(config.hardware.device) as ranks, interrupt.unhidden():
                return _Run(config, ranks, asked, on_end).go()
        except (zero_core.ZeroError, zero_offload.OffloadError, OSError) as error:
            raise RunError(f"the run stopped: {error}") from error
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            raise RunError(
                f"the run stopped, out of memory: {str(error).strip() or type(error).__name__}; lower run.micro_batch "
                "or data.sequence_length, set offload.activations=recompute, or put more on nvme with offload=nvme"
            ) from error
        except KeyboardInterrupt:
            _say("interrupted; nothing was trained")
            return Outcome(asked.exit_code or 130)


class _Run:
    """One run's parts; each method is a part of `go`."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        asked: interrupt.Interrupt,
        on_end: Callable[[engine.Engine], None] | None,
    ) -> None:
        self._config, self._ranks, self._asked, self._on_end = config, ranks, asked, on_end
        self._config.run.dir = ranks.agree(config.run.dir)
        self._format = ""
        self._cores: Any | None = None  # zero_optim_cpu.Cores: beside a GPU

    def go(self) -> Outcome:
        config, ranks = self._config, self._ranks
        with cores.claimed(config, ranks) as self._cores:
            if config.run.threads:
                torch.set_num_threads(config.run.threads)
            if config.run.probe:
                pool = self._cores and self._cores.pool
                self._say(_together(ranks, lambda: probing.measured(config, ranks, pool)))
                return Outcome()
            return self._run()

    def _run(self) -> Outcome:
        config, ranks = self._config, self._ranks
        corpus, draft, plan = _together(ranks, self._prepared)
        self._announce(corpus, draft, plan)
        if config.run.dry:
            return Outcome()
        folder = Path(config.run.dir)
        with ExitStack() as stack:
            unlocked = _together(ranks, lambda: stack.enter_context(claimed(folder)) if ranks.leader else "")
            if unlocked:
                self._say(f"run.dir={folder} cannot be locked ({unlocked}): nothing keeps a second run out of it")
            checkpoint = self._checkpoint()  # once more: nobody else changes the folder from here on
            ready = stack.enter_context(engine.assembled(draft, plan, config, ranks))
            if ready.backend:
                self._say(
                    f"nvme: {ready.backend}, in {', '.join(map(str, checks.nvme_paths(config, ranks.local_rank)))}"
                )
            if ready.huge_pages != "ok":
                self._say(f"no huge pages for the arena ({ready.huge_pages}): direct I/O is slower")
            if checkpoint:
                said = _together(ranks, lambda: resume.load(checkpoint, ready, config, ranks, corpus.digest()))
                rest = "" if checkpoint.step < config.run.steps else ", the last: nothing is left to train"
                self._say(f"continuing after step {checkpoint.step}, from {checkpoint.folder}{rest}")
                for sentence in filter(None, [resume.differing(checkpoint, config), *said]):
                    self._say(sentence)
            elif config.run.resume:
                self._say(f"run.resume=auto: no checkpoint in {folder}, beginning at step 1")
            return self._train(ready, corpus, plan, folder, checkpoint.step + 1 if checkpoint else 1)

    def _checkpoint(self) -> resume.Checkpoint | None:
        """The checkpoint to continue from, the same on every rank."""
        config, ranks = self._config, self._ranks
        found = _together(ranks, lambda: resume.found(config))
        seen = ranks.gather(str(found.step) if found else "none")
        if len(set(seen)) > 1:
            raise ConfigError(
                f"run.resume={config.run.resume}: ranks see different last checkpoints, after steps "
                f"{', '.join(map(str, seen))}; name a folder that is the same on every machine with run.dir=…"
            )
        return found

    def _prepared(self) -> tuple[data.Corpus, engine.Draft, zero_offload.Plan]:
        """Everything that can be refused, and nothing that is written or takes long."""
        config, ranks = self._config, self._ranks
        checks.values(config)
        self._format = formats.resolve(config, ranks.device)
        checks.values(config)  # once more: auto may have met a layout that it cannot go with
        checks.packages(config)
        if not config.run.dry:
            planning.here(config, ranks)
            checks.run_folder(config)
        checks.nvme(config, ranks.local_rank)
        corpus = data.load(config.data, config.run.seed)
        resume.found(config)
        on_gpu = (config.hardware.device or ranks.device.type) != "cpu"  # of the machine that is planned for
        draft = engine.draft(config, self._cores and self._cores.pool, on_gpu=on_gpu)
        return corpus, draft, planning.make(config, draft.model, ranks, draft.step)

    def _announce(self, corpus: data.Corpus, draft: engine.Draft, plan: zero_offload.Plan) -> None:
        config, ranks = self._config, self._ranks
        numel = sum(p.numel() for p in draft.model.parameters())
        planned = planning.described_ranks(plan.hardware, config, ranks)
        machine = plan.hardware.name if plan.hardware else ranks.device.type
        words = self._format or config.precision.parameters
        self._say(
            f"{config.model.kind}: {numel / 1e6:.1f} M parameters in {words}; stage "
            f"{config.zero.stage} on {planned} rank{'s' if planned > 1 else ''}, {machine}"
        )
        self._say(
            f"data: {corpus.name}; {corpus.training.numel() / 1e6:.1f} MB to train on, "
            f"{corpus.validation.numel() / 1e6:.1f} MB held out"
        )
        self._say(planning.described(plan, config, ranks))
        if self._cores:
            self._say(f"update of each rank: {self._cores}" if ranks.world_size > 1 else f"update: {self._cores}")

    def _train(
        self, ready: engine.Engine, corpus: data.Corpus, plan: zero_offload.Plan, folder: Path, first: int
    ) -> Outcome:
        config, ranks = self._config, self._ranks
        loop = Loop(ready, corpus, config, ranks, self._asked)
        sample = ""
        shown = progress.reporter(ranks.leader, config.run.steps, first - 1, config.run.report_every, config.run.bar)
        with ExitStack() as stack:
            stack.enter_context(self._asked.gentle())
            metrics = None
            if ranks.leader:
                configuration.save(config, folder / resume.CONFIG)
                metrics = stack.enter_context(report.Metrics(folder, first))
            text = corpus.digest() if config.run.checkpoint_every else ""
            try:
                with shown, zero_offload.explained(plan):
                    signal = loop.run(
                        first,
                        lambda step: _show(step, shown, metrics),
                        lambda number, loss: _show_validation(number, loss, shown, metrics),
                        lambda number: resume.save(folder, number, ready, config, ranks, text),
                    )
                if signal:
                    steps = len(loop.history.steps) + first - 1
                    self._say(f"stopped after step {steps} of {config.run.steps}")
                else:
                    sample = self._sample(ready)
                    if config.run.export:
                        _export(ready, folder, ranks)
                if self._on_end is not None:
                    self._on_end(ready)
            finally:
                if ranks.leader:
                    self._write_report(ready, loop.history, plan, folder)
        self._say(f"results in {folder}")
        return Outcome(128 + signal if signal else 0, folder, loop.history, sample)

    def _sample(self, ready: engine.Engine) -> str:
        run = self._config.run
        if not run.sample_bytes:
            return ""
        text = sampling.generate(
            ready.model,
            run.sample_prompt,
            run.sample_bytes,
            temperature=run.sample_temperature,
            seed=run.seed,
            context=self._config.data.sequence_length,
            device=self._ranks.device,
            stop=lambda: bool(self._ranks.most(self._asked.signal)),
        )
        self._say(f"--- sample ---\n{text}\n--------------")
        return text

    def _write_report(self, ready: engine.Engine, history: History, plan: zero_offload.Plan, folder: Path) -> None:
        """Plots and timeline of what was trained; a plot that fails is named and takes nothing else with it."""
        for name, write in (
            ("report.png", lambda: report.draw(folder, history, plan.total("nvme"))),
            ("timeline.json", lambda: ready.timeline.save(folder / "timeline.json")),
            ("timeline.png", lambda: report.draw_timeline(folder / "timeline.png", ready.timeline.events())),
        ):
            if name.endswith(".png") and not self._config.run.plots:
                continue
            if not history.steps and (name != "report.png" or (folder / name).exists()):
                continue  # a finished run that is exported keeps the timeline of its last steps
            try:
                write()
            except (OSError, ValueError, RuntimeError, ImportError) as error:
                self._say(f"could not write {name}: {error}")

    def _say(self, text: str) -> None:
        if self._ranks.leader:
            _say(text)


def _export(ready: engine.Engine, folder: Path, ranks: Ranks) -> None:
    """Weights as safetensors, and the architecture: what `model=hf model.path=…` and transformers read."""
    target = folder / "pretrained"
    if ranks.leader:
        target.mkdir(exist_ok=True)
        ready.model.config.save_pretrained(target)  # type: ignore[union-attr, operator]
    ranks.agree("the folder is there")
    zero_core.save_pretrained(ready.model, target)


def _together(ranks: Ranks, function: Callable[[], Result]) -> Result:
    """`function()` on every rank; where any of them refuses, all of them do, with the first one's reason."""
    result, reason = None, None
    try:
        result = function()
    except ConfigError as error:
        reason = str(error)
    reasons = [text for text in ranks.gather(reason) if text]
    if reasons:
        raise ConfigError(reasons[0])
    assert result is not None or reason is None
    return result  # type: ignore[return-value]


def _show(step: Step, shown: progress.Reporter, metrics: report.Metrics | None) -> None:
    if metrics:
        metrics.step(step)
    shown.step(progress.Line(step.step, step.loss, step.tokens_per_second, step.exposed_seconds))


def _show_validation(number: int, loss: float, shown: progress.Reporter, metrics: report.Metrics | None) -> None:
    if metrics:
        metrics.validation(number, loss)
    shown.say(f"validation after step {number}: {loss:.4f} nats/byte")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
