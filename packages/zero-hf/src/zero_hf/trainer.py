"""`sharded`: a Trainer class whose model is sharded. Owns when a Trainer shards, saves and loads.

All of it is in methods of transformers.Trainer that a subclass overrides, so other Trainers of the process stay as they
are. The data, the loop, the schedule, the random state and trainer_state.json stay the Trainer's.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import zero_core
import zero_offload
from zero_core.errors import UnsupportedOptimizerError

from .adapters import adapters_of, written_with_adapters
from .arguments import deepspeed_of, without_deepspeed
from .config import ConfigError, ZeroConfig
from .durable import SCHEDULER, STATE, TRAINER_STATE, DurableTrainer, checkpoints, complete
from .eight_bits import torchs_adamw, with_eight_bits
from .overrides import refuse_hidden
from .sharding import IN_A_TRAINER, Run
from .trl import ShardedTRL, is_trl, shard_of, synced_generation

__all__ = ["sharded"]

Given = ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None
_GRADED = (
    "torch's GradScaler reads gradients that are in shards: train with bf16=True, or load the model in bfloat16, which "
    "is then trained with fp32 masters"
)
T = TypeVar("T", bound=type[Any])

_OPTIMIZER = "optimizer.pt"  # of a stock Trainer
_ARGUMENTS = "training_args.bin"


def sharded(trainer: T, zero: Given = None) -> T:
    """Returns a subclass of `trainer`, a transformers.Trainer class, that shards its model before it trains.

    The subclass is made once for each class and `zero`. Its constructor takes one more keyword, `zero`: a ZeroConfig, a
    mapping, or the path of a YAML or JSON file. Where that is not given, it uses the `zero` given here; where that is
    not given either, the file that the environment variable ZERO_HF_CONFIG names; else stage 3, with everything on the
    device.

    A TrainingArguments class gives a subclass too: its `deepspeed` is the JSON that a sharded Trainer follows.

    Raises:
        TypeError: `trainer` is no Trainer class and no TrainingArguments class.
        ConfigError: `zero` has a key or a value that is not known, or is a file that cannot be read; or `trainer`
            overrides a method that would never run, such as _load_best_model.
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
    refuse_hidden(trainer.__mro__, ours)
    return type(f"Sharded{trainer.__name__}", (*ours, trainer), {"__doc__": trainer.__doc__, "__module__": __name__})


@functools.cache
def _with_default(made: type[Any], default: ZeroConfig) -> type[Any]:
    return type(made.__name__, (made,), {"__doc__": made.__doc__, "__module__": __name__, "_zero_default": default})


class _Sharded(Trainer):
    """What `sharded` puts before a Trainer class.

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
        self._says_zero = zero is not None or default is not None
        self._translation: Any = None  # zero_deepspeed.Translation
        self._training_steps: int | None = None
        super().__init__(*given, **options)

    def create_accelerator_and_postprocess(self) -> None:
        self._refuse_hidden(self.model)
        _refuse(self.args, self.model)
        if self.args.activation_checkpointing and self.zero_config.activations != "keep":
            raise ConfigError(
                f"activation_checkpointing=True of {type(self.args).__name__} (in TRL its default, in older scripts "
                f"gradient_checkpointing=True) and activations={self.zero_config.activations!r} both recompute blocks: "
                "write activation_checkpointing=False"
            )
        if deepspeed_of(self.args) is not None:
            self._follow_deepspeed()
        super().create_accelerator_and_postprocess()
        if self.args.dataloader_pin_memory:  # else accelerate waits until each tensor of a batch is on the device
            self.accelerator.dataloader_config.non_blocking = True
        for name in ("deepspeed_plugin", "fsdp_plugin"):
            if getattr(self.accelerator.state, name, None) is not None:
                raise ConfigError(
                    f"accelerate was launched with a {name}, which shards the model itself: launch it with torchrun, "
                    "or with accelerate launch --multi_gpu, and say stage and tiers with zero="
                )

    def _refuse_hidden(self, model: nn.Module | None) -> None:
        order, ours = type(self).__mro__, (DurableTrainer, _Sharded, ShardedTRL)
        behind = [each for each in order[order.index(_Sharded) :] if each not in ours]
        refuse_hidden(behind, [each for each in ours if each in order], self, model)

    # -- DeepSpeed's JSON ----------------------------------------------------------------------------------------------

    def _follow_deepspeed(self) -> None:
        """Takes stage, tiers, precision and clipping from the arguments' `deepspeed`, as transformers would do it."""
        if self._says_zero:
            raise ConfigError(
                "deepspeed= of the arguments and zero= (or ZERO_HF_CONFIG) both say stage and tiers: leave one out"
            )
        found = self._translation = self._translated(with_schedule=False)
        self.zero_config = found.zero
        self.args.mixed_precision = "no"  # DeepSpeed computes in parameters of that dtype, not under autocast
        if found.autocast is not None:
            self.args.mixed_precision = "bf16"
        self.args.max_grad_norm = found.max_grad_norm or 0.0  # a file without a key for it clips at 1.0

    def _translated(self, with_schedule: bool) -> Any:
        from .deepspeed.translation import from_deepspeed, loaded

        config = dict(loaded(deepspeed_of(self.args)))
        if not with_schedule:  # "auto" in it needs the number of steps
            config.pop("scheduler", None)
        if self.args.bf16:
            config.setdefault("bf16", {"enabled": "auto"})  # as accelerate does
        half = config.get("fp16")
        if isinstance(half, Mapping) and half.get("enabled") is True:
            raise ConfigError(
                'fp16.enabled=true of deepspeed= does not go with zero_hf.sharded, which scales no loss: write "bf16": '
                '{"enabled": true} in place of the section, and bf16=True in the TrainingArguments; or train in a loop '
                "with zero_hf.deepspeed.initialize, which scales the loss"
            )
        return from_deepspeed(config, arguments=self.args, model=self.model, num_training_steps=self._training_steps)

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        self._training_steps = num_training_steps
        if self._translation is not None:
            self._translation = self._translated(with_schedule=True)
        super().create_optimizer_and_scheduler(num_training_steps)

    def create_scheduler(self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None) -> Any:
        if self._translation is not None and self.lr_scheduler is None:
            self._training_steps = num_training_steps
            self.lr_scheduler = self._translated(with_schedule=True).scheduler(optimizer or self.optimizer)
            if self.lr_scheduler is not None:
                return self.lr_scheduler
        return super().create_scheduler(num_training_steps, optimizer)

    def _prepare_input(self, data: Any) -> Any:
        found = super()._prepare_input(data)
        bf16 = self._translation is not None and self.zero_config.param_dtype == "bf16"
        if bf16 and isinstance(found, torch.Tensor) and found.is_floating_point():
            return found.to(torch.bfloat16)  # as transformers does for DeepSpeed
        return found

    # -- sharding ------------------------------------------------------------------------------------------------------

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leaves the model where it is: `shard` takes it to the device unit by unit, as far as it is kept there."""

    def call_model_init(self, trial: Any = None) -> Any:
        if self.zero_run is not None:  # before there is a second model
            self.zero_run.close()
            self.zero_run = None
        made = super().call_model_init(trial)
        self._refuse_hidden(made)
        return made

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        if self.zero_run is None:
            named, given = self._named_optimizer(self.model if model is None else model), self.zero_config
            if named is None and self.optimizer is None:
                self.zero_config = with_eight_bits(self.args, given)
            try:
                if (made := named) is None:
                    with torchs_adamw(self.args):
                        made = super().create_optimizer(*([] if model is None else [model]))
                self._shard(made)
            except UnsupportedOptimizerError as error:
                raise UnsupportedOptimizerError(f"{str(error).rstrip(' .')}. {IN_A_TRAINER}") from error
            finally:
                # Arguments may ask for something else the next time.
                self.zero_config = dataclasses.replace(self.zero_config, states=given.states)
        elif self.zero_run.optimizer is None:
            raise ConfigError(
                "the model was sharded for evaluation, without an optimizer, because the Trainer had no train_dataset "
                "then: give it one when it is built, or call train() before evaluate()"
            )
        return self.optimizer

    def _named_optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """The optimizer that DeepSpeed's JSON names: over all parameters in one group, as DeepSpeed makes it."""
        if self._translation is None:
            return None
        found = self._translation.optimizer([p for p in model.parameters() if p.requires_grad])
        if found is not None and self.optimizer is not None:
            raise ConfigError(
                f"optimizers= gives the Trainer a {type(self.optimizer).__name__}, and deepspeed= names an optimizer: "
                "leave one of them out"
            )
        return found

    def make_run(self, optimizer: torch.optim.Optimizer | None) -> Run:
        """Shards the model as `zero_config` says, and prints the plan. A subclass may shard it in another way."""
        options = {} if self._translation is None else self._translation.shard_options
        said = "" if self._translation is None else f"{self._translation.table()}\n"
        steps = self.args.gradient_accumulation_steps
        if self.zero_config.durable is not None:
            options["slab_name"] = zero_offload.slab_name(str(self.args.output_dir), self.args.process_index)
        return shard_of(self, self.model, optimizer, said=said, accumulate=steps, **options)

    def _shard(self, optimizer: torch.optim.Optimizer | None) -> None:
        run = self.zero_run = self.make_run(optimizer)
        accelerator = self.accelerator
        accelerator.prepare_model(self.model, device_placement=False, evaluation_mode=True)  # autocast, and no DDP
        self.model._is_accelerate_prepared = True
        if run.optimizer is not None:
            self.optimizer = accelerator.prepare_optimizer(run.optimizer, device_placement=False)
            self.optimizer._is_accelerate_prepared = True

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def evaluation_loop(self, *given: Any, **options: Any) -> Any:
        if self.zero_run is None:
            if self.train_dataset is None:
                self._shard(None)
            else:
                self.create_optimizer()
        return super().evaluation_loop(*given, **options)

    def prediction_step(self, *given: Any, **options: Any) -> Any:
        generates = getattr(self.args, "predict_with_generate", False)
        synced = generates and self.args.world_size > 1 and self.zero_config.stage > 0
        with synced_generation(self.model) if synced else nullcontext():
            return super().prediction_step(*given, **options)

    # -- saving and loading --------------------------------------------------------------------------------------------

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
        run = self._trained_run()
        zero_core.checkpoint.save(
            Path(output_dir) / STATE,
            self.model,
            run.optimizer,
            trained_only=bool(adapters_of(self.model)),
            also=written_with_adapters(self.model),
        )
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER)

    def train(self, resume_from_checkpoint: str | bool | None = None, *given: Any, **options: Any) -> Any:
        if resume_from_checkpoint:
            resume_from_checkpoint = _complete(resume_from_checkpoint, self.args)
        return super().train(resume_from_checkpoint, *given, **options)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if _has_masters(resume_from_checkpoint):
            return  # _load_optimizer_and_scheduler reads the masters, once the model is sharded
        if not self._load_weights(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _has_masters(checkpoint):
            if checkpoint is not None and not (Path(checkpoint) / _OPTIMIZER).is_file():
                warnings.warn(
                    f"{checkpoint} has neither {STATE} nor {_OPTIMIZER}: training goes on with new optimizer states",
                    stacklevel=2,
                )
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        run, beside = self._trained_run(), Path(checkpoint) / SCHEDULER
        scheduler = None if beside.is_file() else self.lr_scheduler  # then DeepSpeed's files hold its state
        self._load_masters(checkpoint, run.optimizer, scheduler)
        if beside.is_file():
            self.lr_scheduler.load_state_dict(torch.load(beside, weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if _has_masters(best):
            self._load_masters(best)
        elif not self._load_weights(best):
            super()._load_best_model()

    def _load_masters(self, folder: str, optimizer: torch.optim.Optimizer | None = None, scheduler: Any = None) -> None:
        """Reads what zero-core saved, also where DeepSpeed's was converted; else what DeepSpeed's engine did."""
        ours = Path(folder) / STATE
        if ours.is_dir():
            zero_core.checkpoint.load(ours, self.model, optimizer, scheduler=scheduler, random_state=False)
        else:
            from . import deepspeed

            deepspeed.load_checkpoint(folder, self.model, optimizer, scheduler=scheduler)

    def _load_weights(self, folder: str | os.PathLike[str]) -> bool:
        """Reads the safetensors of a whole model, each rank its part. False: there are none."""
        names = ("model.safetensors", "model.safetensors.index.json")
        if not any((Path(folder) / name).is_file() for name in names):
            return False
        found = zero_core.load_pretrained(self.model, folder, strict=False)
        if found.missing or found.unexpected:
            raise ConfigError(
                f"{folder} is of another model than {type(self.model).__name__}: it lacks "
                f"{list(found.missing)}, and {list(found.unexpected)} are not in the model"
            )
        return True

    def _trained_run(self) -> Run:
        if self.zero_run is None or self.zero_run.optimizer is None:
            raise ConfigError("there are no optimizer states before train()")
        return self.zero_run

    def end(self) -> None:
        """Gives memory and files back; the model is a plain one then, see `Run.end`. Then what Trainer.end() does."""
        if self.zero_run is not None and self.zero_run.end():
            self.zero_run = self.optimizer = self.lr_scheduler = None
        super().end()


def _complete(given: str | bool, args: TrainingArguments) -> str | bool:
    """The checkpoint to resume from, which for True is the last one that is complete.

    Raises ConfigError for one that is not: the run was killed, or its disk was full, while it saved.
    """
    folders = checkpoints(args)
    whole = [path for path in folders if complete(path)]
    if given is True and (whole or not folders):
        return str(whole[-1]) if whole else True  # stock code says that there is none
    folder = folders[-1] if given is True else Path(str(given))
    if not folder.is_dir() or complete(folder):
        return given
    way_out = f"resume from {whole[-1]}, which is complete" if whole else "train without resume_from_checkpoint"
    raise ConfigError(
        f"{folder} has no {TRAINER_STATE}, which a Trainer writes last, so it is not complete: the run was killed, or "
        f"its disk was full, while it saved. Delete this folder, and {way_out}"
    )


def _has_masters(checkpoint: str) -> bool:
    """Says whether zero-core or DeepSpeed's engine saved into the folder of a Trainer's checkpoint."""
    return (Path(checkpoint) / STATE).is_dir() or any(Path(checkpoint).glob("*/*_model_states.pt"))


def _refuse(args: TrainingArguments, model: nn.Module | None) -> None:
    """Raises ConfigError for an argument that cannot be followed, before anything is allocated."""
    precision = getattr(args, "mixed_precision", "no")
    others = "zero= says which stage and which tiers"
    whole = "it casts a model that is sharded: evaluate with bf16=True, or load the model in bfloat16"
    for found, what, way_out in (
        (
            args.deepspeed is not None and deepspeed_of(args) is None,
            "deepspeed= of stock TrainingArguments, which lets DeepSpeed shard the model,",
            f"write TrainingArguments = zero_hf.sharded(TrainingArguments), and the JSON is followed here; or {others}",
        ),
        (args.fsdp, "fsdp=", f"FSDP shards the model itself: leave it out, {others}"),
        (args.parallelism_config, "parallelism_config=", "ranks are data parallel here: leave it out"),
        (args.fp16 or precision == "fp16", "fp16=True", _GRADED),
        (precision == "fp8", "mixed_precision=fp8", "use bf16=True"),
        (args.fp16_full_eval, "fp16_full_eval=True", whole),
        (args.bf16_full_eval, "bf16_full_eval=True", whole),
        (
            args.torch_compile,
            "torch_compile=True",
            "it compiles the whole model before it is sharded: leave it out, and compile the blocks, as in "
            "`for layer in model.model.layers: layer.compile()`",
        ),
        (
            args.save_on_each_node,
            "save_on_each_node=True",
            "each rank writes its part of a checkpoint: leave it out, and make output_dir a folder that all see",
        ),
        (
            args.n_gpu > 1,
            f"{args.n_gpu} GPUs in one process",
            f"start a process for each of them, with torchrun --nproc-per-node {args.n_gpu}",
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
            raise ConfigError(f"{what} does not go with zero_hf.sharded: {way_out}")
