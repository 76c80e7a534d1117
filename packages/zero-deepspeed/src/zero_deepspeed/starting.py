"""Defines `initialize`, and the other functions that a DeepSpeed script calls before it has an engine."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zero_core.errors import ConfigError

from .engine import Engine, device_here
from .sharding import shard
from .translation import from_deepspeed


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Adds --deepspeed and --deepspeed_config, as DeepSpeed does. Returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed configurations")
    group.add_argument("--deepspeed", action="store_true", help="has no effect: initialize() always shards")
    group.add_argument("--deepspeed_config", help="the JSON that initialize() reads")
    return parser


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
) -> None:
    """Starts torch.distributed if it is not started, from the variables that torchrun sets; without them, for one rank.

    dist_backend: None is nccl for GPUs and gloo for CPUs. timeout, init_method: as torch.distributed takes them. The
    other arguments concern DeepSpeed's own launchers, and are not used.
    """
    if dist.is_initialized():
        return
    options: dict[str, Any] = {"timeout": timeout, "init_method": init_method}
    if "WORLD_SIZE" not in os.environ and init_method is None:
        options |= {"store": dist.HashStore(), "rank": 0, "world_size": 1}
    dist.init_process_group(dist_backend or dist.get_default_backend_for_device(device_here()), **options)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    model_parameters: Any = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int | None = None,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Any = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]:
    """Shards `model` as a JSON of DeepSpeed's says. Takes and returns what deepspeed.initialize does. Collective.

    config: a mapping or a path; else args.deepspeed_config. optimizer: an optimizer, or a function that makes one from
    the parameters; it overrides the JSON's. model_parameters: tensors or groups for the JSON's optimizer; None: all
    that require a gradient. Returns the engine, its optimizer, a loader of training_data and the schedule; each of
    the last three is None if there is none. The translation and the plan are printed by rank 0.

    Raises:
        ConfigError: the JSON has keys that cannot be followed, and they are named; or mpu or mesh_param is given.
        TypeError: there is no model.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"initialize(model={model!r}): give an nn.Module")
    for name, given in (("mpu", mpu), ("mesh_param", mesh_param)):
        if given is not None:
            raise ConfigError(f"{name}= is not supported, because all ranks are data parallel: leave {name}= out")
    given = [each for each in (config, config_params, getattr(args, "deepspeed_config", None)) if each is not None]
    if len(given) != 1:
        raise ConfigError(f"{len(given)} configurations were given: give either config= or args.deepspeed_config")
    init_distributed()
    translation = from_deepspeed(given[0], model=model, world_size=dist.get_world_size())
    if model_parameters is None:
        model_parameters = (parameter for parameter in model.parameters() if parameter.requires_grad)
    parameters = list(model_parameters)
    if optimizer is None:
        optimizer = translation.optimizer(parameters)
    elif not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(parameters)
    run = shard(
        model,
        optimizer,
        translation.zero,
        device=device_here(),
        accumulate=translation.accumulate or 1,
        max_grad_norm=translation.max_grad_norm,
        loss_scale=translation.loss_scale,
        **translation.shard_options,
    )
    if lr_scheduler is None and run.optimizer is not None:
        lr_scheduler = translation.scheduler(run.optimizer)
    elif callable(lr_scheduler):  # a class, or a function
        lr_scheduler = lr_scheduler(run.optimizer)
    engine = Engine(run, translation, lr_scheduler, collate_fn)
    if dist.get_rank() == 0:
        sys.stdout.write(f"{translation.table()}\n{run.describe()}\n")
        sys.stdout.flush()
    if training_data is not None:
        engine.training_dataloader = engine.deepspeed_io(training_data)
    return engine, engine.optimizer, engine.training_dataloader, lr_scheduler
