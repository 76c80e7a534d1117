"""Replaces the methods with which transformers.Trainer saves and loads a model, for shards.

`sharded` puts them behind the class that it is given. So an override in that class is called as by a stock Trainer, and
its super() comes here.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import zero_core
from zero_core.errors import listed

from ..config import ConfigError
from ..merging import adapters_of, written_with_adapters
from ..sharding import Run

STATE = "zero"  # the folder inside a Trainer's checkpoint: fp32 masters and optimizer states, zero_core.checkpoint
SCHEDULER = "scheduler.pt"
TRAINER_STATE = "trainer_state.json"  # a Trainer writes it last into a checkpoint
_OPTIMIZER = "optimizer.pt"  # of a stock Trainer
_ARGUMENTS = "training_args.bin"


class TrainerCheckpoints(Trainer):
    """Replaces methods of transformers.Trainer itself: in the order of resolution it comes just before Trainer."""

    zero_run: Run | None
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is: `shard` takes it to the device unit by unit, as far as it is kept there."""

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        if self.zero_run is None or state_dict is not None:
            super()._save(output_dir, state_dict)
            return
        if adapters_of(self.model):
            wanted = zero_core.trained_state_dict(self.model, also=written_with_adapters(self.model))
            prompts = getattr(self.model, "prompt_encoder", None)  # PEFT runs it on the rank that writes
            with nullcontext() if prompts is None else zero_core.gathered(prompts):
                super()._save(output_dir, wanted)
            return
        folder = Path(output_dir or str(self.args.output_dir))
        zero_core.save_pretrained(self.model, folder)
        if self.args.should_save:
            with_files = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if with_files is not None:
                with_files.save_pretrained(folder)
            torch.save(self.args, folder / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        run = _trained(self.zero_run)
        zero_core.checkpoint.save(
            Path(output_dir) / STATE,
            self.model,
            run.optimizer,
            trained_only=bool(adapters_of(self.model)),
            also=written_with_adapters(self.model),
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if has_masters(resume_from_checkpoint) and not own_weights(self):
            return  # _load_optimizer_and_scheduler reads the masters, once the model is sharded
        if not _load_weights(self.model, resume_from_checkpoint):
            whole(self)  # stock code cannot tell a model without values from one with values
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not has_masters(checkpoint):
            if checkpoint is not None and not (Path(checkpoint) / _OPTIMIZER).is_file():
                warnings.warn(
                    f"{checkpoint} has neither {STATE} nor {_OPTIMIZER}: training goes on with new optimizer states",
                    stacklevel=2,
                )
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        run, beside = _trained(self.zero_run), Path(checkpoint) / SCHEDULER
        scheduler = None if beside.is_file() else self.lr_scheduler  # then DeepSpeed's files hold its state
        load_masters(self.model, checkpoint, run.optimizer, scheduler, values=not own_weights(self))
        if beside.is_file():
            self.lr_scheduler.load_state_dict(torch.load(beside, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if has_masters(best) and not own_weights(self):
            load_masters(self.model, best)
        elif not _load_weights(self.model, best):
            super()._load_best_model()


def overridden(trainer: Trainer, *names: str) -> list[str]:
    """Returns which of these methods the class that `sharded` was given, or one derived from it, overrides."""
    mro = [each for each in type(trainer).__mro__ if not each.__module__.startswith("zero_hf.")]
    theirs = mro[: mro.index(Trainer)]
    return [name for name in names if any(name in vars(each) for each in theirs)]


def own_weights(trainer: Trainer) -> list[str]:
    """Returns the overrides that may decide which weights a checkpoint has.

    Where there are some, weights are read from the files that a stock Trainer reads. Of the masters beside them, those
    that round to these weights are read too.
    """
    return overridden(trainer, "save_model", "_save", "_load_from_checkpoint", "_load_best_model")


def whole(trainer: Any) -> None:
    """Gives a model of `zero_hf.from_pretrained` its values, for code that does not know of shards."""
    if trainer.zero_run is None:
        zero_core.materialise(trainer.model)


def load_masters(
    model: nn.Module, folder: str, optimizer: Any = None, scheduler: Any = None, *, values: bool = True
) -> None:
    """Reads masters and states that zero-core saved or converted, else those that DeepSpeed's engine saved.

    values: as in zero_core.checkpoint.load.
    """
    ours = Path(folder) / STATE
    if ours.is_dir():
        given: Mapping[str, Any] = {"scheduler": scheduler, "random_state": False, "values": values}
        zero_core.checkpoint.load(ours, model, optimizer, **given)
    else:
        from .. import deepspeed

        deepspeed.load_checkpoint(folder, model, optimizer, scheduler=scheduler)


def checkpoints(args: TrainingArguments) -> list[Path]:
    """Returns the folders of a Trainer's checkpoints in its output_dir, oldest first."""
    found = [path for path in Path(str(args.output_dir)).glob("checkpoint-*") if path.name[11:].isdecimal()]
    return sorted(found, key=lambda path: int(path.name[11:]))


def complete(checkpoint: Path) -> bool:
    """Whether a Trainer finished saving this checkpoint."""
    return (checkpoint / TRAINER_STATE).is_file()


def complete_checkpoint(given: str | bool, args: TrainingArguments) -> str | bool:
    """Returns the checkpoint to resume from. For True, that is the last complete one.

    Raises ConfigError for an incomplete one: the run was killed, or its disk was full, while it saved.
    """
    folders = checkpoints(args)
    found = [path for path in folders if complete(path)]
    if given is True and (found or not folders):
        return str(found[-1]) if found else True  # stock code says that there is none
    folder = folders[-1] if given is True else Path(str(given))
    if not folder.is_dir() or complete(folder):
        return given
    way_out = f"resume from {found[-1]}, which is complete" if found else "train without resume_from_checkpoint"
    raise ConfigError(
        f"{folder} has no {TRAINER_STATE}, which a Trainer writes last, so it is not complete: the run was killed, or "
        f"its disk was full, while it saved. Delete this folder, and {way_out}"
    )


def has_masters(checkpoint: str) -> bool:
    """Says whether zero-core or DeepSpeed's engine saved into the folder of a Trainer's checkpoint."""
    return (Path(checkpoint) / STATE).is_dir() or any(Path(checkpoint).glob("*/*_model_states.pt"))


def _load_weights(model: nn.Module, folder: str) -> bool:
    """Reads the safetensors of a whole model. Each rank reads its part. Returns False if there are none."""
    names = ("model.safetensors", "model.safetensors.index.json")
    if not any((Path(folder) / name).is_file() for name in names):
        return False
    found = zero_core.load_pretrained(model, folder, strict=False)
    if found.missing or found.unexpected:
        raise ConfigError(
            f"{folder} is of another {type(model).__name__}. Names in the model only: "
            f"{listed(found.missing) or 'none'}; in the checkpoint only: {listed(found.unexpected) or 'none'}. Resume "
            "with the model that was saved"
        )
    return True


def _trained(run: Run | None) -> Run:
    if run is None or run.optimizer is None:
        raise ConfigError(
            "optimizer states cannot be saved or loaded before train(), which makes them. To save states, call "
            "train() first. To load states, call train(resume_from_checkpoint=FOLDER)"
        )
    return run
