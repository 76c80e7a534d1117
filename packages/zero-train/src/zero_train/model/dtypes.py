"""Decides which number formats `precision=auto` means on this machine, and says why.

bf16 halves the bytes of a parameter, but on a CPU without bf16 arithmetic a matrix product of bf16 takes four to five
times as long as one of fp32 (2 threads of an AVX-512 Xeon without avx512_bf16, torch 2.13: 48 against 235 GFLOP/s).
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from zero_train.schema import Config
from zero_train.settings.placement import on

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTO = "auto"
_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 twice, then Arm


def resolve(config: Config, device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Replaces `auto` in config.precision by a format and a layout. Returns the reason, or "" if there was no auto.

    The layout `split` is for bf16 parameters whose shards the CPU holds; all others keep fp32 states. A dry run follows
    the described hardware.
    """
    parameters, states, reason = config.precision.parameters, config.precision.states, ""
    kind = (config.hardware.get("device") if config.run.dry else None) or device.type
    if parameters == AUTO:
        flag = min(_flags(cpuinfo) & _CPU_FLAGS, default="")
        computes = bool(flag) if kind == "cpu" else kind != device.type or _computes_bf16(device)
        parameters = "bf16" if computes else "fp32"
        machine = "CPU" if kind == "cpu" else f"{kind} device"
        reason = f"{parameters}: this {machine} has {flag or 'bf16' if computes else 'no bf16 arithmetic'}"
    if states == AUTO:
        held_by_cpu = kind == "cpu" or not on(config.offload.parameters, "device")
        states = "split" if parameters == "bf16" and held_by_cpu else "fp32"
    config.precision = dataclasses.replace(config.precision, parameters=parameters, states=states)
    return reason


def _computes_bf16(device: torch.device) -> bool:
    """Asks the device whether it computes in bf16. Assumes so if it cannot say: GPUs have had bf16 since 2020."""
    module = torch.get_device_module(device)
    said = getattr(module, "is_bf16_supported", None)
    if said is None or not module.is_available():
        return True
    try:
        return bool(said(False))  # not by emulation
    except TypeError:  # Ascend's takes no argument
        return bool(said())


def _flags(cpuinfo: Path) -> set[str]:
    """Returns the feature words of the first core, which are called `flags` on x86 and `Features` on Arm."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())
