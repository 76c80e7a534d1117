"""Refuses models, optimizers and options that cannot be sharded, with the reason, before `shard` changes anything.

Owns no state. Not here: the comparison of several ranks (in assemble.py).
"""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from ..comm.ranks import BLANK
from ..errors import AlreadyShardedError, StageError, UnsupportedOptimizerError, ZeroError, listed
from ..gradients.loss_scaling import LossScale
from ..optim.contracts import TAKEN
from ..optim.joint import members_of
from ..optim.optimizer import ShardedOptimizer
from ..precision import FLOATS
from ..store import ShardStore
from ..tensors.inner_tensors import check_frozen, check_initialised, check_parts, named_parts
from ..tensors.refusals import refuse_grad_dtype, refuse_optimizer
from ..tensors.sharded_parameter import sharded_class
from ..unit_memory.residency_policy import STAGES


def check_given(
    model: nn.Module, optimizer: Optimizer, stage: int, param_dtype: torch.dtype | None, max_grad_norm: float | None
) -> None:
    """Raise if the model, the optimizer or an option is none that `shard` can take."""
    if not isinstance(model, nn.Module) or not isinstance(optimizer, Optimizer):
        given = f"{type(model).__name__}, {type(optimizer).__name__}"
        raise ZeroError(f"shard({given}): it takes the module first, then its torch.optim.Optimizer")
    for name, module in model.named_modules():
        if isinstance(module, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            raise ZeroError(
                f"{f'module {name!r}' if name else 'the model'} is a {type(module).__name__}, whose work "
                "zero_core.shard does: give zero_core.shard the module inside (.module), and leave the wrapper out"
            )
    if stage not in STAGES:
        raise StageError(f"stage={stage!r}: give the number of a stage of ZeRO: 0, 1, 2 or 3")
    if param_dtype is not None and param_dtype not in FLOATS:
        raise StageError(f"param_dtype={param_dtype}: it can be float32, bfloat16 or float16")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ZeroError(f"max_grad_norm={max_grad_norm}: give a norm above 0, or None, which does not clip")
    if any(isinstance(each, ShardedOptimizer) or "_zero_sharded" in each.__dict__ for each in members_of(optimizer)):
        raise AlreadyShardedError("this optimizer is sharded already: build a new one for each zero_core.shard")
    for each, name in product({optimizer, *members_of(optimizer)}, TAKEN):
        method = getattr(each, name)
        method = getattr(method, "__func__", method)
        if hasattr(method, "_wrapped_by_lr_sched"):  # by a scheduler that was built before
            method = method.__wrapped__
        if method is not getattr(type(each), name):
            raise UnsupportedOptimizerError(
                f"{name}() of this {type(each).__name__} was replaced by another function, which zero_core.shard would "
                f"leave out: assign the function to {name} of the optimizer that zero_core.shard returned"
            )
    held = ((k, v) for k, v in vars(optimizer).items() if isinstance(v, Optimizer))
    if (wrapped := next(held, None)) is not None:
        accelerates = type(optimizer).__module__.startswith("accelerate.")
        raise UnsupportedOptimizerError(
            f"{type(optimizer).__name__} wraps another optimizer, {type(wrapped[1]).__name__} in .{wrapped[0]}"
            + (
                f": give shard() the inner one, `optimizer = zero_core.shard(model, optimizer.{wrapped[0]}, ...)`, and "
                "prepare only the data loader with accelerate"
                if accelerates
                else ". The inner step() would not run on shards: use one optimizer whose step() does the work of both"
            )
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and next(module.parameters(), None) is not None:
            raise ZeroError(
                f"{f'module {name!r}' if name else 'the model'} is a TorchScript module. It runs no hooks, so nothing "
                "can gather its parameters: leave torch.jit out, and compile each block with torch.compile"
            )
    check_initialised(model)
    for name, _, parameter, _, _ in named_parts(model):
        if parameter.__dict__.get("_zero_home") is not None:
            check_frozen(name, parameter)
            continue
        sharded_class(type(parameter))
        check_parts(name, parameter)
    _check_parameters(model, optimizer, param_dtype)


def _check_parameters(model: nn.Module, optimizer: Optimizer, param_dtype: torch.dtype | None) -> None:
    given, mine = [p for g in optimizer.param_groups for p in g["params"]], {id(p) for p in model.parameters()}
    plain = [(n, p) for n, p in model.named_parameters() if p.__dict__.get("_zero_home") is None]
    if pending := [name for name, parameter in plain if parameter.grad is not None]:
        raise ZeroError(
            f"shard() would lose the gradients of {listed(pending, most=1)}: before shard(), call "
            "model.zero_grad(). To use these gradients, call step() of their optimizer before that"
        )
    trained, stepped = [p for p in given if p.requires_grad], {id(p) for p in given}
    if odd := [p.dtype for p in trained if not p.is_floating_point()]:
        raise UnsupportedOptimizerError(
            f"the optimizer trains parameters of {odd[0]}, and shards are trained in float32, bfloat16 or float16: "
            "give these to a second optimizer, which is not passed to shard()"
        )
    for name, parameter in plain:
        wanted = getattr(parameter, "grad_dtype", parameter.dtype)
        if id(parameter) in stepped and wanted != parameter.dtype:
            refuse_grad_dtype(name, wanted, parameter.dtype)
        if hasattr(parameter, "_in_backward_optimizers"):
            refuse_optimizer(name)
    ids = {id(p) for p in trained}
    for name, parameter in model.named_parameters():
        if id(parameter) in ids and param_dtype is None and parameter.dtype not in FLOATS:
            raise StageError(
                f"{name} is {parameter.dtype}, which a float32 master would round: cast the model to float32, "
                "bfloat16 or float16. Or pass param_dtype=torch.float32"
            )
        if parameter.is_quantized:
            raise ZeroError(
                f"{name} has the quantised dtype {parameter.dtype}, and its scales are stored outside of its memory: "
                "dequantise it, or keep it as a buffer, before zero_core.shard"
            )
    if strangers := [str(tuple(p.shape)) for p in given if id(p) not in mine]:
        raise ZeroError(
            f"the optimizer has parameters that the model lacks, of shapes {listed(strangers, most=3)}: build it from "
            "model.parameters() of the model given to shard. If they are those of a loss, make its module a part of "
            "the model, model.body.classifier = loss.classifier. Or, if nothing trains them, freeze them before the "
            "optimizer is built"
        )


def check_store(store: ShardStore) -> None:
    """Gives the store the defaults of `ShardStore` that it lacks. Raises if it lacks a member without a default."""
    members = {name: member for name, member in vars(ShardStore).items() if not name.startswith("_")}
    needed = list(members)[: list(members).index("swaps_in")]
    if missing := [name for name in needed if not hasattr(store, name)]:
        kind, names = type(store).__name__, ", ".join(missing)
        raise ZeroError(f"the store, a {kind}, has no {names}: give it all that zero_core.ShardStore has")
    for name, member in members.items():
        if not hasattr(store, name):
            setattr(store, name, member.__get__(store))


def check_group(mesh: Any) -> None:
    """Raise if several processes were started, as by torchrun, and have no process group: each would train alone."""
    started = os.environ.get("WORLD_SIZE", "1")
    if mesh is None and "RANK" in os.environ and started.isdecimal() and int(started) > 1:
        if not (dist.is_available() and dist.is_initialized()):
            raise ZeroError(
                f"{started} processes were started (WORLD_SIZE={started}, RANK={os.environ['RANK']}) and there is no "
                "process group: each would train a model of its own. Call torch.distributed.init_process_group() "
                "before zero_core.shard. If separate models are what you want, remove WORLD_SIZE from the environment"
            )


def check_find_unused(stage: int) -> None:
    """Raise at a stage that gathers a unit where it runs, in backward too."""
    if not STAGES[stage].keeps_parameters:
        raise StageError(
            f"find_unused_parameters=True cannot be used with stage={stage}: all ranks gather each unit when it runs, "
            "so no rank may skip a unit. Use stage 0, 1 or 2. Or leave find_unused_parameters out. If a batch then has "
            f"no input for a unit, {BLANK}"
        )


def check_update_in_backward(
    stage: int, max_grad_norm: float | None, scale: LossScale | None, find_unused_parameters: bool
) -> None:
    """An update inside backward comes before the norm is known, and before stage 1 has reduced anything."""
    for refused, reason in (
        (max_grad_norm is not None, f"max_grad_norm={max_grad_norm}: the norm is known only after backward"),
        (scale is not None, "loss_scale: an overflow is known only after backward"),
        (find_unused_parameters, "find_unused_parameters=True, which keeps whole gradients until the step"),
        (stage == 1, "stage=1, which keeps whole gradients until the step"),
    ):
        if refused:
            way = "Use stage 0, 2 or 3" if reason.startswith("stage") else "Leave one of the two out"
            raise StageError(f"update_in_backward=True cannot be combined with {reason}. {way}")
