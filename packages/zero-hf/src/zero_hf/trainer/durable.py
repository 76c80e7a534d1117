"""Continues a Trainer's run after its last step on disk, whatever ended the process before.

Owns the Trainer's part of a step: its state, schedule and random states. A Trainer reads them like a checkpoint.
Not here: which step is complete (zero_core.resume), and whether it belongs to this run (`run_identity`).
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.utils import gather_object
from transformers import Trainer
from transformers.trainer_callback import ExportableState

import zero_core
import zero_offload
from zero_core.device import random_state_of, restore_random_state

from ..config import ConfigError, ZeroConfig
from ..sharding import Run, slab_of, step_of, there
from .checkpoints import SCHEDULER, STATE, TRAINER_STATE, checkpoints, complete, load_masters, overridden
from .run_identity import identity, refuse_another

IDENTITY = "durable.json"  # in a checkpoint: the identity of its run, see same_run


class DurableTrainer(Trainer):
    """The methods that `sharded` overrides for `ZeroConfig.durable`. Without it they are the Trainer's own."""

    zero_config: ZeroConfig
    zero_run: Run | None
    model: Any
    state: Any
    _zero_kept: _Kept | None = None  # this run's steps on disk; None: not durable, or not sharded yet
    _zero_made: str | None = None  # a checkpoint made from steps of another number of ranks, or of other tiles
    _zero_asked: str | bool | None = None  # train()'s resume_from_checkpoint

    def _zero_shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        inherited: Any = super()
        if self.zero_config.durable is None or optimizer is None:
            inherited._zero_shard(optimizer)
            return
        first = self.args.process_index == 0
        self._zero_made = _together(self, lambda: _as_checkpoint(self, optimizer) if first else None)
        inherited._zero_shard(optimizer)
        assert self.zero_run is not None
        try:
            self._zero_kept = _Kept(self, self.zero_run)
            if self._zero_made is not None:  # also for an evaluation before train(), which reads it again
                load_masters(self.model, self._zero_made, self.zero_run.optimizer)
        except BaseException:
            self.zero_run.close()
            raise

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **options: Any) -> Any:
        if self.zero_config.durable is not None:
            _refuse(self)
            self._zero_asked = resume_from_checkpoint
            if resume_from_checkpoint in (None, True):  # with no step on disk, a checkpoint is resumed
                resume_from_checkpoint = self._zero_last_checkpoint(any_run=resume_from_checkpoint is True)
        return super().train(resume_from_checkpoint, *given, **options)

    def _inner_training_loop(self, *given: Any, **options: Any) -> Any:
        if self.zero_config.durable is None:
            return super()._inner_training_loop(*given, **options)
        self.create_optimizer()
        kept: Any = self._zero_kept
        kept.trained = True
        if kept.found is not None or self._zero_made is not None:
            self._zero_refuse_another_checkpoint(self._zero_made or kept.where)
        if kept.found is None:
            resumed = self._zero_made or options.get("resume_from_checkpoint")
            if resumed is not None and (Path(resumed) / IDENTITY).is_file():
                kept.refuse_another_run(json.loads((Path(resumed) / IDENTITY).read_text(encoding="utf-8")), resumed)
            return super()._inner_training_loop(*given, **options | {"resume_from_checkpoint": resumed})
        self.current_flos = kept.found["flos"]
        with tempfile.TemporaryDirectory(prefix="zero-hf-") as folder:
            (Path(folder) / TRAINER_STATE).write_text(kept.found["state"], encoding="utf-8")
            kept.folder = folder
            return super()._inner_training_loop(*given, **options | {"resume_from_checkpoint": folder})

    def _zero_last_checkpoint(self, *, any_run: bool) -> str | None:
        """Returns the last complete checkpoint in output_dir, or None. any_run=False: the last one of a durable run.

        `_zero_made` does not count: the caller cannot have known of it.
        """
        found = [path for path in checkpoints(self.args) if complete(path) and str(path.absolute()) != self._zero_made]
        found = [path for path in found if any_run or (path / IDENTITY).is_file()]
        return str(found[-1]) if found else None

    def _zero_refuse_another_checkpoint(self, where: str) -> None:
        """Raises ConfigError if the caller names a checkpoint that is not the last one of this run.

        where: the slab or the checkpoint with the last step, for the message.
        """
        if self._zero_asked is None or isinstance(self._zero_asked, bool):
            return
        known = (self._zero_made, self._zero_last_checkpoint(any_run=True))
        if Path(self._zero_asked).absolute() not in [Path(each).absolute() for each in known if each is not None]:
            raise ConfigError(
                f"resume_from_checkpoint={self._zero_asked}, but the last step of this run is in {where}: leave "
                f"resume_from_checkpoint out to continue after that step, or remove {where}"
            )

    # -- loading -------------------------------------------------------------------------------------------------------

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        kept = self._zero_kept
        if kept is None or kept.found is None or checkpoint != kept.folder:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        for live, saved in zip(self.optimizer.param_groups, kept.groups, strict=True):
            live.update(saved)  # a new schedule has begun with them
        self.lr_scheduler.load_state_dict(kept.found["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        kept = self._zero_kept
        if kept is None or kept.found is None or checkpoint != kept.folder:
            super()._load_rng_state(checkpoint)
            return
        restore_random_state(kept.found["random"], kept.device)

    def _run_epoch(self, **given: Any) -> None:
        if self._zero_kept is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # the run had ended, in the middle of an epoch
            return
        super()._run_epoch(**given)

    # -- keeping steps -------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *given: Any, **options: Any) -> None:
        super()._maybe_log_save_evaluate(*given, **options)
        if self._zero_kept is not None:
            self._zero_kept.after_step = random_state_of(self._zero_kept.device)

    def _finalize_training(self, *given: Any, **options: Any) -> Any:
        kept = self._zero_kept
        if kept is None:
            return super()._finalize_training(*given, **options)
        zero_core.commit(self.model)  # before the best checkpoint is loaded over it
        made = super()._finalize_training(*given, **options)
        kept.ended = True
        self.accelerator.wait_for_everyone()
        last = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        saved = complete(last) and (last / STATE).is_dir()
        if saved and self.state.global_step >= self.state.max_steps:
            kept.remove()
        return made

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._zero_kept is not None and self.args.should_save:
            (Path(output_dir) / IDENTITY).write_text(json.dumps(self._zero_kept.identity), encoding="utf-8")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self._zero_kept is not None and self._zero_kept.ended:
            self.accelerator.wait_for_everyone()  # rank 0 writes
            self._zero_kept.remove()


class _Kept:
    """A Trainer's steps on disk: finds the last one when it is built, and adds the Trainer's state to each new one."""

    def __init__(self, trainer: Any, run: Run) -> None:
        optimizer: Any = run.optimizer
        self._trainer, self.device = trainer, zero_core.handle(run.model).ranks.device
        self._slab, self._history = run.slab, list[str]()
        self.trained = self.ended = False
        self.folder: str | None = None  # in which the Trainer finds its state
        self.where = f"{run.slab.name}.slab in {', '.join(run.slab.paths)}"
        self.after_step: Any = None
        before = random_state_of(self.device)
        try:
            self.identity = identity(trainer, trainer.zero_config)
            resumed = zero_core.resume(run.model, optimizer, extra=self._told)
        except zero_core.ZeroError as error:
            raise ConfigError(f"durable={trainer.zero_config.durable!r}: {error}") from error
        finally:
            restore_random_state(before, self.device)
        self.found: dict[str, Any] | None = resumed.extra
        self.groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        if self.found is not None:
            self.refuse_another_run(self.found["run"], self.where)
            if trainer.is_world_process_zero():
                sys.stdout.write(f"zero_hf: goes on after step {resumed.step}, from {self.where}\n")

    def refuse_another_run(self, before: Mapping[str, str], where: str) -> None:
        """Raises ConfigError on all ranks if `before` is the identity of another run. Collective."""
        output = str(self._trainer.args.output_dir)
        _together(self._trainer, lambda: refuse_another(output, before, self.identity, where))

    def _told(self) -> dict[str, Any]:
        """Returns the Trainer's data for a step. Called when the forward after the step begins."""
        trainer = self._trainer
        return {
            "run": self.identity,
            "state": self._state(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "random": self.after_step,
            "flos": float(trainer.current_flos),
        }

    def _state(self) -> str:
        """Returns the text of trainer_state.json. The log only grows, so each of its lines is encoded once."""
        state, callbacks = self._trainer.state, dict[str, Any]()
        for each in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            if isinstance(each, ExportableState):
                callbacks.setdefault(type(each).__name__, []).append(each.state())
        log = state.log_history
        self._history += [json.dumps(line) for line in log[len(self._history) :]]
        names = {field.name for field in dataclasses.fields(state)} - {"log_history", "stateful_callbacks"}
        rest = {name: getattr(state, name) for name in sorted(names)} | {"stateful_callbacks": callbacks}
        return f'{{"log_history": [{", ".join(self._history)}], {json.dumps(rest)[1:]}'

    def remove(self) -> None:
        """Removes the files, once their last step is saved elsewhere. This process can use them until it ends."""
        os.sync()  # a Trainer does not sync its checkpoints
        self._slab.unlink()


def _refuse(trainer: DurableTrainer) -> None:
    """Raises ConfigError for a run that cannot be kept, before anything is allocated."""
    own = overridden(trainer, "_load_optimizer_and_scheduler", "_load_rng_state")
    for found, what, way_out in (
        (trainer.model_init is not None, "model_init=", "give the Trainer the model"),
        (trainer.args.auto_find_batch_size, "auto_find_batch_size=True", "set per_device_train_batch_size"),
        (
            trainer._zero_kept is not None and trainer._zero_kept.trained,
            "a second train()",
            "go on in a new process, with a Trainer of another output_dir",
        ),
        (
            trainer.zero_run is not None and trainer._zero_kept is None,
            "a model that was sharded for evaluation alone",
            "give the Trainer its train_dataset when it is built",
        ),
        (
            # Without adaptive entropy, TRL's GRPOTrainer reads no file here.
            bool(own) and getattr(trainer.args, "use_adaptive_entropy", True),
            f"{type(trainer).__name__}'s {' and '.join(own)}",
            "the method reads a checkpoint's files, and durable runs continue without them. Leave durable"
            f"{' or use_adaptive_entropy' if hasattr(trainer.args, 'use_adaptive_entropy') else ''} out",
        ),
    ):
        if found:
            raise ConfigError(f"{what} cannot be used with durable, which keeps the steps of one run: {way_out}")


def _together(trainer: Trainer, call: Callable[[], str | None]) -> str | None:
    """Runs `call` on all ranks and returns rank 0's result. If one raises, all raise ConfigError. Collective."""
    found: list[Any] = [None, None]
    try:
        found[0] = call()
    except Exception as error:  # whatever it is, the others wait for this rank
        found[1] = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {error}"
    every = gather_object([found]) if trainer.args.world_size > 1 else [found]
    if refused := next((said for _, said in every if said is not None), None):
        raise ConfigError(refused)
    return cast("str | None", every[0][0])


def _as_checkpoint(trainer: DurableTrainer, optimizer: torch.optim.Optimizer) -> str | None:
    """Turns steps of another number of ranks, another stage or other tiles into a checkpoint, and returns its folder.

    Returns None if there are no such steps. One rank calls it.
    """
    config, output = trainer.zero_config, Path(str(trainer.args.output_dir)).absolute()
    with ExitStack() as stack:

        def opened(rank: int) -> Any:
            name = zero_offload.slab_name(output, rank)
            return slab_of(config, stack, name, rank) if there(config, name, rank) else None

        here = (trainer.args.world_size if config.stage else 1, config.tile_numel)
        slabs, shards = zero_offload.slabs_to_move(opened, here)
        if not slabs:
            return None
        begun = output / "durable"
        shutil.rmtree(begun, ignore_errors=True)
        try:
            step, told = zero_offload.write_checkpoint(
                slabs[:shards], begun / STATE, step=step_of(optimizer, config), optimizer=optimizer
            )
            where = f"{', '.join(f'{slab.name}.slab' for slab in slabs)} in {', '.join(config.nvme_paths)}"
            refuse_another(str(output), told["run"], identity(trainer, config), where)
            (begun / IDENTITY).write_text(json.dumps(told["run"]), encoding="utf-8")
            torch.save(told["scheduler"], begun / SCHEDULER)
            (begun / TRAINER_STATE).write_text(told["state"], encoding="utf-8")
        except BaseException:
            shutil.rmtree(begun, ignore_errors=True)
            raise
        target = output / f"checkpoint-{step}"
        if complete(target) and (target / STATE).is_dir():
            shutil.rmtree(begun)  # the run has saved the same step
        else:
            shutil.rmtree(target, ignore_errors=True)
            begun.rename(target)
        os.sync()
        for slab in slabs:
            slab.remove()
    sys.stdout.write(f"zero_hf: step {step} is of other ranks or tiles, and a checkpoint now: {target}\n")
    return str(target)
