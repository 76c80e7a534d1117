"""Shards a model as a translated JSON says: picks the update, plans, opens files and store, and closes them."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

import zero_core
import zero_offload
from zero_core.errors import ConfigError
from zero_offload.planning.model_sizes import only_trained


@dataclass(frozen=True)
class Settings:
    """The settings for a sharded model. parameters, gradients, optimizer: "device", "host", "nvme", or shares of them.

    param_dtype: "bf16", "fp16", or None, the model's own. The sizes are as zero_core.shard takes them.
    """

    stage: int = 3
    parameters: str | dict[str, float] = "device"
    gradients: str | dict[str, float] = "device"
    optimizer: str | dict[str, float] = "device"
    nvme_paths: tuple[str, ...] = ()
    param_dtype: str | None = None
    prefetch_bytes: int = 64 << 20
    resident_bytes: int = 0

    @property
    def placements(self) -> dict[str, Any]:
        """Where parameters, gradients and optimizer states are kept."""
        return {kind: getattr(self, kind) for kind in ("parameters", "gradients", "optimizer")}


@dataclass
class Run:
    """A sharded model, its optimizer (None: it is not trained), plan, and store (None: all stays on the device)."""

    model: nn.Module
    optimizer: Any
    plan: zero_offload.Plan
    store: zero_offload.TieredStore | None
    close: Callable[[], None]

    def describe(self) -> str:
        """Returns the plan as text to print: GiB of this rank on each tier."""
        return "\n".join(self.plan.lines())


def shard(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, zero: Settings, *, accumulate: int = 1, **options: Any
) -> Run:
    """Shards `model` in place. options: further ones of zero_core.shard. Collective.

    Raises:
        ConfigError: zero-nvme is missing or its folder cannot be used, or the optimizer has no update on the host.
    """
    dtype = {None: None, "bf16": torch.bfloat16, "fp16": torch.float16}[zero.param_dtype]
    gathering: dict[str, Any] = {key: getattr(zero, key) for key in ("stage", "prefetch_bytes", "resident_bytes")}
    offloads = any(place != "device" for place in zero.placements.values())
    step = _step(optimizer) if offloads and optimizer is not None else None
    mesh = options.get("mesh")
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    with only_trained(model, optimizer):
        planned = zero_offload.plan(
            model,
            **zero.placements,
            step=step,
            parameter_dtype=dtype,
            reduce_dtype=options.get("reduce_dtype"),
            shard_count=world if mesh is None else mesh.size(mesh.ndim - 1),
            replicas=1 if mesh is None or mesh.ndim == 1 else mesh.size(0),
            accumulate=accumulate,
            find_unused_parameters=options.get("find_unused_parameters", False),
            **gathering,
        )
    with ExitStack() as stack:
        store = None
        if offloads:
            slab = _slab(zero.nvme_paths, stack) if any("nvme" in place for place in zero.placements.values()) else None
            store = zero_offload.TieredStore(plan=planned, nvme=slab, step=step)
            stack.callback(store.close)
        made: Any = zero_core.shard(model, cast(Any, optimizer), param_dtype=dtype, store=store, **gathering, **options)
        stack.callback(made.close)
        kept = stack.pop_all()
    zero_core.handle(model).engine.leaving.append(kept.close)
    return Run(model, None if optimizer is None else made, planned, store, kept.close)


def _step(optimizer: torch.optim.Optimizer) -> Any:
    """Returns zero-optim-cpu's kernels where they are installed and know the optimizer, else torch's on the host."""
    with suppress(ImportError, TypeError, ValueError):
        return zero_offload.step_for(optimizer, importlib.import_module("zero_optim_cpu").CpuStep())
    try:
        return zero_offload.step_for(optimizer, zero_offload.TorchStep())
    except (TypeError, ValueError) as error:
        said = str(error).replace("pass to shard() what step() does:", "say by an attribute what step() does:")
        raise ConfigError(
            f"{type(optimizer).__name__} has no update on the host: {said}. Take AdamW or no offload"
        ) from error


def _slab(paths: tuple[str, ...], stack: ExitStack) -> Any:
    """Opens files in the folders. Makes them, and not the folders above them: without these no drive is mounted."""
    try:
        nvme = importlib.import_module("zero_nvme")
    except ImportError:
        raise ConfigError('"nvme" needs the package zero-nvme: install it, or write "cpu"') from None
    folders = [os.path.abspath(path.replace("{local_rank}", os.environ.get("LOCAL_RANK", "0"))) for path in paths]
    try:
        for folder in folders:
            with suppress(FileExistsError):  # from before, or another rank has just made it
                os.mkdir(folder)
        return stack.enter_context(nvme.Slab(folders))
    except OSError as error:
        said = str(error).replace("allow_memory=True", 'device "cpu"')
        how = "" if ";" in said else "; name a folder in an existing folder of a mounted drive"
        raise ConfigError(f"cannot write to the nvme_path {folders}: {said}{how}") from error
