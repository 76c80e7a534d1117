"""Shards a model and its optimizer as a `ZeroConfig` says. Owns the slab and the store until they are closed."""

from __future__ import annotations

import errno
import importlib
import os
import warnings
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

import zero_core
import zero_offload
from zero_core.comm.ranks import mesh_of_replicas
from zero_core.errors import ZeroError
from zero_core.optim.contracts import declare
from zero_core.optim.optimizer import ShardedOptimizer
from zero_core.optim.state_names import kept_states
from zero_core.tensors.inner_tensors import check_initialised
from zero_offload.planning.hardware import bytes_shown
from zero_offload.planning.model_sizes import only_trained

from .config import ConfigError, ZeroConfig

IN_A_TRAINER = (
    'In a Trainer, optimizer_contract is a setting of zero=. Or write optim="adamw_torch", "sgd" or "adagrad", which '
    "run on every tier, or pass optimizers=(zero_optim_cpu.Lion(model.parameters(), lr=1e-4), None)"
)


@dataclass
class Run:
    """A sharded model: its optimizer (None: it is not trained), store and plan (None: all stays on the device)."""

    model: nn.Module
    optimizer: ShardedOptimizer | None
    config: ZeroConfig
    store: zero_offload.TieredStore | None
    plan: zero_offload.Plan
    _ending: ExitStack
    activations: zero_offload.Activations | None = None  # None: blocks keep theirs
    slab: Any = None  # zero_nvme.Slab; None: nothing is on nvme
    _closed: bool = False
    _left: bool = False  # the model is in other shards by now, or plain

    def describe(self) -> str:
        """Returns the plan as text to print: GiB of this rank on each tier, and a step's traffic to and from NVMe."""
        text = describe(self.model, self.config, self.plan, zero_core.handle(self.model).ranks.size)
        if self.slab is not None and self.slab.name is not None:
            more, copied = self.plan.durable_bytes, self.plan.store.copied_bytes
            also = f", and {bytes_shown(copied)} that lie in memory are written each time" if copied else ""
            text += f"\neach step stays on disk, in {bytes_shown(more)} more{also} (durable: {self.config.durable})"
        if self.activations is None:
            return text
        given = [(name, getattr(self.config, name)) for name in ("rows", "tokens")]
        told = ", ".join(f"{name}: {value}" for name, value in given if value is not None)
        parts = f" and compute their batch in parts ({told})" if told else ""
        return f"{text}\nblocks keep their inputs for backward ({self.config.activations}){parts}; not counted here"

    def close(self) -> None:
        """Finishes updates and transfers, and frees all memory and files. The model cannot be used after."""
        self._closed = True
        self._ending.close()

    def end(self) -> bool:
        """Frees memory and files, and makes the model a plain one. Collective.

        Returns True too if the model has moved to other shards, or is plain already. Returns False, with a warning, if
        the whole model does not fit or cannot be assembled, as after `close`. The model cannot be used after that.
        """
        if self._left:
            return True
        try:
            if self._closed:
                raise ZeroError("run.end() came after run.close(), which freed the parameters: call run.end() first")
            if self.optimizer is not None:
                self.optimizer.zero_grad()
            zero_core.unshard(self.model)
        except Exception as error:
            kind = type(self.model).__name__
            warnings.warn(f"the {kind} cannot be made plain, and cannot be used any more: {error}", stacklevel=3)
            self.close()
            return False
        return True

    def _leave(self) -> None:
        self._left = True
        self.close()


def shard(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: ZeroConfig,
    *,
    accumulate: int = 1,
    hardware: zero_offload.Hardware | None = None,
    slab_name: str | None = None,
    **options: Any,
) -> Run:
    """Shards `model` in place. accumulate: micro-batches of a step. Collective.

    A model that is sharded moves to new shards unit by unit, as zero_core.shard says, and its earlier run ends.

    slab_name: names the files in which `config.durable` keeps each step. It differs on each rank. zero_core.resume
    says how such a run continues.
    options: further options of zero_core.shard, such as device, max_grad_norm, loss_scale, reduce_dtype and mesh.

    Raises:
        ConfigError: a package that the tiers need is missing, the optimizer has no update on the host, param_dtype is
            fp16 without a loss_scale, or `config` is durable and there is no slab_name.
        zero_core.errors.AlreadyShardedError: `model` is a part of a sharded model, or contains parts of several, or its
            run is closed.
        zero_core.errors.UnsupportedOptimizerError: the optimizer cannot run over slices of parameters.
        zero_offload.PlanError: a tier of `hardware` is too small.
        zero_offload.ActivationError: a block recomputes itself (gradient_checkpointing), and `config.activations` too.
    """
    check_initialised(model)
    _refuse(config, optimizer, slab_name, options)
    world = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
    if config.replicas > 1:
        options["mesh"] = mesh_of_replicas(config.replicas)
    mesh = options.get("mesh")
    with ExitStack() as stack:
        with only_trained(model, optimizer):
            planned, step = plan(
                model,
                optimizer,
                config,
                ranks=world if mesh is None else mesh.size(mesh.ndim - 1),
                replicas=1 if mesh is None or mesh.ndim == 1 else mesh.size(0),
                accumulate=accumulate,
                hardware=hardware,
                reduce_dtype=options.get("reduce_dtype"),
                find_unused_parameters=options.get("find_unused_parameters", False),
            )
        slab = store = None
        durable = config.durable is not None and optimizer is not None and slab_name is not None
        if config.offloads:
            if config.on_nvme or durable:  # also where the plan has no bytes there
                slab = slab_of(config, stack, slab_name if durable else None)
            store = zero_offload.TieredStore(
                plan=planned,
                nvme=slab,
                step=step,
                host_bytes=config.host_bytes,
                overlap=config.overlap,
                durable="process" if durable and config.durable == "process" else durable,
            )
            stack.callback(store.close)
        own = {"param_dtype": _dtype(config), "store": store, **_gathering(config)}
        made: Any = zero_core.shard(model, cast(Any, optimizer), **own, **options)
        stack.callback(made.close)
        activations = None
        if optimizer is not None and config.activations != "keep":
            parts = {name: getattr(config, name) for name in ("rows", "tokens", "row_modules", "token_modules")}
            activations = zero_offload.offload_activations(model, store, config.activations, **parts)
            stack.callback(activations.close)
        kept = stack.pop_all()
    run = Run(model, None if optimizer is None else made, config, store, planned, kept, activations, slab)
    zero_core.handle(model).engine.leaving.append(run._leave)
    return run


def _refuse(
    config: ZeroConfig, optimizer: torch.optim.Optimizer | None, slab_name: str | None, options: dict[str, Any]
) -> None:
    """Raises ConfigError for arguments of `shard` that do not go together."""
    if config.param_dtype == "fp16" and options.get("loss_scale") is None:
        raise ConfigError(
            'param_dtype: fp16 without a loss scale loses small gradients: pass loss_scale="dynamic" to zero_hf.shard, '
            "and call run.optimizer.scale_loss(loss).backward(). In a Trainer or Accelerator, write param_dtype: bf16"
        )
    if config.durable is not None and optimizer is not None and slab_name is None:
        raise ConfigError(
            f"durable={config.durable!r} needs the name of the run's slab, which a Trainer knows. In a loop of "
            "your own, pass slab_name= to zero_hf.shard, too, and then call zero_core.resume. Or leave durable out"
        )
    if config.replicas > 1 and options.get("mesh") is not None:
        raise ConfigError(f"mesh= and replicas={config.replicas} both set which ranks share shards: leave one out")


def plan(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    config: ZeroConfig,
    *,
    ranks: int,
    hardware: zero_offload.Hardware | None = None,
    **options: Any,
) -> tuple[zero_offload.Plan, Any]:
    """Returns the plan of each of `ranks` ranks, and the update that it assumes. Allocates nothing.

    Whatever requires a gradient in `model`, which may be on the meta device, counts as trained.

    options: further ones of zero_offload.plan, such as replicas (groups that each have as many ranks) and accumulate.

    Raises:
        ConfigError, zero_offload.PlanError: as shard.
    """
    step = step_of(optimizer, config)
    own = _gathering(config)
    if config.secondary_shards and hardware is None:
        local = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE")  # of torchrun, of SLURM
        own["secondary_shards"] = int(local or ranks)
    found = zero_offload.plan(
        model,
        hardware,
        **cast(dict[str, Any], config.placements),
        step=step,
        parameter_dtype=_dtype(config),
        shard_count=ranks,
        tile_numel=config.tile_numel,
        slots=config.slots,
        host_bytes=config.host_bytes,
        **own,
        **options,
    )
    return found, step


def describe(model: nn.Module, config: ZeroConfig, plan: zero_offload.Plan, ranks: int) -> str:
    """Returns a plan as text to print: GiB or MiB of a rank on each tier, and a step's traffic to and from NVMe."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    count = f"{numel / 1e6:,.1f} M" if numel >= 1e6 else f"{numel:,}"
    lines = [
        f"zero_hf: {type(model).__name__} of {count} parameters at stage {config.stage} on "
        f"{ranks} rank{'s' if ranks > 1 else ''}"
        + (f" in {config.replicas} groups" if config.replicas > 1 else "")
        + (", of each:" if ranks > 1 else ""),
        *plan.lines(),
    ]
    if plan.total("nvme"):
        each = (plan.read_bytes_per_step, plan.write_bytes_per_step)
        moved = [bytes_shown(nbytes) for nbytes in each]
        where = ", ".join(_paths(config))
        lines.append(f"each step reads {moved[0]} from NVMe and writes {moved[1]}, in {where}")
    if plan.slots_told is not None:
        lines.append(f"slots {plan.slots_told}")
    return "\n".join(lines)


def _dtype(config: ZeroConfig) -> torch.dtype | None:
    return None if config.param_dtype is None else {"bf16": torch.bfloat16, "fp16": torch.float16}[config.param_dtype]


def _gathering(config: ZeroConfig) -> dict[str, Any]:
    names = ("stage", "prefetch_bytes", "resident_bytes", "expert_bytes", "secondary_shards")
    return {name: getattr(config, name) for name in names}


def step_of(optimizer: torch.optim.Optimizer | None, config: ZeroConfig) -> Any:
    """Returns zero-optim-cpu's kernels if they are installed and support the optimizer, else torch's step on the host.

    None: neither supports it, so it runs on the device, where its states are.
    """
    if optimizer is None:
        return None
    declare(optimizer, config.optimizer_contract)
    try:
        kernels = importlib.import_module("zero_optim_cpu").CpuStep(layout=config.states)
        return zero_offload.step_for(optimizer, kernels, by_itself=config.offloads)
    except ImportError:
        reason = "zero-optim-cpu is not installed"
    except (TypeError, ValueError) as error:
        reason = str(error)
    if config.states != "fp32":
        raise ConfigError(f"states={config.states!r} needs a kernel of zero-optim-cpu: {reason}. Write states: fp32")
    try:
        return zero_offload.step_for(optimizer, zero_offload.TorchStep(), by_itself=config.offloads)
    except (TypeError, ValueError) as error:
        reason = str(error).replace("without store=", "with offload: none").replace("to shard()", "to ZeroConfig")
    if config.offloads:
        kept_states(optimizer, torch.device("cpu"))  # raises for one that does not run on the device either
        raise ConfigError(f"{type(optimizer).__name__} has no update on the host: {reason}. {IN_A_TRAINER}")
    return None


def there(config: ZeroConfig, name: str, local_rank: int) -> bool:
    """Whether nvme_paths of local rank `local_rank` have files of a slab of this name."""
    return all(os.path.exists(os.path.join(path, f"{name}.slab")) for path in _paths(config, local_rank))


def slab_of(config: ZeroConfig, stack: ExitStack, name: str | None, local_rank: int | None = None) -> Any:
    """Opens the slab in nvme_paths, which `stack` closes. local_rank: None means that of this process.

    Raises ConfigError naming the folders.
    """
    paths = _paths(config, local_rank)
    try:
        nvme = importlib.import_module("zero_nvme")
    except ImportError:
        raise ConfigError('"nvme" needs the package zero-nvme: install it, or write offload: host') from None
    made: list[str] = []
    try:
        for path in paths:
            with suppress(FileExistsError):  # from before, or another rank of this machine has just made it
                os.mkdir(path)  # not the folders above it: where they are missing, the drive is not mounted
                made.append(path)
        return stack.enter_context(nvme.Slab(paths, name=name))
    except OSError as error:
        for path in made:
            with suppress(OSError):  # another rank has files in it
                os.rmdir(path)
        if error.errno == errno.EBUSY and name is not None:
            raise ConfigError(
                f"{str(error).partition(';')[0]}. Give this run another output_dir, which names the slab, or "
                "slab_name=. Or end the run that uses it: call end() of its Trainer, or close() of its run"
            ) from error
        said = str(error).replace("allow_memory=True", "offload: host")
        how = "" if ";" in said else "; name a folder in an existing folder of a mounted drive"
        raise ConfigError(f"cannot write to nvme_paths={paths}: {said}{how}") from error


def _paths(config: ZeroConfig, local_rank: int | None = None) -> list[str]:
    number = os.environ.get("LOCAL_RANK", "0") if local_rank is None else str(local_rank)
    return [os.path.abspath(path.replace("{local_rank}", number)) for path in config.nvme_paths]
