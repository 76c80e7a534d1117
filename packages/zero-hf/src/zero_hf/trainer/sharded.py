"""Makes a Trainer class that shards its model. Owns the moments at which a Trainer shards, saves and loads.

A subclass overrides methods of transformers.Trainer, so other Trainers of the process are unchanged. The Trainer keeps
the data, the loop, the schedule, the random state and trainer_state.json.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import zero_offload
from zero_core.errors import UnsupportedOptimizerError
from zero_offload.planning.hardware import bytes_shown

from ..config import ConfigError, ZeroConfig
from ..sharding import IN_A_TRAINER, Run
from .adam_8bit import torchs_adamw, with_eight_bits
from .checkpoints import (
    TrainerCheckpoints,
    complete_checkpoint,
    has_masters,
    load_masters,
    overridden,
    own_weights,
    whole,
)
from .durable import DurableTrainer
from .training_arguments import deepspeed_of, without_deepspeed
from .trl import ShardedTRL, is_trl, shard_of, synced_generation

Given = ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None
_UNTRIED = "fp16 was never tried with a sharded Trainer. Train with bf16=True, or load the model in bfloat16"
T = TypeVar("T", bound=type[Any])


def sharded(trainer: T, zero: Given = None) -> T:
    """Returns a subclass of `trainer`, a transformers.Trainer class, that shards its model before it trains.

    The subclass is made once for each class and `zero`, and its own names begin with `zero_` and `_zero_`. It calls the
    overrides of `trainer` as a stock Trainer does. Its constructor takes one more keyword, `zero`: a ZeroConfig, a
    mapping, or the path of a YAML or JSON file. Where that is not given, it uses the `zero` given here; where that is
    not given either, the file that the environment variable ZERO_HF_CONFIG names; else stage 3, with everything on the
    device.

    A TrainingArguments class gives a subclass too: its `deepspeed` is the JSON that a sharded Trainer follows.

    Raises:
        TypeError: `trainer` is no Trainer class and no TrainingArguments class.
        ConfigError: `zero` has a key or a value that is not known, or is a file that cannot be read.
    """
    if isinstance(trainer, type) and issubclass(trainer, TrainingArguments):
        if zero is not None:
            raise TypeError(f"sharded({trainer.__name__}, zero=...): give zero= with the Trainer class")
        return cast(T, without_deepspeed(cast(Any, trainer)))
    if not (isinstance(trainer, type) and issubclass(trainer, Trainer)):
        raise TypeError(f"sharded({trainer!r}): give it transformers.Trainer or a subclass of it, the class itself")
    made: Any = trainer if issubclass(trainer, _Sharded) else _made(cast(Any, trainer))
    return cast(T, made if zero is None else _with_default(made, ZeroConfig.of(zero)))


@functools.cache
def _made(trainer: type[Any]) -> type[Any]:
    ours: tuple[type, ...] = (DurableTrainer, _Sharded)
    if is_trl(trainer):
        ours = (*ours, ShardedTRL)
    bases = (*ours, TrainerCheckpoints) if trainer is Trainer else (*ours, trainer, TrainerCheckpoints)
    return type(f"Sharded{trainer.__name__}", bases, {"__doc__": trainer.__doc__, "__module__": __name__})


@functools.cache
def _with_default(made: type[Any], default: ZeroConfig) -> type[Any]:
    return type(made.__name__, (made,), {"__doc__": made.__doc__, "__module__": __name__, "_zero_default": default})


class _Sharded(Trainer):
    """The class that `sharded` puts before a Trainer class. Its methods call those that they override. See
    `TrainerCheckpoints`.

    zero_config: the settings. zero_run: the sharded model with its plan, store and optimizer, from the first train(),
    evaluate() or predict() on; None before.
    """

    _zero_default: ZeroConfig | None = None
    args: TrainingArguments
    model: Any
    optimizer: Any
    lr_scheduler: Any
    state: Any

    def __init__(self, *given: Any, zero: Given = None, **options: Any) -> None:
        default: Given = self._zero_default or os.environ.get("ZERO_HF_CONFIG") or None
        self.zero_config = ZeroConfig.of(default if zero is None else zero)
        self.zero_run: Run | None = None
        self._zero_said = zero is not None or default is not None
        self._zero_translation: Any = None  # zero_deepspeed.Translation
        self._zero_steps: int | None = None
        super().__init__(*given, **options)

    def __init_subclass__(cls, **given: Any) -> None:
        super().__init_subclass__(**given)
        order = cls.__mro__
        if TrainerCheckpoints in order and (behind := order[order.index(TrainerCheckpoints) + 1]) is not Trainer:
            raise TypeError(
                f"{cls.__name__} derives from a sharded class before {behind.__name__}, whose methods that would hide: "
                f"derive it from zero_hf.sharded({behind.__name__}) alone"
            )

    def create_accelerator_and_postprocess(self) -> None:
        _refuse(self.args, self.model)
        if self.args.activation_checkpointing and self.zero_config.activations != "keep":
            raise ConfigError(
                f"activation_checkpointing=True of {type(self.args).__name__} (in TRL its default, in older scripts "
                f"gradient_checkpointing=True) and activations={self.zero_config.activations!r} both recompute blocks: "
                "write activation_checkpointing=False"
            )
        if deepspeed_of(self.args) is not None:
            self._zero_follow_deepspeed()
        super().create_accelerator_and_postprocess()
        if self.args.dataloader_pin_memory:  # else accelerate waits until each tensor of a batch is on the device
            self.accelerator.dataloader_config.non_blocking = True
        for name in ("deepspeed_plugin", "fsdp_plugin"):
            if getattr(self.accelerator.state, name, None) is not None:
                raise ConfigError(
                    f"accelerate was launched with a {name}, which shards the model itself: launch it with torchrun, "
                    "or with accelerate launch --multi_gpu, and set stage and tiers with zero="
                )

    # -- DeepSpeed's JSON ----------------------------------------------------------------------------------------------

    def _zero_follow_deepspeed(self) -> None:
        """Takes stage, tiers, precision and clipping from the arguments' `deepspeed`, as transformers does."""
        if self._zero_said:
            raise ConfigError("deepspeed= and zero= (or ZERO_HF_CONFIG) both set the ZeRO stage: leave one out")
        found = self._zero_translation = self._zero_translated(with_schedule=False)
        self.zero_config = found.zero
        self.args.mixed_precision = "no"  # DeepSpeed computes in parameters of that dtype, not under autocast
        if found.autocast is not None:
            self.args.mixed_precision = "bf16"
        self.args.max_grad_norm = found.max_grad_norm or 0.0  # a file without a key for it clips at 1.0

    def _zero_translated(self, with_schedule: bool) -> Any:
        from ..deepspeed.translation import from_deepspeed, loaded

        config = dict(loaded(deepspeed_of(self.args)))
        if not with_schedule:  # "auto" in it needs the number of steps
            config.pop("scheduler", None)
        if self.args.bf16:
            config.setdefault("bf16", {"enabled": "auto"})  # as accelerate does
        half = config.get("fp16")
        if isinstance(half, Mapping) and half.get("enabled") is True:
            raise ConfigError(
                "fp16.enabled=true of deepspeed= cannot be used with zero_hf.sharded, which does not scale the loss. "
                'Write "bf16": {"enabled": true} in its place, and bf16=True in the TrainingArguments. To train in '
                "fp16, write a loop with zero_hf.deepspeed.initialize"
            )
        return from_deepspeed(config, arguments=self.args, model=self.model, num_training_steps=self._zero_steps)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self._zero_steps = num_training_steps
        if self._zero_translation is not None:
            self._zero_translation = self._zero_translated(with_schedule=True)
        super().create_optimizer_and_scheduler(num_training_steps)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self._zero_translation is not None and self.lr_scheduler is None:
            self._zero_steps = num_training_steps
            self.lr_scheduler = self._zero_translated(with_schedule=True).scheduler(optimizer or self.optimizer)
            if self.lr_scheduler is not None:
                return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)

    def _prepare_input(self, data: Any) -> Any:
        found = super()._prepare_input(data)
        bf16 = self._zero_translation is not None and self.zero_config.param_dtype == "bf16"
        if bf16 and isinstance(found, torch.Tensor) and found.is_floating_point():
            return found.to(torch.bfloat16)  # as transformers does for DeepSpeed
        return found

    # -- sharding ------------------------------------------------------------------------------------------------------

    def call_model_init(self, trial: Any = None) -> Any:
        if self.zero_run is not None:  # before there is a second model
            self.zero_run.close()
            self.zero_run = None
        return super().call_model_init(trial)

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Shards the model with the optimizer of the overridden method, and again if that makes another one."""
        run, given, named = self.zero_run, self.zero_config, None
        ours = None if run is None or run.optimizer is None else self.optimizer
        if ours is None:
            named = self._zero_named_optimizer(self.model if model is None else model)
        try:
            if named is not None:
                self.optimizer = named
            else:
                if self.optimizer is None:
                    self.zero_config = with_eight_bits(self.args, given)
                with torchs_adamw(self.args):
                    super().create_optimizer(*([] if model is None else [model]))
            if ours is None or self.optimizer is not ours:
                self._zero_shard(self.optimizer)
        except UnsupportedOptimizerError as error:
            raise UnsupportedOptimizerError(f"{str(error).rstrip(' .')}. {IN_A_TRAINER}") from error
        finally:
            # Arguments may ask for something else the next time.
            self.zero_config = dataclasses.replace(self.zero_config, states=given.states)
        return self.optimizer

    def _zero_named_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Makes the optimizer that DeepSpeed's JSON names, with all parameters in one group, as in DeepSpeed."""
        if self._zero_translation is None:
            return None
        found = self._zero_translation.optimizer([p for p in model.parameters() if p.requires_grad])
        if found is not None and self.optimizer is not None:
            raise ConfigError(
                f"optimizers= gives the Trainer a {type(self.optimizer).__name__}, and deepspeed= names an optimizer: "
                "leave one of them out"
            )
        return found

    def zero_make_run(self, optimizer: torch.optim.Optimizer | None) -> Run:
        """Shards the model as `zero_config` says, and prints the plan. A subclass may shard it in another way."""
        options = {} if self._zero_translation is None else self._zero_translation.shard_options
        said = "" if self._zero_translation is None else f"{self._zero_translation.table()}\n"
        if own := own_weights(self):
            nbytes = sum(each.numel() * each.element_size() for each in self.model.parameters())
            said += f"zero_hf: while they run, {', '.join(own)} may hold the whole model, {bytes_shown(nbytes)} more\n"
        steps = self.args.gradient_accumulation_steps
        if self.zero_config.durable is not None:
            options["slab_name"] = zero_offload.slab_name(str(self.args.output_dir), self.args.process_index)
        return shard_of(self, self.model, optimizer, said=said, accumulate=steps, **options)

    def _zero_shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        accelerator, first = self.accelerator, self.zero_run is None
        run = self.zero_run = self.zero_make_run(optimizer)
        if first:
            accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)  # autocast, and no DDP
        self.model._is_accelerate_prepared = True
        if run.optimizer is not None:
            self.optimizer = accelerator.prepare_optimizer(run.optimizer, device_placement=False)
            self.optimizer._is_accelerate_prepared = True

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *given: Any, **options: Any) -> Any:
        if self.zero_run is None:
            if self.train_dataset is None:
                self._zero_shard(None)
            else:
                self.create_optimizer()
        return super().evaluation_loop(*given, **options)

    def prediction_step(self, *given: Any, **options: Any) -> Any:
        generates = getattr(self.args, "predict_with_generate", False)
        synced = generates and self.args.world_size > 1 and self.zero_config.stage > 0
        with synced_generation(self.model) if synced else nullcontext():
            return super().prediction_step(*given, **options)

    # -- resuming ------------------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **options: Any) -> Any:
        if resume_from_checkpoint:
            resume_from_checkpoint = complete_checkpoint(resume_from_checkpoint, self.args)
        return super().train(resume_from_checkpoint, *given, **options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, *given: Any, **options: Any) -> None:
        if own_weights(self):
            whole(self)
        super()._load_from_checkpoint(resume_from_checkpoint, *given, **options)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is not None and overridden(self, "_load_optimizer_and_scheduler") and not own_weights(self):
            if has_masters(checkpoint):  # an override may skip the method that reads them with the states
                load_masters(self.model, checkpoint)
        super()._load_optimizer_and_scheduler(checkpoint)

    def end(self) -> None:
        """Frees memory and files, and makes the model plain, see `Run.end`. Then calls the Trainer's end()."""
        if self.zero_run is not None and self.zero_run.end():
            self.zero_run = self.optimizer = self.lr_scheduler = None
        super().end()


def _refuse(args: TrainingArguments, model: nn.Module | None) -> None:
    """Raises ConfigError for an unsupported argument, before anything is allocated."""
    precision = getattr(args, "mixed_precision", "no")
    others = "zero= sets stage and tiers"
    whole = "it would cast a sharded model. Evaluate with bf16=True, or load the model in bfloat16"
    for found, what, way_out in (
        (
            args.deepspeed is not None and deepspeed_of(args) is None,
            "deepspeed= of stock TrainingArguments, which lets DeepSpeed shard the model,",
            f"write TrainingArguments = zero_hf.sharded(TrainingArguments), and the JSON is followed here; or {others}",
        ),
        (args.fsdp, "fsdp=", f"FSDP shards the model itself. Leave it out; {others}"),
        (args.parallelism_config, "parallelism_config=", "all ranks are data parallel. Leave it out"),
        (args.fp16 or precision == "fp16", "fp16=True", _UNTRIED),
        (precision == "fp8", "mixed_precision=fp8", "use bf16=True"),
        (args.fp16_full_eval, "fp16_full_eval=True", whole),
        (args.bf16_full_eval, "bf16_full_eval=True", whole),
        (
            args.torch_compile,
            "torch_compile=True",
            "it compiles the whole model before it is sharded. Leave it out, and compile the blocks, as in `for layer "
            "in model.model.layers: layer.compile()`",
        ),
        (
            args.save_on_each_node,
            "save_on_each_node=True",
            "each rank writes its part of a checkpoint. Leave it out, and make output_dir a folder that all see",
        ),
        (
            args.n_gpu > 1,
            f"one process with {args.n_gpu} GPUs",
            f"start one process per GPU, with torchrun --nproc-per-node {args.n_gpu}",
        ),
        (
            len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1,
            "a model that device_map= spread over devices",
            "load it without device_map",
        ),
        (
            getattr(model, "is_distributed_loading_by_transformers", False),
            "a model that distributed_config= sharded",
            f"load it without distributed_config, {others}",
        ),
    ):
        if found:
            raise ConfigError(f"{what} cannot be used with zero_hf.sharded: {way_out}")
