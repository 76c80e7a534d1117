"""What the sections of a DeepSpeed JSON become here. Each function reads its keys, and records what they are here."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from .optimizers import REFUSED, Kind, kind_of
from .reading import Reading
from .schedules import SCHEDULES, make, needed_by, params_of

__all__ = [
    "autocast",
    "batch",
    "loss_scale",
    "optimizer",
    "param_dtype",
    "reduce_dtype",
    "scheduler",
    "shard_size",
    "zero",
]

_ZERO = "zero_optimization."
_DTYPES = {
    **dict.fromkeys(("fp32", "float32"), torch.float32),
    **dict.fromkeys(("bf16", "bfloat16", "torch.bfloat16"), torch.bfloat16),
    **dict.fromkeys(("fp16", "float16", "half", "torch.float16"), torch.float16),
}


def param_dtype(read: Reading) -> str | None:
    found = [name for name in ("bf16", "fp16") if read.get(f"{name}.enabled")]
    dtype = found[0] if found else None
    remark = "masters start from the model's own values, which DeepSpeed rounds first; buffers keep their dtype"
    for name in ("bf16", "fp16"):
        on = name in found
        read.ours(f"{name}.enabled", f"param_dtype: {name}" if on else "off", remark if on else "")
    if len(found) == 2:
        read.refuse("fp16.enabled", "bf16 is enabled, too: keep one of them")
    wanted = read.get("data_types.param_dtype")
    read.ours("data_types.param_dtype", f"param_dtype: {dtype}")
    if wanted is not None and _DTYPES[wanted] != _DTYPES[dtype or "fp32"]:
        read.refuse(
            "data_types.param_dtype", f"parameters are in {dtype or 'fp32'}: enable bf16 or fp16, or leave it out"
        )
    return dtype


def zero(read: Reading, dtype: str | None, model: Any, ranks: int) -> dict[str, Any]:
    stage = read.get(f"{_ZERO}stage")
    read.ours(f"{_ZERO}stage", f"stage: {stage}")
    paths: list[str] = []
    states: Any = _place(read, "offload_optimizer", stage, (1, 2, 3), paths)
    states = _split_states(read, states, stage)
    parameters = _split_parameters(read, _place(read, "offload_param", stage, (3,), paths), model, ranks)
    read.ours(f"{_ZERO}offload_optimizer.device", f"optimizer, gradients: {states}")
    read.ours(f"{_ZERO}offload_param.device", f"parameters: {parameters}")
    places = {"optimizer": states, "gradients": states, "parameters": parameters}
    sizes: dict[str, Any] = {}
    itemsize = 4 if dtype is None else 2
    prefetch = f"{_ZERO}stage3_prefetch_bucket_size"
    if prefetch in read.values:
        sizes["prefetch_bytes"] = read.values[prefetch] * itemsize
        read.ours(prefetch, f"prefetch_bytes: {sizes['prefetch_bytes']}", "elements there, bytes here")
    live, reuse = f"{_ZERO}stage3_max_live_parameters", f"{_ZERO}stage3_max_reuse_distance"
    if live in read.values or reuse in read.values:
        sizes["resident_bytes"] = min(read.get(live), read.get(reuse)) * itemsize
        remark = "elements there, bytes here: what stays unsharded between uses is the lesser of the two keys"
        for key in (live, reuse):
            read.ours(key, f"resident_bytes: {sizes['resident_bytes']}", remark)
    return {"stage": stage, "param_dtype": dtype, "nvme_paths": tuple(paths), **places, **sizes}


def _place(read: Reading, section: str, stage: int, stages: tuple[int, ...], paths: list[str]) -> str:
    """The tier that an offload section names. Its path goes into `paths`."""
    key, path_key = f"{_ZERO}{section}.device", f"{_ZERO}{section}.nvme_path"
    place = {"none": "device", "cpu": "host", "nvme": "nvme"}[read.get(key)]
    path = read.get(path_key)
    if place != "device" and stage not in stages:
        names = "stage 3" if stages == (3,) else "stages 1 to 3"
        read.refuse(key, f"DeepSpeed offloads this at {names} only, and the stage is {stage}: change one of them")
        return "device"
    if place != "nvme":
        read.ours(path_key, "-", "nothing is kept there")
        return place
    if path is None:
        read.refuse(path_key, "it is missing: name a folder on your fastest drive")
        return "host"
    paths += [path] if path not in paths else []
    read.ours(path_key, "nvme_paths", "files of all kinds are spread over all paths")
    return place


def _split_states(read: Reading, place: str, stage: int) -> Any:
    key = f"{_ZERO}offload_optimizer.ratio"
    ratio = read.get(key)
    if ratio < 1 and stage != 3:
        read.refuse(key, f"DeepSpeed offloads a part at stage 3 only, and the stage is {stage}: write 1")
        return place
    states = {"device": round(1 - ratio, 9), place: ratio} if 0 < ratio < 1 else place if ratio else "device"
    read.ours(key, f"optimizer, gradients: {states}")
    return place if place == "device" else states


def _split_parameters(read: Reading, place: str, model: Any, ranks: int) -> Any:
    """NVMe, and of a model whose size is known as much as max_in_cpu on the host."""
    key = f"{_ZERO}offload_param.max_in_cpu"
    if key not in read.values:
        return place
    if place != "nvme":
        read.ours(key, "-", "it is for NVMe only")
        return place
    if not isinstance(model, nn.Module):
        read.ours(key, "parameters: nvme", "a share of the parameters needs their number: pass model= for it")
        return place
    share = min(1.0, read.get(key) * ranks / max(1, sum(p.numel() for p in model.parameters())))
    split = {"host": round(share, 9), "nvme": round(1 - share, 9)}
    read.ours(key, f"parameters: {split}", "elements of one rank there, a fraction here")
    return split


def batch(read: Reading, ranks: int) -> tuple[int | None, int | None, int | None]:
    """Of micro-batch, accumulation and whole batch, what is not given follows from the others, as in DeepSpeed."""
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
    for key, value, name in zip(
        keys, (micro, accumulate, total), ("micro_batch_size", "accumulate", "train_batch_size"), strict=True
    ):
        read.ours(key, f"{name}={value}")
    if total is not None and micro is not None and accumulate is not None and total != micro * accumulate * ranks:
        key = next(key for key in reversed(keys) if key in read.values)
        read.refuse(
            key,
            f"{said} on {ranks} rank{'s' if ranks > 1 else ''}: train_batch_size is the product of the micro-batch, "
            "the accumulation steps and the ranks. Leave one of them out, or say the ranks with world_size=",
        )
    return micro, accumulate, total


def reduce_dtype(read: Reading) -> torch.dtype | None:
    wanted = read.get("communication_data_type")
    read.ours("communication_data_type", f"reduce_dtype={_DTYPES.get(wanted)}")
    return None if wanted is None else _DTYPES[wanted]


def shard_size(read: Reading, stage: int, ranks: int) -> int | None:
    key = f"{_ZERO}mics_shard_size"
    size = read.get(key)
    read.ours(key, f"mesh of {ranks // size} x {size} ranks" if size > 0 else "all ranks")
    if size > 0 and stage != 3:
        read.refuse(key, f"MiCS is for stage 3, and the stage is {stage}: change one of them")
    elif size > 0 and ranks % size:
        read.refuse(key, f"{ranks} ranks are no multiple of it: take a divisor, or say the ranks with world_size=")
    elif 0 < size < ranks:
        return int(size)
    return None


def loss_scale(read: Reading, stage: int, dtype: str | None) -> dict[str, Any] | None:
    """Keyword arguments of LossScale. At stage 0 DeepSpeed knows no hysteresis and goes on at the minimum."""
    names = ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis", "min_loss_scale")
    power, window, hysteresis, consecutive, minimum = (read.get(f"fp16.{name}") for name in names)
    fixed = read.get("fp16.loss_scale")
    if dtype != "fp16":
        for name in ("loss_scale", *names):
            read.ours(f"fp16.{name}", "-", "fp16 is off")
        return None
    read.ours("fp16.loss_scale", f"LossScale({fixed:g}, dynamic=False)" if fixed else "LossScale(dynamic=True)")
    if fixed:
        for name in names:
            read.ours(f"fp16.{name}", "-", "the scale is constant")
        read.ours(
            "fp16.loss_scale",
            f"LossScale({fixed:g}, dynamic=False)",
            "a gradient that is not finite stops the run with an error, where DeepSpeed skips the step",
        )
        return {"value": float(fixed), "dynamic": False}
    read.ours("fp16.initial_scale_power", f"LossScale({2.0**power:g})")
    read.ours("fp16.loss_scale_window", f"window={window}, first_window={window + 1}")
    if stage:
        read.ours("fp16.hysteresis", f"hysteresis={hysteresis}")
        read.ours("fp16.consecutive_hysteresis", f"consecutive_hysteresis={consecutive}")
    else:
        hysteresis, consecutive = 1, False
        for name in ("hysteresis", "consecutive_hysteresis"):
            read.ours(f"fp16.{name}", "hysteresis=1", "at stage 0 DeepSpeed has none, whatever the file says")
    read.ours("fp16.min_loss_scale", f"minimum={minimum}")
    return {
        "value": 2.0**power,
        "window": window,
        "first_window": window + 1,
        "hysteresis": hysteresis,
        "consecutive_hysteresis": consecutive,
        "minimum": minimum,
        "fails_at_minimum": stage > 0,
    }


def autocast(read: Reading, dtype: str | None) -> torch.dtype | None:
    enabled, wanted = read.get("torch_autocast.enabled"), _DTYPES[read.get("torch_autocast.dtype")]
    remark = "gradients are reduced in the parameters' dtype, where DeepSpeed takes autocast's for linear layers"
    read.ours("torch_autocast.enabled", f"torch.autocast, {wanted}" if enabled else "off", remark if enabled else "")
    read.ours("torch_autocast.dtype", f"{wanted}" if enabled else "-")
    if enabled and wanted != torch.bfloat16:
        read.refuse(
            "torch_autocast.dtype", "autocast in fp16 needs torch's GradScaler, which reads whole gradients: write bf16"
        )
    elif enabled and dtype is not None:
        read.refuse("torch_autocast.enabled", f"{dtype} is enabled, too: keep one of them")
    elif enabled:
        return wanted
    return None


def optimizer(read: Reading) -> tuple[Kind, dict[str, Any]] | None:
    name = _typed(read, "optimizer")
    if name is None:
        return None
    kind = kind_of(name)
    if kind is None:
        otherwise = "there is none of this name: take Adam, AdamW, Adagrad, Lion, or a class of torch.optim"
        read.refuse("optimizer.type", REFUSED.get(name.lower(), otherwise))
        return None
    params = read.params("optimizer")
    read.ours("optimizer.type", kind.ours(params))
    try:
        kind.make([nn.Parameter(torch.zeros(1))], params)
    except (TypeError, ValueError) as error:
        read.refuse("optimizer.type", f"{kind.ours(params)} cannot be made: {error}")
        return None
    return kind, params


def scheduler(read: Reading) -> tuple[str, dict[str, Any]] | None:
    name = _typed(read, "scheduler")
    if name is None:
        return None
    if params_of(name) is None:
        read.refuse("scheduler.type", f"there is none of this name: take {', '.join(SCHEDULES)}, or a class of torch")
        return None
    read.ours("scheduler.type", f"{name}, step for step")
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
    """The type of a section, with what its parameters are here."""
    for name, value in read.params(section).items():
        read.ours(f"{section}.params.{name}", f"{name}={value!r}")
    if f"{section}.type" in read.values:
        return str(read.values[f"{section}.type"])
    if any(key.startswith(f"{section}.params") for key in read.rows):
        read.refuse(f"{section}.type", "it is missing, and there are parameters: name the type")
    return None
