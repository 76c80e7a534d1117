"""Puts the siblings together: model, optimizer, slab, tiered store, sharded optimizer; and takes them apart again.

`draft` builds what needs no memory, for the plan; `assembled` allocates. Owns no loop and no data.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_core
import zero_offload
from zero_train import checks, formats, models, planning
from zero_train.errors import ConfigError
from zero_train.ranks import Ranks
from zero_train.schema import Config


@dataclass(frozen=True)
class Draft:
    """A model without memory, the optimizer that a plain loop would have, and the arithmetic of its update."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Any | None  # zero_optim_cpu.CpuStep, bound; None: zero-core's device store runs the optimizer itself


@dataclass(frozen=True)
class Usage:
    """Counters of a store since it was made, and what it holds now."""

    exposed_seconds: float = 0.0
    nvme_read_bytes: int = 0
    nvme_write_bytes: int = 0
    host_bytes: int = 0
    device_bytes: int = 0


@dataclass(frozen=True)
class Engine:
    """A model that trains: what the loop needs, and no more."""

    model: nn.Module
    optimizer: Any  # zero_core.ShardedOptimizer
    store: Any | None  # zero_offload.TieredStore; None: zero-core's device store
    timeline: Any  # zero_offload.Timeline
    backend: str  # of the slab and why it was chosen; empty: no slab
    resident_bytes: int  # what the device store holds, by the plan

    @property
    def huge_pages(self) -> str:
        """Whether the arena of the store has them: "ok", or why not."""
        return "ok" if self.store is None else str(self.store.stats()["huge_pages"])

    def usage(self) -> Usage:
        """The counters at this moment."""
        if self.store is None:
            return Usage(device_bytes=self.resident_bytes)
        stats = self.store.stats()
        return Usage(**{name: stats[name] for name in Usage.__dataclass_fields__})

    def settle(self) -> None:
        """Returns when updates in the background are done."""
        if self.store is not None:
            self.store.wait()


def draft(config: Config, cores: Sequence[int] | None = None, *, on_gpu: bool = False) -> Draft:
    """The model under `deferred_init`, the optimizer over it, and the bound update step, on `cores` where given.

    `on_gpu`: what stays on the device is on a GPU, where the optimizer updates it. On a CPU it is in host memory, so
    offload=none is updated as offload=host is, by zero-optim-cpu where that is installed.

    Raises:
        ConfigError: sizes that do not fit together, or an optimizer or layout that the update cannot run.
    """
    torch.manual_seed(config.run.seed)
    with zero_core.deferred_init():
        model = models.build(
            config.model,
            config.data.sequence_length,
            config.offload.activations is None,
            as_bytes=config.data.as_bytes,
        )
    if config.model.kind == "hf":
        _pretrained(model, config.model.path)
    by_kernels = config.offload.kind != "none" or (not on_gpu and find_spec("zero_optim_cpu") is not None)
    optimizer = make_optimizer(config, model, fused=not by_kernels)
    return Draft(model, optimizer, make_step(config, optimizer, cores) if by_kernels else None)


def make_step(config: Config, optimizer: torch.optim.Optimizer, cores: Sequence[int] | None = None) -> Any:
    """zero_optim_cpu.CpuStep, bound. Raises ConfigError for an optimizer or a layout that it does not know.

    `cores`: the CPUs that its threads stay on, see threads.py; None: optim.threads of them, anywhere.
    """
    zero_optim_cpu = checks.sibling("zero_optim_cpu")
    layout = config.precision.states
    if config.offload.kind == "none" and config.precision.parameters != "bf16":
        layout = "fp32"  # there is nothing to split: checks.py refuses it where something is offloaded
    where: dict[str, Any] = {"threads": config.optim.threads} if cores is None else {"cores": cores}
    try:
        step = zero_optim_cpu.CpuStep(layout=layout, **where)
        step.bind(optimizer)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"optim={config.optim.kind} with precision.states={config.precision.states} cannot run on the CPU: "
            f"{error}; change one of them"
        ) from error
    return step


def _pretrained(model: nn.Module, folder: str | None) -> None:
    """Notes where the weights are; each rank reads its own slices when the model is sharded."""
    try:
        zero_core.load_pretrained(model, str(folder))
    except (zero_core.ZeroError, OSError) as error:
        raise ConfigError(f"model.path={folder}: {error}") from error


def make_optimizer(config: Config, model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """The stock optimizer that `config.optim` names; vectors (norms, biases) are not decayed.

    `fused`: it will run itself, and torch's fused kernels move a third of the bytes.
    """
    optim = config.optim
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() > 1]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() <= 1]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": optim.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    betas = (optim.betas[0], optim.betas[1])
    run: dict[str, Any] = {"fused": True} if fused else {}  # Adagrad has no fused kernel on a GPU
    if optim.kind == "adamw":
        return torch.optim.AdamW(groups, lr=optim.lr, betas=betas, eps=optim.eps, **run)
    if optim.kind == "adam":
        return torch.optim.Adam(groups, lr=optim.lr, betas=betas, eps=optim.eps, **run)
    if optim.kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=optim.lr, eps=optim.eps)
    if optim.kind == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum, **run)
    return _lion(groups, lr=optim.lr, betas=betas)


def _lion(groups: Sequence[dict[str, Any]], **options: Any) -> torch.optim.Optimizer:
    """torch has none; zero-optim-cpu's takes CPU tensors only, so it is built over stand-ins for deferred ones."""
    stand_ins = [{**group, "params": [torch.zeros(1, requires_grad=True)]} for group in groups]
    lion: torch.optim.Optimizer = checks.sibling("zero_optim_cpu").Lion(stand_ins, **options)
    for made, group in zip(lion.param_groups, groups, strict=True):
        made["params"] = group["params"]
    return lion


@contextmanager
def assembled(draft: Draft, plan: zero_offload.Plan, config: Config, ranks: Ranks) -> Iterator[Engine]:
    """Allocates what the plan says and shards the model. Everything is given back at the end, whatever happened.

    Raises:
        ConfigError: the slab cannot be made, with its path, or a budget that only the allocation found too small.
    """
    with ExitStack() as stack:
        slab = make_slab(config, checks.nvme_paths(config, ranks.local_rank), stack) if plan.total("nvme") else None
        store = None
        try:
            store = make_store(config, draft, plan, slab)
            timeline = zero_offload.Timeline(rank=ranks.rank) if store is None else store.timeline
            optimizer = zero_core.shard(
                draft.model, draft.optimizer, store=store, observer=timeline, device=ranks.device, **_options(config)
            )
        except (OSError, MemoryError, ValueError, TypeError) as error:
            if store is not None:
                store.close()
            raise ConfigError(planning.refusal(str(error))) from error
        stack.callback(optimizer.close)
        if config.offload.activations is not None:
            stack.enter_context(_with_policies(draft.model, store, plan))
        if ranks.device.type == "cpu":
            zero_core.keep_freed_memory()
        backend = "" if slab is None else f"{slab.backend} ({slab.reason})" if slab.reason else slab.backend
        resident = plan.total("device") + (plan.total("host") if store is None else 0)
        yield Engine(draft.model, optimizer, store, timeline, backend, resident)


def make_store(config: Config, draft: Draft, plan: zero_offload.Plan, slab: Any | None) -> Any | None:
    """zero_offload.TieredStore as planned; None where the plan leaves everything on the device, which needs none."""
    if draft.step is None or not plan.needs_store:
        return None
    return zero_offload.TieredStore(
        plan=plan, nvme=slab, step=draft.step, host_bytes=config.offload.host_bytes, overlap=config.offload.overlap
    )


def _with_policies(model: nn.Module, store: Any | None, plan: zero_offload.Plan) -> zero_offload.Activations:
    """What each block keeps for its backward, as planned. Raises ConfigError for a unit that cannot follow."""
    try:
        return zero_offload.offload_activations(model, store, plan)
    except zero_offload.ActivationError as error:
        raise ConfigError(f"{error}; change offload.activations") from error


def make_slab(config: Config, paths: Sequence[Path], stack: ExitStack) -> Any:
    """zero_nvme.Slab over `paths`, closed by `stack`. Raises ConfigError with the reason and the keys."""
    zero_nvme = checks.sibling("zero_nvme")
    names = [str(path) for path in paths]
    try:
        slab = zero_nvme.Slab(names, backend=config.io.backend, allow_memory=config.io.allow_memory)
        return stack.enter_context(slab)
    except (OSError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"no slab on offload.nvme_paths={names} with io.backend={config.io.backend}: {error}"
        ) from error


def _options(config: Config) -> dict[str, Any]:
    """The keywords of zero_core.shard; what is left null keeps its default."""
    dtype = formats.DTYPES[config.precision.parameters]
    options = {
        "stage": config.zero.stage,
        "param_dtype": None if dtype == torch.float32 else dtype,
        "reduce_dtype": formats.reduce_dtype(config),
        "loss_scale": config.precision.loss_scale,
        "max_grad_norm": config.optim.max_grad_norm,
        "resident_bytes": config.zero.resident_bytes,
        "prefetch_bytes": config.zero.prefetch_bytes,
        "update_in_backward": config.zero.update_in_backward,
    }
    known = inspect.signature(zero_core.shard).parameters
    for name in [name for name, value in options.items() if name not in known and value]:
        raise ConfigError(f"this zero-core's shard has no {name}; leave that key out, or install a newer zero-core")
    return {name: value for name, value in options.items() if value is not None and name in known}
