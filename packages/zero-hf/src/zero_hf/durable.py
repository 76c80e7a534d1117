"""`DurableTrainer`: a Trainer's run that goes on from its last step, whatever ended the process before this one.

Owns what a step on disk says of a Trainer (its state, schedule, random states), and whether it is of this run. When a
step is on disk, and which one ranks go on from, is zero_core.resume's. A Trainer reads it as it reads a checkpoint.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from itertools import count, takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.utils import broadcast_object_list, gather_object
from torch.utils.data import IterableDataset
from transformers import Trainer
from transformers.trainer_callback import ExportableState

import zero_core
import zero_offload
from zero_core.checkpoint import random_state_of, restore_random_state

from .config import ConfigError, ZeroConfig
from .sharding import Run, slab_of, step_of, there

__all__ = ["DurableTrainer"]

TRAINER_STATE = "trainer_state.json"  # what a Trainer writes last into a checkpoint
SCHEDULER = "scheduler.pt"
IDENTITY = "durable.json"  # of which run a checkpoint is
STATE = "zero"  # the folder inside a Trainer's checkpoint: fp32 masters and optimizer states, zero_core.checkpoint
_ROWS = 64  # that are compared, of a data set that may have millions
# Arguments that change no number of the training itself, by their name or how it begins.
_FREE = (
    "output_dir run_name project trackio_ report_to disable_tqdm logging_ log_ eval_ per_device_eval_batch_size save_ "
    "hub_ push_to_hub load_best_model_at_end metric_for_best_model greater_is_better do_ resume_from_checkpoint "
    "local_rank ddp_ debug skip_memory_metrics prediction_loss_only include_ batch_eval_metrics enable_jit_checkpoint "
    "restore_callback_states dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers "
    "dataloader_prefetch_factor dataloader_multiprocessing_context torch_empty_cache_steps"
).split()


class DurableTrainer(Trainer):
    """The methods that `sharded` overrides for `ZeroConfig.durable`. Without it they are the Trainer's own."""

    zero_config: ZeroConfig
    zero_run: Run | None
    model: Any
    state: Any
    _kept: _Kept | None = None  # what is kept of this run; None: nothing
    _made: str | None = None  # a checkpoint that was made of another number of ranks' steps, or of other tiles

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        inherited: Any = super()
        if self.zero_config.durable is None or optimizer is None:
            inherited._shard(optimizer)
            return
        self._made = _first_rank(self, lambda: _as_checkpoint(self, optimizer))
        inherited._shard(optimizer)
        assert self.zero_run is not None
        try:
            self._kept = _Kept(self, self.zero_run)
            if self._made is not None:  # also for an evaluation before train(), which reads it again
                inherited._load_masters(self._made, self.zero_run.optimizer)
        except BaseException:
            self.zero_run.close()
            raise

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **options: Any) -> Any:
        if self.zero_config.durable is not None:
            _refuse(self)
            self._asked = resume_from_checkpoint
            if resume_from_checkpoint in (None, True):  # where there is no step on disk, it goes on from a checkpoint
                resume_from_checkpoint = self._last_checkpoint(any_run=resume_from_checkpoint is True)
        return super().train(resume_from_checkpoint, *given, **options)

    def _inner_training_loop(self, *given: Any, **options: Any) -> Any:
        if self.zero_config.durable is None:
            return super()._inner_training_loop(*given, **options)
        self.create_optimizer()
        kept = self._kept
        assert kept is not None
        kept.trained = True
        if kept.found is not None or self._made is not None:
            self._refuse_another_checkpoint(kept)
        if kept.found is None:
            resumed = self._made or options.get("resume_from_checkpoint")
            if resumed is not None and (Path(resumed) / IDENTITY).is_file():
                kept.refuse_another_run(json.loads((Path(resumed) / IDENTITY).read_text(encoding="utf-8")), resumed)
            return super()._inner_training_loop(*given, **options | {"resume_from_checkpoint": resumed})
        self.current_flos = kept.found["flos"]
        with tempfile.TemporaryDirectory(prefix="zero-hf-") as folder:
            (Path(folder) / TRAINER_STATE).write_text(kept.found["state"], encoding="utf-8")
            kept.folder = folder
            return super()._inner_training_loop(*given, **options | {"resume_from_checkpoint": folder})

    def _last_checkpoint(self, *, any_run: bool) -> str | None:
        """The last one in output_dir that is complete and, unless it may be of any run, of a durable one."""
        folders = [p for p in Path(str(self.args.output_dir)).glob("checkpoint-*") if p.name[11:].isdecimal()]
        found = [path for path in folders if (path / TRAINER_STATE).is_file()]
        found = [path for path in found if any_run or (path / IDENTITY).is_file()]
        return str(max(found, key=lambda path: int(path.name[11:]))) if found else None

    def _refuse_another_checkpoint(self, kept: _Kept) -> None:
        """Raises ConfigError where the caller names a checkpoint that is not the last one of this run."""
        if self._asked is None or isinstance(self._asked, bool):
            return
        last = self._last_checkpoint(any_run=True)
        if last is None or Path(self._asked).absolute() != Path(last).absolute():
            raise ConfigError(
                f"resume_from_checkpoint={self._asked} and step {kept.step} of this run, which is on disk in "
                f"{kept.where}: leave resume_from_checkpoint out to go on after that step, or remove these files"
            )

    # -- what a Trainer reads of a checkpoint --------------------------------------------------------------------------

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        kept = self._kept
        if kept is None or kept.found is None or checkpoint != kept.folder:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        assert self.optimizer is not None and self.lr_scheduler is not None
        for live, saved in zip(self.optimizer.param_groups, kept.groups, strict=True):
            live.update(saved)  # a new schedule has begun with them
        self.lr_scheduler.load_state_dict(kept.found["scheduler"])

    def _load_rng_state(self, checkpoint: str | None) -> None:
        kept = self._kept
        if kept is None or kept.found is None or checkpoint != kept.folder:
            super()._load_rng_state(checkpoint)
            return
        kept.restore_random_state(kept.found["random"])

    def _run_epoch(self, **given: Any) -> None:
        if self._kept is not None and self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True  # the run had ended, in the middle of an epoch
            return
        super()._run_epoch(**given)

    # -- what is kept --------------------------------------------------------------------------------------------------

    def _maybe_log_save_evaluate(self, *given: Any, **options: Any) -> None:
        super()._maybe_log_save_evaluate(*given, **options)
        if self._kept is not None:
            self._kept.after_step = self._kept.random_state()

    def _finalize_training(self, *given: Any, **options: Any) -> Any:
        kept = self._kept
        if kept is None:
            return super()._finalize_training(*given, **options)
        zero_core.commit(self.model)  # before the best checkpoint is loaded over it
        made = super()._finalize_training(*given, **options)
        kept.ended = True
        self.accelerator.wait_for_everyone()
        last = Path(str(self.args.output_dir)) / f"checkpoint-{self.state.global_step}"
        if self.state.global_step >= self.state.max_steps and (last / TRAINER_STATE).is_file():
            if (last / STATE).is_dir():
                kept.remove()
        return made

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self._kept is not None and self.args.should_save:
            (Path(output_dir) / IDENTITY).write_text(json.dumps(self._kept.identity), encoding="utf-8")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        super().save_model(output_dir, _internal_call)
        if not _internal_call and self._kept is not None and self._kept.ended:
            self.accelerator.wait_for_everyone()  # rank 0 writes
            self._kept.remove()


class _Kept:
    """What is on disk of a Trainer's run, and what is told of it with each step. Goes on with what it finds."""

    def __init__(self, trainer: DurableTrainer, run: Run) -> None:
        self._trainer, self._device = trainer, zero_core.handle(run.model).ranks.device
        self._slab, self._history = run.slab, list[str]()
        self.trained = self.ended = False
        self.folder: str | None = None  # in which the Trainer finds its state
        self.step = 0
        self.where = f"{run.slab.name}.slab in {', '.join(run.slab.paths)}"
        self.after_step: Any = None
        before = self.random_state()
        try:
            self.identity = _identity(trainer)
            resumed = zero_core.resume(run.model, _optimizer(run), extra=self._told)
        except zero_core.ZeroError as error:
            raise ConfigError(f"durable={trainer.zero_config.durable!r}: {error}") from error
        finally:
            self.restore_random_state(before)
        self.found: dict[str, Any] | None = resumed.extra
        self.groups = [{k: v for k, v in g.items() if k != "params"} for g in _optimizer(run).param_groups]
        if self.found is not None:
            self.step = resumed.step
            self.refuse_another_run(self.found["run"], self.where)
            if trainer.is_world_process_zero():
                sys.stdout.write(f"zero_hf: goes on after step {self.step}, from {self.where}\n")

    def refuse_another_run(self, before: Mapping[str, str], where: str) -> None:
        """Collective: a rank that alone refused would leave the others waiting for it."""
        found = [_another_run(self._trainer, before, self.identity, where)]
        told = [each for each in (gather_object(found) if self._trainer.args.world_size > 1 else found) if each]
        if told:
            raise ConfigError(told[0])

    def _told(self) -> dict[str, Any]:
        """As the forward after a step begins."""
        trainer = self._trainer
        assert trainer.lr_scheduler is not None
        return {
            "run": self.identity,
            "state": self._state(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "random": self.after_step,
            "flos": float(trainer.current_flos),
        }

    def _state(self) -> str:
        """What a Trainer writes of its state. Of its log, which only grows, each line becomes text once."""
        state, callbacks = self._trainer.state, dict[str, Any]()
        for each in (*self._trainer.callback_handler.callbacks, self._trainer.control):
            if isinstance(each, ExportableState):
                callbacks.setdefault(type(each).__name__, []).append(each.state())
        log = state.log_history
        self._history += [json.dumps(line) for line in log[len(self._history) :]]
        names = {field.name for field in dataclasses.fields(state)} - {"log_history", "stateful_callbacks"}
        rest = {name: getattr(state, name) for name in sorted(names)} | {"stateful_callbacks": callbacks}
        return f'{{"log_history": [{", ".join(self._history)}], {json.dumps(rest)[1:]}'

    def random_state(self) -> dict[str, Any]:
        kind, words, *rest = np.random.get_state(legacy=True)
        words = torch.from_numpy(np.asarray(words).astype(np.int64))
        return {"torch": random_state_of(self._device), "numpy": [str(kind), words, *rest]}

    def restore_random_state(self, state: Mapping[str, Any]) -> None:
        restore_random_state(state["torch"], self._device)
        kind, words, *rest = state["numpy"]
        np.random.set_state((kind, words.numpy().astype(np.uint32), *rest))

    def remove(self) -> None:
        """Removes the files, whose steps were saved elsewhere. This process uses them on until it ends."""
        os.sync()  # a Trainer does not sync what it saves
        self._slab.unlink()


def _optimizer(run: Run) -> Any:
    assert run.optimizer is not None
    return run.optimizer


def _refuse(trainer: DurableTrainer) -> None:
    """Raises ConfigError for a run that cannot be kept, before anything is allocated."""
    for found, what, way_out in (
        (trainer.model_init is not None, "model_init=", "give the Trainer the model"),
        (trainer.args.auto_find_batch_size, "auto_find_batch_size=True", "set per_device_train_batch_size"),
        (
            trainer._kept is not None and trainer._kept.trained,
            "a second train()",
            "go on in a new process, with a Trainer of another output_dir",
        ),
        (
            trainer.zero_run is not None and trainer._kept is None,
            "a model that was sharded for evaluation alone",
            "give the Trainer its train_dataset when it is built",
        ),
    ):
        if found:
            raise ConfigError(f"{what} does not go with durable, which keeps the steps of one run: {way_out}")


def _another_run(trainer: DurableTrainer, before: Mapping[str, str], now: Mapping[str, str], where: str) -> str | None:
    """What differs, if anything does, and what to do."""
    differ = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    if not differ:
        return None
    listed = "; ".join(f"{n} was {before.get(n, 'not there')}, is {now.get(n, 'not there')}" for n in differ[:5])
    return (
        f"output_dir={trainer.args.output_dir} has steps of another run ({listed}): set them back, name another "
        f"output_dir, or remove {where} to begin anew"
    )


def _first_rank(trainer: DurableTrainer, call: Callable[[], str | None]) -> str | None:
    """What the first rank's call returns, on all ranks. Raises on all of them what it raises there."""
    found: list[Any] = [None, None]
    if trainer.args.process_index == 0:
        try:
            found[0] = call()
        except Exception as error:  # whatever it is, the others wait for this rank
            found[1] = f"{type(error).__name__}: {error}" if not isinstance(error, ConfigError) else str(error)
    if trainer.args.world_size > 1:
        broadcast_object_list(found)
    if found[1] is not None:
        raise ConfigError(found[1])
    return found[0]


def _as_checkpoint(trainer: DurableTrainer, optimizer: torch.optim.Optimizer) -> str | None:
    """Makes a checkpoint of steps that this run cannot go on from where they lie, and returns its folder.

    They were left by another number of ranks, at another stage, or in other tiles. One rank calls it.
    """
    config, output = trainer.zero_config, Path(str(trainer.args.output_dir)).absolute()
    names = list(
        takewhile(lambda name: there(config, *name), ((zero_offload.slab_name(output, r), r) for r in count()))
    )
    if not names:
        return None
    with ExitStack() as stack:
        slabs = [slab_of(config, stack, *names[0])]
        layout = zero_offload.kept_layout(slabs[0])
        here = (trainer.args.world_size if config.stage else 1, config.tile_numel)
        if layout is None or here == (layout["shards"], layout["tile_numel"]):
            return None
        slabs += [slab_of(config, stack, *name) for name in names[1:]]
        begun = output / "durable"
        shutil.rmtree(begun, ignore_errors=True)
        try:
            step, told = zero_offload.write_checkpoint(
                slabs[: layout["shards"]], begun / STATE, step=step_of(optimizer, config), optimizer=optimizer
            )
            where = ", ".join(f"{slab.name}.slab" for slab in slabs)
            if (refusal := _another_run(trainer, told["run"], _identity(trainer), where)) is not None:
                raise ConfigError(refusal)
            (begun / IDENTITY).write_text(json.dumps(told["run"]), encoding="utf-8")
            torch.save(told["scheduler"], begun / SCHEDULER)
            (begun / TRAINER_STATE).write_text(told["state"], encoding="utf-8")
        except BaseException:
            shutil.rmtree(begun, ignore_errors=True)
            raise
        target = output / f"checkpoint-{step}"
        if (target / TRAINER_STATE).is_file() and (target / STATE).is_dir():
            shutil.rmtree(begun)  # the run has saved the same step
        else:
            shutil.rmtree(target, ignore_errors=True)
            begun.rename(target)
        os.sync()
        for slab in slabs:
            slab.remove()
    sys.stdout.write(f"zero_hf: step {step} is of other ranks or tiles, and a checkpoint now: {target}\n")
    return str(target)


def _identity(trainer: DurableTrainer) -> dict[str, str]:
    """What has to be the same for a run to go on, as text."""
    arguments = trainer.args.to_dict().items()
    found = {name: str(value) for name, value in arguments if not name.startswith((*_FREE, "_"))}
    for name in ("param_dtype", "states", "rows", "activations"):
        found[f"zero.{name}"] = str(getattr(trainer.zero_config, name))
    config = getattr(trainer.model, "config", None)
    found["model"] = f"{type(trainer.model).__name__} {getattr(config, '_name_or_path', '')}".strip()
    found["train_dataset"] = _digest(trainer.train_dataset)
    return found


def _digest(dataset: Any) -> str:
    """The length of a data set, and a digest of some rows. Of a stream, which has no length, its class alone."""
    try:
        count = -1 if isinstance(dataset, IterableDataset) else len(dataset)
    except TypeError:
        count = -1
    if count < 0:
        return type(dataset).__name__
    found = hashlib.blake2b(digest_size=8)
    for place in (count * i // min(_ROWS, count) for i in range(min(_ROWS, count))):
        row = _bytes(dataset[place])
        found.update(row if row == _bytes(dataset[place]) else b"drawn anew each time")
    return f"{count} rows, {found.hexdigest()}"


def _raw(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def _bytes(value: Any) -> bytes:
    if isinstance(value, torch.Tensor):
        return f"{value.dtype}{list(value.shape)}".encode() + _raw(value)
    if isinstance(value, np.ndarray) and value.dtype == object:
        return _bytes(value.tolist())
    if isinstance(value, np.ndarray):
        return f"{value.dtype}{value.shape}".encode() + value.tobytes()
    if isinstance(value, Mapping):
        return b"".join(repr(key).encode() + _bytes(each) for key, each in value.items())
    if isinstance(value, (list, tuple)) and not all(isinstance(each, (int, float, str)) for each in value):
        return b"".join(map(_bytes, value))
    if isinstance(value, (set, frozenset)):
        return b"".join(sorted(map(_bytes, value)))
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value)).encode()
