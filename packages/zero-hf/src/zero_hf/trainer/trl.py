"""Adapts TRL's trainers beyond transformers' Trainer: shards reference and reward models, and lets policies generate.

Owns the shards of models that are not trained. TRL is neither imported nor changed: `sharded` puts `ShardedTRL` before
a trainer class of TRL, and overrides the methods that TRL's trainers call.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from transformers import Trainer, TrainingArguments

import zero_core
from zero_core.model.deferred_init import continue_recording, recording_of

from ..config import ConfigError, ZeroConfig
from ..sharding import Run, shard


def is_trl(trainer: type[Any]) -> bool:
    """Whether a Trainer class is defined by TRL, or derives from such a class."""
    base = sys.modules.get("trl.trainer.base_trainer")
    return base is not None and issubclass(trainer, base._BaseTrainer)


def shard_of(
    trainer: Any, model: nn.Module, optimizer: torch.optim.Optimizer | None, *, said: str = "", **options: Any
) -> Run:
    """Shards a model of a Trainer, on its device, and prints `said` and the plan. options: as for `shard`."""
    device = trainer.args.device
    device = "cpu" if device.type == "cpu" else device  # torch names the second rank's "cpu:1"
    unused = bool(trainer.args.ddp_find_unused_parameters) and trainer.zero_config.stage < 3
    run = shard(model, optimizer, trainer.zero_config, device=device, find_unused_parameters=unused, **options)
    if trainer.is_world_process_zero():
        sys.stdout.write(f"{said}{run.describe()}\n")
        sys.stdout.flush()
    return run


@contextmanager
def synced_generation(model: Any) -> Iterator[None]:
    """Makes every `model.generate()` inside one with synced_gpus=True: ranks run as many forwards as the longest text.

    A shard is gathered from all ranks, so a rank that stopped earlier would leave the others waiting.
    """
    own, generate = vars(model).get("generate"), model.generate
    model.generate = lambda *given, **options: generate(*given, **options | {"synced_gpus": True})
    try:
        yield
    finally:
        del model.generate
        if own is not None:
            model.generate = own


class ShardedTRL(Trainer):
    """The methods that `sharded` overrides in TRL's trainers.

    zero_others: the runs of models that are not trained (reference, reward, teacher), in the order they were sharded.
    """

    zero_config: ZeroConfig
    zero_others: list[Run]
    model: Any

    def __init__(self, *given: Any, **options: Any) -> None:
        if isinstance(given[0] if given else options.get("model"), str):  # TRL would put it on the GPU, whole
            for args in (thing for thing in (*given, *options.values()) if isinstance(thing, TrainingArguments)):
                loading = {"device_map": None} | (getattr(args, "model_init_kwargs", None) or {})
                vars(args)["model_init_kwargs"] = loading
        models = [thing for thing in given[:2] if isinstance(thing, nn.Module)]
        models += [options[name] for name in ("model", "ref_model") if isinstance(options.get(name), nn.Module)]
        self.zero_others = []
        self._zero_reference_is_deferred = bool(models) and _deferred(models[-1])
        with _adding_adapters(models[0], options.get("peft_config")) if models else nullcontext():
            super().__init__(*given, **options)
            random_state = torch.get_rng_state()
        torch.set_rng_state(random_state)

    def create_accelerator_and_postprocess(self) -> None:
        _refuse(self.args, self._zero_reference_is_deferred)
        super().create_accelerator_and_postprocess()
        prepare = self.accelerator.prepare_model

        def prepare_model(model: nn.Module, *given: Any, **options: Any) -> nn.Module:
            """Shards a model that TRL prepares for evaluation only. Then Accelerator.prepare_model adds autocast."""
            if options.get("evaluation_mode") and model is not self.model:
                self._zero_shard_other(model)
                options["device_placement"] = False
            return prepare(model, *given, **options)

        self.accelerator.prepare_model = prepare_model

    def _zero_shard_other(self, model: nn.Module) -> None:
        run = shard_of(self, model, None)
        self.zero_others.append(run)
        if self.zero_config.host_bytes is not None:  # the next model gets the rest of it
            left = max(0, self.zero_config.host_bytes - run.plan.total("host"))
            self.zero_config = dataclasses.replace(self.zero_config, host_bytes=left)

    def end(self) -> None:
        for run in self.zero_others:
            run.close()
        super().end()

    # -- generation ----------------------------------------------------------------------------------------------------

    @property
    def _zero_scattered(self) -> bool:
        """Whether a forward gathers parameters, from other ranks or from another tier."""
        config = self.zero_config
        return (config.stage > 0 and self.args.world_size > 1) or config.placements["parameters"] != "device"

    @property
    def _zero_gathers(self) -> bool:
        """Whether the whole model is gathered while it generates, by TRL's argument for DeepSpeed."""
        return self._zero_scattered and getattr(self.args, "ds3_gather_for_generation", True)

    def _generate(self, *given: Any, **options: Any) -> Any:
        turns = getattr(self, "tools", None) or getattr(self, "environment_factories", None)
        if turns and self._zero_scattered and not self._zero_gathers and self.args.world_size > 1:
            raise ConfigError(
                "tools cannot be used with ds3_gather_for_generation=False: a rank with more tool calls than others "
                "would wait forever. Set ds3_gather_for_generation=True, which gathers the model while it generates"
            )
        with zero_core.gathered(self.model) if self._zero_gathers else nullcontext():
            inherited: Any = super()
            return inherited._generate(*given, **options)

    def _generate_single_turn(self, *given: Any, **options: Any) -> Any:
        synced = self.args.world_size > 1 and self.zero_config.stage > 0 and not self._zero_gathers
        with synced_generation(self.model) if synced else nullcontext():
            inherited: Any = super()
            return inherited._generate_single_turn(*given, **options)


def _deferred(model: nn.Module) -> bool:
    return any(parameter.is_meta for parameter in model.parameters())


def _adding_adapters(model: nn.Module, peft_config: Any) -> AbstractContextManager[Any]:
    """Returns the context in which TRL adds adapters: to a model without values, they have none either.

    To a model that has such adapters already, TRL adds a copy of them as the reference. The copy gets the values that
    the adapters get.
    """
    if not _deferred(model):
        return nullcontext()
    if peft_config is not None:
        return zero_core.deferred_init()
    adapters = [m for name, m in model.named_modules() if name.endswith(".default") and recording_of(m) is not None]
    return continue_recording(adapters[0]) if adapters else nullcontext()


def _refuse(args: TrainingArguments, deferred: bool) -> None:
    """Raises ConfigError for an unsupported argument of TRL, before anything is allocated."""
    for name, applies, way_out in (
        ("use_vllm", True, "vLLM cannot read sharded weights. Leave it out, and transformers generates"),
        ("use_transformers_continuous_batching", True, "it would cast the model. Leave it out"),
        ("activation_offloading", True, 'pass activation_checkpointing=False and zero={"activations": "host"} instead'),
        (
            "precompute_ref_log_probs",
            deferred,
            "TRL hashes the weights of the reference model, which zero_hf.from_pretrained has not read yet. Load it "
            "with from_pretrained of transformers",
        ),
    ):
        if applies and getattr(args, name, False):
            raise ConfigError(f"{name}=True cannot be used with zero_hf.sharded: {way_out}")
