"""Saves and loads the weights and states of the models that `accelerator.Accelerator` has sharded."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import OPTIMIZER_NAME, SAFE_MODEL_NAME, broadcast_object_list, convert_file_size_to_int
from torch import Tensor, nn

import zero_core
from zero_core import checkpoint
from zero_core.errors import CheckpointError
from zero_core.optim.optimizer import ShardedOptimizer

from .merging import written_with_adapters
from .sharding import Run

_SAVED = "zero.json"  # has the id of a save: the shards in the folder must have the same id


@dataclass(frozen=True)
class Prepared:
    run: Run
    given: torch.optim.Optimizer | None  # the caller's optimizer, which run.optimizer replaces
    rounded: torch.dtype | None  # old dtype of trainable weights that param_dtype rounded; None: none were


class _InShards(dict[str, Tensor]):
    """Stands for the weights of a sharded model while `save_state` runs. They are saved from their shards."""


class AcceleratorCheckpoints(accelerate.Accelerator):
    """Replaces the methods of accelerate.Accelerator that save and load."""

    _prepared: dict[int, Prepared]  # by the model's id
    _optimizers: list[AcceleratedOptimizer]  # accelerate's
    _saving = False

    def zero_run(self, model: nn.Module) -> Run | None:
        """Returns the run of a prepared model: `describe()`, `plan`, `store`, `optimizer`. None: it is not sharded."""
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        known = self._prepared.get(id(model))
        return None if known is None else known.run

    # -- weights -------------------------------------------------------------------------------------------------------

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Returns the unsharded weights of a sharded model on the main process, on its CPU; {} on all others.

        Collective. The main process needs memory for the whole model; `save_model` does not. The names are those of
        model.state_dict(), the dtypes those of the parameters.
        """
        run = self.zero_run(model)
        if run is None:
            return cast(dict[str, Tensor], super().get_state_dict(model, unwrap))
        if self._saving:
            return _InShards()
        copies: dict[int, Tensor] = {}
        state: dict[str, Tensor] = {}
        with torch.no_grad():
            for name, tensor in run.model.state_dict(keep_vars=True).items():
                if id(tensor) not in copies:  # tied parameters stay one tensor
                    value = tensor.detach()  # gathers
                    copies[id(tensor)] = value.cpu().clone() if self.is_main_process else value.new_empty(0)
                state[name] = copies[id(tensor)]
        return state if self.is_main_process else {}

    def save_model(
        self,
        model: nn.Module,
        save_directory: str | os.PathLike[str],
        max_shard_size: int | str = "10GB",
        safe_serialization: bool = True,
    ) -> None:
        """Writes the weights as accelerate does. For a sharded model, each rank writes its shard.

        Collective. safe_serialization=False goes through `get_state_dict`, for which the main process needs memory.
        """
        run = self.zero_run(model)
        if run is None or not safe_serialization:
            super().save_model(model, save_directory, max_shard_size, safe_serialization)
            return
        zero_core.save_pretrained(run.model, save_directory, max_file_bytes=convert_file_size_to_int(max_shard_size))

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path:
        """Saves accelerate's files, and each sharded model's weights and optimizer states, streamed from the shards.

        Collective. All ranks must see the folder, which holds `zero_0`, `zero_1` ..., one for each sharded model.
        trained_only=True leaves out parameters that are not trained, such as the base model of adapters, see
        zero_core.checkpoint.save. Parameters that PEFT writes with an adapter, such as a resized embedding, are saved.
        """
        trained_only = save_model_func_kwargs.pop("trained_only", False)
        token = uuid.uuid4().hex

        def before(models: list[nn.Module], weights: list[Any], folder: str) -> None:
            weights[:] = [weight for weight in weights if not isinstance(weight, _InShards)]
            if self.is_main_process and self._prepared:
                (Path(folder) / _SAVED).write_text(json.dumps({"save": token, "models": len(self._prepared)}))

        hook = self.register_save_state_pre_hook(before)  # the last one: the caller's hooks see all models
        self._saving = True
        try:
            with self._plain_optimizers():
                folder = Path(super().save_state(output_dir, safe_serialization, **save_model_func_kwargs))
        finally:
            self._saving = False
            hook.remove()
        for i, known in enumerate(self._prepared.values()):
            extra = {"save": token, "step": self.step}
            where, run = folder / f"zero_{i}", known.run
            also = written_with_adapters(run.model)
            checkpoint.save(where, run.model, run.optimizer, extra=extra, trained_only=trained_only, also=also)
        return folder

    def load_state(
        self, input_dir: str | None = None, load_kwargs: dict[str, Any] | None = None, **load_model_func_kwargs: Any
    ) -> None:
        """Loads a folder of `save_state` at any number of ranks. At the same number training continues bit for bit.

        Collective. Folders that stock accelerate saved are loaded too. Each rank then needs memory for all optimizer
        states. strict=False is passed on, see zero_core.checkpoint.load. Raises CheckpointError for a folder of other
        models, or of an incomplete save.
        """
        folders: list[Path] = []
        strict = load_model_func_kwargs.get("strict", True)

        def before(models: list[nn.Module], folder: str) -> None:
            folders.append(Path(folder))
            models[:] = [model for model in models if self.zero_run(model) is None]
            if self._prepared:
                self._check_saved(Path(folder))

        hook = self.register_load_state_pre_hook(before)
        try:
            with self._plain_optimizers():
                super().load_state(input_dir, load_kwargs, **load_model_func_kwargs)
        finally:
            hook.remove()
        if not (folders[0] / _SAVED).is_file():
            self._load_stock(folders[0])
            return
        for i, known in enumerate(self._prepared.values()):
            folder = folders[0] / f"zero_{i}"
            run = known.run
            loaded = checkpoint.load(folder, run.model, run.optimizer, strict=strict, random_state=False)
            if loaded.extra["save"] != json.loads((folders[0] / _SAVED).read_text())["save"]:
                raise CheckpointError(
                    f"{folder} and the other files of {folders[0]} are of different saves: a later save was "
                    "interrupted, so neither is complete. Load another checkpoint, and use a new folder for each save"
                )
            self.step = loaded.extra["step"]  # a rank beyond those of the saved run has no file with it

    def _load_stock(self, folder: Path) -> None:
        """Loads stock accelerate's weights and optimizer states, in the order of preparation."""
        for i, model in enumerate(self._models if self._prepared else []):
            weights = folder / _stock(SAFE_MODEL_NAME, "safetensors", i)
            zero_core.load_pretrained(model, weights, rename="module.{}".format)  # as DDP names them, on several ranks
        for i, optimizer in enumerate(self._optimizers if self._prepared else []):
            states = torch.load(folder / _stock(OPTIMIZER_NAME, "bin", i), mmap=True, weights_only=True)
            optimizer.optimizer.load_state_dict(states)
        self.step = broadcast_object_list([self.step])[0]  # a rank beyond those of the saved run has no file with it

    def _check_saved(self, folder: Path) -> None:
        saved = folder / _SAVED
        if not saved.is_file():
            names = [_stock(SAFE_MODEL_NAME, "safetensors", i) for i in range(len(self._models))]
            trained = sum(known.given is not None for known in self._prepared.values())
            names += [_stock(OPTIMIZER_NAME, "bin", i) for i in range(trained)]
            lacks = [name for name in names if not (folder / name).is_file()]
            plain = self._optimizers or len(self._models) != len(self._prepared)  # inside _plain_optimizers()
            if lacks or plain:
                why = f"lacks {', '.join(lacks)} of accelerate" if lacks else "this run has unsharded models"
                raise CheckpointError(
                    f"{folder} has no {_SAVED} of zero_hf.Accelerator, and {why}. Give a folder "
                    "of save_state(safe_serialization=True), from a run that prepared the same models"
                )
            return
        models = json.loads(saved.read_text())["models"]
        if models != len(self._prepared):
            raise CheckpointError(
                f"number of sharded models: {models} in {folder}, and {len(self._prepared)} in this run. Prepare the "
                "same models, in the same order, as the run that saved it"
            )

    @contextmanager
    def _plain_optimizers(self) -> Iterator[None]:
        """Inside, accelerate knows only the optimizers whose states are plain tensors."""
        everything = self._optimizers
        self._optimizers = [o for o in everything if not isinstance(o.optimizer, ShardedOptimizer)]
        try:
            yield
        finally:
            self._optimizers = everything


def _stock(name: str, ending: str, index: int) -> str:
    """Returns the file name that stock accelerate gives to a model or an optimizer."""
    return f"{name}_{index}.{ending}" if index else f"{name}.{ending}"
