"""Translates the sections of a DeepSpeed JSON. Each function reads the keys of one, or refuses them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import optimizers
from .reading import Reading
from .schedules import SCHEDULES, make, needed_by, params_of

__all__ = ["autocast", "batch", "loss_scale", "optimizer", "param_dtype", "scheduler", "shard_size", "zero"]

_ZERO = "zero_optimization."
DTYPES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}


def param_dtype(read: Reading) -> str | None:
    found = [name for name in ("bf16", "fp16") if read.get(f"{name}.enabled")]
    dtype = found[0] if found else None
    if len(found) == 2:
        read.refuse("fp16.enabled", "bf16 is enabled, too: keep one of them")
    wanted = read.get("data_types.param_dtype")
    if wanted is not None and DTYPES[wanted] != DTYPES[dtype or "fp32"]:
        read.refuse(
            "data_types.param_dtype", f"parameters are in {dtype or 'fp32'}: enable bf16 or fp16, or leave it out"
        )
    return dtype


def zero(read: Reading, dtype: str | None, model: Any, ranks: int) -> dict[str, Any]:
    """Stage, dtype, tiers, folders and sizes, as arguments of `Settings`."""
    stage, paths = read.get(f"{_ZERO}stage"), list[str]()
    states = _place(read, "offload_optimizer", stage, (1, 2, 3), paths)
    ratio = read.get(f"{_ZERO}offload_optimizer.ratio")
    if ratio < 1 and stage != 3:
        read.refuse(
            f"{_ZERO}offload_optimizer.ratio",
            f"DeepSpeed offloads a part at stage 3 only, and the stage is {stage}: write 1",
        )
    elif ratio < 1 and states != "device":
        states = {"device": round(1 - ratio, 9), states: ratio} if ratio else "device"
    parameters = _place(read, "offload_param", stage, (3,), paths)
    in_cpu = read.values.get(f"{_ZERO}offload_param.max_in_cpu")
    if in_cpu is not None and parameters == "nvme" and isinstance(model, nn.Module):
        share = min(1.0, in_cpu * ranks / max(1, sum(p.numel() for p in model.parameters())))
        parameters = {"host": round(share, 9), "nvme": round(1 - share, 9)}
    sizes, itemsize = {}, 4 if dtype is None else 2
    prefetch, live, reuse = (
        f"{_ZERO}stage3_{name}" for name in ("prefetch_bucket_size", "max_live_parameters", "max_reuse_distance")
    )
    if prefetch in read.values:
        sizes["prefetch_bytes"] = read.values[prefetch] * itemsize
    if live in read.values or reuse in read.values:
        sizes["resident_bytes"] = min(read.get(live), read.get(reuse)) * itemsize
    places = {"optimizer": states, "gradients": states, "parameters": parameters}
    return {"stage": stage, "param_dtype": dtype, "nvme_paths": tuple(paths), **places, **sizes}


def _place(read: Reading, section: str, stage: int, stages: tuple[int, ...], paths: list[str]) -> Any:
    """The tier that an offload section names. Its path goes into `paths`."""
    key, path_key = f"{_ZERO}{section}.device", f"{_ZERO}{section}.nvme_path"
    place = {"none": "device", "cpu": "host", "nvme": "nvme"}[read.get(key)]
    path = read.get(path_key)
    if place != "device" and stage not in stages:
        names = "stage 3" if stages == (3,) else "stages 1 to 3"
        read.refuse(key, f"DeepSpeed offloads this at {names} only, and the stage is {stage}: change one of them")
        return "device"
    if place == "nvme" and path is None:
        read.refuse(path_key, "it is missing: name a folder on your fastest drive")
        return "host"
    if place == "nvme" and path not in paths:
        paths.append(path)
    return place


def batch(read: Reading, ranks: int) -> tuple[int | None, int | None, int | None]:
    """Micro-batch, accumulation and whole batch. A missing one follows from the others, as in DeepSpeed."""
    keys = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    micro, accumulate, total = (read.values.get(key) for key in keys)
    said = ", ".join(f"{key}={read.values[key]}" for key in keys if key in read.values)
    if total is None and micro is not None:
        accumulate = accumulate or 1
        total = micro * accumulate * ranks
    elif total is not None and micro is None:
        accumulate = accumulate or 1
        micro = total // (accumulate * ranks)
    elif total is not None and micro is not None and accumulate is None:
        accumulate = total // (micro * ranks)
    if total is not None and micro is not None and accumulate is not None and total != micro * accumulate * ranks:
        read.refuse(
            next(key for key in reversed(keys) if key in read.values),
            f"{said} on {ranks} rank{'s' if ranks > 1 else ''}: train_batch_size is the product of the micro-batch, "
            "the accumulation steps and the ranks. Leave one of them out, or say the ranks with world_size=",
        )
    return micro, accumulate, total


def shard_size(read: Reading, stage: int, ranks: int) -> int | None:
    size = read.get(f"{_ZERO}mics_shard_size")
    if size > 0 and stage != 3:
        read.refuse(f"{_ZERO}mics_shard_size", f"MiCS is for stage 3, and the stage is {stage}: change one of them")
    elif size > 0 and ranks % size:
        read.refuse(
            f"{_ZERO}mics_shard_size",
            f"{ranks} ranks are no multiple of it: take a divisor, or say the ranks with world_size=",
        )
    return int(size) if 0 < size < ranks and stage == 3 and ranks % size == 0 else None


def loss_scale(read: Reading, stage: int, dtype: str | None) -> dict[str, Any] | None:
    """Keyword arguments of LossScale. At stage 0 DeepSpeed knows no hysteresis and goes on at the minimum."""
    names = ("loss_scale", "initial_scale_power", "loss_scale_window", "min_loss_scale")
    fixed, power, window, minimum = (read.get(f"fp16.{name}") for name in names)
    if dtype != "fp16":
        return None
    if fixed:
        return {"value": float(fixed), "dynamic": False}
    return {
        "value": 2.0**power,
        "window": window,
        "first_window": window + 1,
        "hysteresis": read.get("fp16.hysteresis") if stage else 1,
        "consecutive_hysteresis": read.get("fp16.consecutive_hysteresis") and stage > 0,
        "minimum": minimum,
        "fails_at_minimum": stage > 0,
    }


def autocast(read: Reading, dtype: str | None) -> torch.dtype | None:
    if not read.get("torch_autocast.enabled"):
        return None
    if DTYPES[read.get("torch_autocast.dtype")] != torch.bfloat16:
        read.refuse(
            "torch_autocast.dtype", "autocast in fp16 needs torch's GradScaler, which reads whole gradients: write bf16"
        )
    if dtype is not None:
        read.refuse("torch_autocast.enabled", f"{dtype} is enabled, too: keep one of them")
    return torch.bfloat16


def optimizer(read: Reading) -> tuple[str, dict[str, Any]] | None:
    name = _typed(read, "optimizer")
    if name is None:
        return None
    if optimizers.params_of(name) is None:
        otherwise = "there is none of this name: take Adam, AdamW, Adagrad, Lion, or a class of torch.optim"
        read.refuse("optimizer.type", optimizers.REFUSED.get(name.lower(), otherwise))
        return None
    params = read.params("optimizer")
    try:
        made = optimizers.make(name, [nn.Parameter(torch.zeros(1))], params)
    except (TypeError, ValueError) as error:
        read.refuse("optimizer.type", f"{name} cannot be made: {error}")
        return None
    read.say("optimizer.type", f"{'zero_optim_cpu' if name.lower() == 'lion' else 'torch.optim'}.{type(made).__name__}")
    return name, params


def scheduler(read: Reading) -> tuple[str, dict[str, Any]] | None:
    name = _typed(read, "scheduler")
    if name is None:
        return None
    if params_of(name) is None:
        read.refuse("scheduler.type", f"there is none of this name: take {', '.join(SCHEDULES)}, or a class of torch")
        return None
    read.say("scheduler.type", f"{name}, step for step")
    params = read.params("scheduler")
    missing = [key for key in needed_by(name) if key not in params and f"scheduler.params.{key}" not in read]
    if missing:
        read.refuse("scheduler.type", f"{name} needs {', '.join(missing)}: write a value into params")
    elif set(needed_by(name)) <= set(params) and not any(isinstance(value, tuple) for value in params.values()):
        over = torch.optim.AdamW([nn.Parameter(torch.zeros(1))])  # one group: lists may be of more
        try:
            made = make(name, over, params)
            over.step()
            made.step()
        except (TypeError, ValueError) as error:
            read.refuse("scheduler.type", f"{name} cannot be made: {error}")
    return name, params


def _typed(read: Reading, section: str) -> str | None:
    if f"{section}.type" in read.values:
        return str(read.values[f"{section}.type"])
    if any(key.startswith(f"{section}.params") for key in read.rows):
        read.refuse(f"{section}.type", "it is missing, and there are parameters: name the type")
    return None
