"""Number formats: what `precision=auto` comes to on this machine, and why.

bf16 halves the bytes of a parameter, but on a CPU without bf16 arithmetic a matrix product of bf16 takes four to five
times as long as one of fp32 (2 threads of an AVX-512 Xeon without avx512_bf16, torch 2.13: 48 against 235 GFLOP/s).
"""

from __future__ import annotations

from pathlib import Path

import torch

from zero_train.checks import on
from zero_train.schema import Config

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
AUTO = "auto"
_CPU_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # x86 twice, then Arm


def resolve(config: Config, device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Replaces `auto` in config.precision by a format and a layout. Returns the reason, or nothing if none was asked.

    The layout `split` is for bf16 parameters whose shards the CPU holds; everything else keeps fp32 states. A dry run
    follows the hardware that is described.
    """
    precision, reason = config.precision, ""
    kind = (config.hardware.device if config.run.dry else None) or device.type
    if precision.parameters == AUTO:
        if kind != "cpu" and (kind != device.type or _computes_bf16(device)):
            precision.parameters, reason = "bf16", "bf16: a GPU"
        elif kind != "cpu":
            precision.parameters, reason = "fp32", f"fp32: this {kind} device has no bf16 arithmetic"
        elif found := _flags(cpuinfo) & _CPU_FLAGS:
            precision.parameters, reason = "bf16", f"bf16: this CPU has {sorted(found)[0]}"
        else:
            precision.parameters, reason = "fp32", "fp32: this CPU has no bf16 arithmetic"
    if precision.states == AUTO:
        held_by_cpu = kind == "cpu" or not on(config.offload.parameters, "device")
        precision.states = "split" if precision.parameters == "bf16" and held_by_cpu else "fp32"
    return reason


def reduce_dtype(config: Config) -> torch.dtype:
    """The format that gradients are reduced and handed over in."""
    return DTYPES[config.precision.reduce or config.precision.parameters]


def _computes_bf16(device: torch.device) -> bool:
    """What the device says of itself. One that says nothing is taken to: GPUs have had bf16 since 2020."""
    module = torch.get_device_module(device)
    said = getattr(module, "is_bf16_supported", None)
    if said is None or not module.is_available():
        return True
    try:
        return bool(said(False))  # not by emulation
    except TypeError:  # Ascend's takes no argument
        return bool(said())


def _flags(cpuinfo: Path) -> set[str]:
    """The feature words of the first core: `flags` on x86, `Features` on Arm."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return set()
    return next((set(line.split(":", 1)[1].split()) for line in lines if line.startswith(("flags", "Features"))), set())
