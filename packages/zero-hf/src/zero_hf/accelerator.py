"""Adds sharding to accelerate's `Accelerator`: `prepare` shards models. Owns the pairs of models and optimizers.

Data loaders, schedulers, autocast, trackers and the random state are left to accelerate. Not here: saving and loading
(in accelerator_checkpoints.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from accelerate.logging import get_logger
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType
from torch import nn

import zero_core
from zero_core import ZeroError
from zero_core.optim.optimizer import ShardedOptimizer

from .accelerator_checkpoints import AcceleratorCheckpoints, Prepared
from .config import ConfigError, ZeroConfig
from .sharding import shard

_OTHERS = {
    DistributedType.DEEPSPEED: "DeepSpeed",
    DistributedType.FSDP: "FSDP",
    DistributedType.MEGATRON_LM: "Megatron-LM",
    DistributedType.XLA: "XLA",
}
logger = get_logger(__name__)


class Accelerator(AcceleratorCheckpoints):
    """accelerate.Accelerator whose `prepare` shards each model together with its optimizer.

    zero: a ZeroConfig, a mapping of its fields, or the path of a YAML or JSON file; None: the file that the environment
    variable ZERO_HF_CONFIG names, else ZeroConfig(). All other arguments are those of accelerate.Accelerator. A model
    that is prepared without an optimizer is sharded and not trained, like a reference model. A prepared model stays the
    same object: nothing wraps it.

    Raises ConfigError for mixed_precision "fp16" and "fp8", for a comm_hook, and if accelerate is configured to use
    DeepSpeed, FSDP, Megatron-LM, XLA or a ParallelismConfig, which shard or wrap models themselves.
    """

    def __init__(self, *args: Any, zero: ZeroConfig | Mapping[str, Any] | str | Path | None = None, **kwargs: Any):
        self.zero_config = ZeroConfig.of(zero if zero is not None else os.environ.get("ZERO_HF_CONFIG") or None)
        self._prepared = {}
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
        hook = getattr(self.ddp_handler, "comm_hook", DDPCommunicationHookType.NO)
        if hook != DDPCommunicationHookType.NO:
            raise ConfigError(
                f"comm_hook {hook.value!r} of DistributedDataParallelKwargs changes the reductions of "
                "DistributedDataParallel, which does not wrap a sharded model: leave comm_hook out"
            )

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
                    f"one {kind} trains several models, {' and '.join(type(m).__name__ for m in owners)}: make an "
                    "optimizer for each, as each is sharded alone. Or put them into one nn.Module, and prepare that"
                )
            if not owners:
                continue
            known = before.get(id(owners[0]))
            other = trained.setdefault(id(owners[0]), optimizer) if known is None else known.given or optimizer
            if other is not optimizer:
                raise ZeroError(
                    f"two optimizers, {type(other).__name__} and {kind}, train one {type(owners[0]).__name__}, which "
                    "is sharded with one: make one optimizer with a parameter group for each of the two. Or, to train "
                    "the model once more after a training that has ended, prepare the model with a new Accelerator"
                )
            if known is not None and known.rounded is not None:
                raise ZeroError(
                    f"the {kind} comes too late: an earlier prepare() of the {type(owners[0]).__name__} alone rounded "
                    f"its {known.rounded} weights to param_dtype={self.zero_config.param_dtype}. Give model and "
                    "optimizer to one call, prepare(model, optimizer, ...). Or prepare the optimizer before the model"
                )
            trained[id(owners[0])] = optimizer
        return trained

    def _shard(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        if next(model.parameters(), None) is None:
            return  # a loss, for example
        steps = self.gradient_accumulation_steps if optimizer is not None else 1
        wide = {p.dtype for p in model.parameters() if p.requires_grad} if optimizer is None else set()
        unused = getattr(self.ddp_handler, "find_unused_parameters", False) and self.zero_config.stage < 3
        run = shard(
            model, optimizer, self.zero_config, device=self.device, accumulate=steps, find_unused_parameters=unused
        )
        wide -= {p.dtype for p in model.parameters()}
        self._prepared[id(model)] = Prepared(run, optimizer, next(iter(wide), None))
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


def _check_precision(precision: str) -> None:
    if precision == "fp16":
        raise ConfigError(
            "mixed_precision='fp16' was never tried with a sharded model, as accelerate has it on a GPU only: use "
            "mixed_precision='bf16'"
        )
    if precision == "fp8":
        raise ConfigError(
            "mixed_precision='fp8' replaces modules whose weights cannot be sharded: use mixed_precision='bf16'"
        )
