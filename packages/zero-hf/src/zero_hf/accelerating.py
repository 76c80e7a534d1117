"""Adds sharding to accelerate's `Accelerator`: `prepare` shards models. Owns their runs, saving and loading.

Data loaders, schedulers, autocast, trackers and the random state are left to accelerate.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import accelerate
import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import (
    OPTIMIZER_NAME,
    SAFE_MODEL_NAME,
    DistributedType,
    broadcast_object_list,
    convert_file_size_to_int,
)
from torch import Tensor, nn

import zero_core
from zero_core import ZeroError, checkpoint
from zero_core.errors import CheckpointError
from zero_core.optim.optimizer import ShardedOptimizer

from .adapters import written_with_adapters
from .config import ConfigError, ZeroConfig
from .sharding import Run, shard

_SAVED = "zero.json"  # has the id of a save: the shards in the folder must have the same id
_OTHERS = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.FSDP: "FSDP",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
logger = get_logger(__name__)


@dataclass(frozen=True)
class _Prepared:
    run: Run
    given: torch.optim.Optimizer | None  # the caller's optimizer, which run.optimizer replaces
    rounded: torch.dtype | None  # old dtype of trainable weights that param_dtype rounded; None: none were


class _InShards(dict[str, Tensor]):
    """Stands for the weights of a sharded model while `save_state` runs. They are saved from their shards."""


class Accelerator(accelerate.Accelerator):
    """accelerate.Accelerator whose `prepare` shards each model together with its optimizer.

    zero: a ZeroConfig, a mapping of its fields, or the path of a YAML or JSON file; None: the file that the environment
    variable ZERO_HF_CONFIG names, else ZeroConfig(). All other arguments are those of accelerate.Accelerator. A model
    that is prepared without an optimizer is sharded and not trained, like a reference model. A prepared model stays the
    same object: nothing wraps it.

    Raises ConfigError for mixed_precision "fp16" and "fp8", and if accelerate is configured to use DeepSpeed, FSDP,
    Megatron-LM, XLA or a ParallelismConfig, which shard or wrap models themselves.
    """

    def __init__(self, *args: Any, zero: ZeroConfig | Mapping[str, Any] | str | Path | None = None, **kwargs: Any):
        self.zero_config = ZeroConfig.of(zero if zero is not None else os.environ.get("ZERO_HF_CONFIG") or None)
        self._prepared: dict[int, _Prepared] = {}  # by the model's id
        self._optimizers: list[AcceleratedOptimizer]  # accelerate's
        self._saving = False
        precision = str(kwargs.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "no"))
        _check_precision(precision)
        super().__init__(*args, **kwargs)
        _check_precision(self.mixed_precision)  # it may have been given by position, or by another Accelerator before
        other = _OTHERS.get(self.distributed_type)
        if other is None and self.parallelism_config:
            other = "a ParallelismConfig"
        if other is not None:
            raise ConfigError(
                f"accelerate was told to use {other}, which distributes models itself: leave it out of the script and "
                "of `accelerate launch`, or use accelerate.Accelerator"
            )

    def zero_run(self, model: nn.Module) -> Run | None:
        """Returns the run of a prepared model: `describe()`, `plan`, `store`, `optimizer`. None: it is not sharded."""
        model = getattr(model, "_orig_mod", model)  # of torch.compile
        known = self._prepared.get(id(model))
        return None if known is None else known.run

    # -- preparing -----------------------------------------------------------------------------------------------------

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Shards the models among `args`, each with the optimizer that trains it, and prepares the rest. Collective.

        Model and optimizer may come in one call or in two, in any order. A model that was prepared alone moves to other
        shards, unit by unit, when its optimizer comes.

        Raises:
            ZeroError: an optimizer trains parameters of two models; two optimizers train one model; or the model was
                prepared alone, and param_dtype has rounded its weights.
        """
        models = [a for a in args if isinstance(a, nn.Module) and self.zero_run(a) is None]
        optimizers = [a for a in args if isinstance(a, torch.optim.Optimizer)]
        trained = self._pair(models, optimizers)
        for model in models:
            self._shard(model, trained.pop(id(model), None))
        for key in [key for key in self._prepared if key in trained]:
            self._shard(self._prepared[key].run.model, trained[key])
        return super().prepare(*args, device_placement=device_placement)

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Shards a model without an optimizer, unless it is sharded, and prepares it as accelerate does to evaluate.

        So it is not wrapped in DistributedDataParallel, which would average gradients once more.
        """
        if self.zero_run(model) is None:
            self._shard(model, None)
        return cast(nn.Module, super().prepare_model(model, device_placement=False, evaluation_mode=True))

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """Wraps the sharded optimizer that replaces `optimizer`, or `optimizer` itself if its model is not sharded yet.

        Raises ZeroError as `prepare` does.
        """
        if isinstance(optimizer, AcceleratedOptimizer):
            return super().prepare_optimizer(optimizer, device_placement)
        for key in self._pair([], [optimizer]):
            self._shard(self._prepared[key].run.model, optimizer)
        sharded = next((known.run.optimizer for known in self._prepared.values() if known.given is optimizer), None)
        if sharded is not None:
            return super().prepare_optimizer(sharded, device_placement=False)
        return super().prepare_optimizer(optimizer, device_placement)

    def _pair(self, models: list[nn.Module], optimizers: list[torch.optim.Optimizer]) -> dict[int, Any]:
        """Maps each model's id to its optimizer, also if an earlier call prepared one of the two alone.

        Raises ZeroError for an optimizer with two models, and for two optimizers of one model.
        """
        before = self._prepared
        earlier = [each.optimizer for each in self._optimizers] if models else []
        alone = [each for each in earlier if not isinstance(each, ShardedOptimizer)]
        names = {id(p): m for m in (*models, *(k.run.model for k in before.values())) for p in m.parameters()}
        trained: dict[int, torch.optim.Optimizer] = {}
        for optimizer in (*alone, *optimizers):
            if isinstance(optimizer, AcceleratedOptimizer) or any(optimizer is k.given for k in before.values()):
                continue
            kind = type(optimizer).__name__
            ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
            owners = list({id(names[i]): names[i] for i in ids if i in names}.values())
            if len(owners) > 1:
                raise ZeroError(
                    f"the {kind} trains parameters of {' and '.join(type(m).__name__ for m in owners)}: make an "
                    "optimizer for each, or put the models into one nn.Module and prepare that"
                )
            if not owners:
                continue
            known = before.get(id(owners[0]))
            other = trained.setdefault(id(owners[0]), optimizer) if known is None else known.given or optimizer
            if other is not optimizer:
                raise ZeroError(
                    f"two optimizers, {type(other).__name__} and {kind}, train one {type(owners[0]).__name__}: make "
                    "one optimizer with a parameter group for each; for a second stage, prepare the model with an "
                    "Accelerator of its own"
                )
            if known is not None and known.rounded is not None:
                raise ZeroError(
                    f"the {kind} trains a {type(owners[0]).__name__} that was prepared without it, in an earlier call, "
                    f"and param_dtype={self.zero_config.param_dtype} has rounded its {known.rounded} weights: give "
                    "both to one call, prepare(model, optimizer, ...), or prepare the optimizer first"
                )
            trained[id(owners[0])] = optimizer
        return trained

    def _shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if next(model.parameters(), None) is None:
            return  # a loss, for example
        steps = self.gradient_accumulation_steps if optimizer is not None else 1
        wide = {p.dtype for p in model.parameters() if p.requires_grad} if optimizer is None else set()
        unused = getattr(self.ddp_handler, "find_unused_parameters", False) and self.zero_config.stage < 3
        options: dict[str, Any] = {"accumulate": steps, "find_unused_parameters": unused}
        run = shard(model, optimizer, self.zero_config, device=self.device, **options)
        wide -= {p.dtype for p in model.parameters()}
        self._prepared[id(model)] = _Prepared(run, optimizer, next(iter(wide), None))
        logger.info(run.describe())
        for each in self._optimizers:
            if each.optimizer is optimizer:  # it was prepared before its model
                each.optimizer = run.optimizer

    # -- training ------------------------------------------------------------------------------------------------------

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Lets backwards of a sharded model only accumulate at stages 0 and 1, which keep unsharded gradients anyway.

        At stages 2 and 3 each backward adds to the shards, as with DeepSpeed: an unsharded gradient would not fit.
        """
        run = self.zero_run(model)
        if run is None:
            with super().no_sync(model):
                yield
        elif run.optimizer is not None and run.config.stage < 2 and self.use_distributed:
            with zero_core.no_sync(run.model):
                yield
        else:
            yield

    @contextmanager
    def join_uneven_inputs(self, joinables: list[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Calls accelerate's for modules that are not sharded. Raises ZeroError for sharded ones on several ranks."""
        if self.use_distributed and any(isinstance(j, nn.Module) and self.zero_run(j) for j in joinables):
            raise ZeroError(
                "join_uneven_inputs() is of DistributedDataParallel, and this model is sharded: train and evaluate "
                "with even batches, which is accelerate's default"
            )
        with super().join_uneven_inputs(joinables, even_batches):
            yield

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
                    f"{folder} is of another save than the other files of {folders[0]}, where a later save was cut "
                    "short: the model is as it was at neither. Load another checkpoint, and save each to a new folder"
                )
            self.step = loaded.extra["step"]  # a rank beyond those of the saved run has no file with it

    def _load_stock(self, folder: Path) -> None:
        """Loads stock accelerate's weights and optimizer states, in the order of preparation."""
        for i, model in enumerate(self._models if self._prepared else []):
            zero_core.load_pretrained(model, folder / _stock(SAFE_MODEL_NAME, "safetensors", i), rename=_in_ddp)
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
                why = f"lacks {', '.join(lacks)}" if lacks else "is of a run with models that are not sharded"
                raise CheckpointError(
                    f"{folder} has no {_SAVED}, so zero_hf.Accelerator did not save it, and {why}: give a folder that "
                    "save_state wrote, with safe_serialization=True, for the models that are prepared"
                )
            return
        models = json.loads(saved.read_text())["models"]
        if models != len(self._prepared):
            raise CheckpointError(
                f"{folder} holds {models} sharded models, and {len(self._prepared)} are prepared: prepare the same "
                "models in the same order as the run that saved it"
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

    # -- the end -------------------------------------------------------------------------------------------------------

    def free_memory(self, *objects: Any) -> Any:
        """Frees memory as accelerate does, and the shards' memory and files. Sharded models cannot be used after."""
        self._close()
        return super().free_memory(*objects)

    def end_training(self) -> None:
        """Ends training as accelerate does, and frees the shards' memory and files. Sharded models end with it."""
        self._close()
        super().end_training()

    def _close(self) -> None:
        prepared, self._prepared = self._prepared, {}
        for known in prepared.values():
            known.run.close()


def _stock(name: str, ending: str, index: int) -> str:
    """Returns the file name that stock accelerate gives to a model or an optimizer."""
    return f"{name}_{index}.{ending}" if index else f"{name}.{ending}"


def _in_ddp(name: str) -> str:
    """Returns a parameter's name as stock accelerate saves it from several ranks."""
    return f"module.{name}"


def _check_precision(precision: str) -> None:
    if precision == "fp16":
        raise ConfigError(
            "mixed_precision='fp16' scales the loss with torch's GradScaler, which reads gradients that have left for "
            "their shards: use mixed_precision='bf16'"
        )
    if precision == "fp8":
        raise ConfigError(
            "mixed_precision='fp8' replaces modules whose weights cannot be sharded: use mixed_precision='bf16'"
        )
