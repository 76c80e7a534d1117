"""Assembles a run from the sibling packages: model, optimizer, slab, tiered store and sharded optimizer.

`draft` builds what needs no memory, for the plan. `assembled` allocates, and releases everything at its end. Owns no
loop and no data.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

import torch
from torch import nn

import zero_core
import zero_offload
from zero_core.comm.ranks import mesh_of_replicas
from zero_core.moe.expert_groups import find_stacks
from zero_core.optim.contracts import declare
from zero_train.data import tokens
from zero_train.declare import OPTIMIZERS
from zero_train.errors import ConfigError, told
from zero_train.model import causal_lm, dtypes
from zero_train.report.metrics import COUNTED, HELD
from zero_train.run import planning
from zero_train.run.ranks import Ranks, together
from zero_train.schema import Config
from zero_train.settings import extras, placement

_CLASSES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adam": torch.optim.Adam,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}
_FUSED = ("adamw", "adam", "sgd")  # torch has fused kernels of these on every device; of Adagrad on the CPU only


@dataclass(frozen=True)
class Draft:
    """A model without memory, the optimizer that a plain loop would have, and the kernels of its update."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Any | None  # zero_optim_cpu.CpuStep, bound; None: zero-core's device store runs the optimizer itself


@dataclass(frozen=True)
class Assembled:
    """A model that is ready to train, as the loop needs it."""

    model: nn.Module
    optimizer: Any  # zero_core.ShardedOptimizer
    store: Any | None  # zero_offload.TieredStore; None: zero-core's device store
    timeline: Any  # zero_offload.Timeline
    slab: Any  # zero_nvme.Slab; None: nothing is on nvme
    resident_bytes: int  # in zero-core's device store, by the plan
    remarks: list[str]  # sentences for the user: the slab's backend, and whether the arena has huge pages
    rows: int | None = None  # of a batch that a recomputing block takes at a time; None: all

    def usage(self) -> dict[str, Any]:
        """Returns the counters of the store since it was made (COUNTED), and the bytes that it holds now (HELD)."""
        if self.store is None:
            return dict.fromkeys((*COUNTED, *HELD), 0) | {"device_bytes": self.resident_bytes}
        stats = self.store.stats() | {"nvme_bytes": 0 if self.slab is None else self.slab.capacity_bytes}
        return {name: stats[name] for name in (*COUNTED, *HELD)}

    def wait(self) -> None:
        """Waits until the updates in the background are done."""
        if self.store is not None:
            self.store.wait()


def draft(
    config: Config, cores: Sequence[int] | None = None, *, on_gpu: bool = False, model: nn.Module | None = None
) -> Draft:
    """Makes the optimizer over `model` (None: the one that `config` names) and its update step, on `cores` if given.

    `on_gpu`: the device is a GPU, where the optimizer itself updates all that stays on it. On a CPU, device memory is
    host memory, so zero-optim-cpu, if it is installed, updates it as under offload=host.

    Raises:
        ConfigError: model sizes that do not fit together, or an optimizer or layout that the update cannot run.
    """
    model = model_of(config) if model is None else model
    by_kernels = config.offload.kind != "none" or (not on_gpu and find_spec("zero_optim_cpu") is not None)
    optimizer = make_optimizer(config, model, fused=not by_kernels)
    return Draft(model, optimizer, make_step(config, optimizer, cores) if by_kernels else None)


def model_of(config: Config) -> nn.Module:
    """Builds the model under `deferred_init`. Raises ConfigError for sizes that do not fit together."""
    torch.manual_seed(config.run.seed)
    by_tokenizer = config.task.kind != "pretrain" or tokens.folder_of(config) is not None
    with zero_core.deferred_init():
        as_bytes = None if by_tokenizer else config.data.as_bytes or config.run.dry
        model = causal_lm.build(config.model, config.data.sequence_length, as_bytes=as_bytes)
    weights = not config.run.dry or any(Path(str(config.model.path)).glob("*.safetensors"))
    if config.model.kind == "hf" and weights:  # a plan follows from config.json alone
        with told(f"model.path={config.model.path}: ", zero_core.ZeroError, OSError):
            zero_core.load_pretrained(model, str(config.model.path))  # each rank reads its slices once it is sharded
    return model


def make_step(config: Config, optimizer: torch.optim.Optimizer, cores: Sequence[int] | None = None) -> Any:
    """Returns a zero_optim_cpu.CpuStep bound to `optimizer`, whose threads stay on `cores` if given, see
    cpu_affinity.py.

    For optim=muon it is a zero_offload step around that one, which updates matrices with torch's threads.

    Raises:
        ConfigError: the CPU update does not know this optimizer or this layout.
    """
    zero_optim_cpu = extras.loaded("zero_optim_cpu")
    layout = config.precision.states
    if config.offload.kind == "none" and config.precision.parameters != "bf16":
        layout = "fp32"  # there is nothing to split; settings/checks.py refuses this when something is offloaded
    where: dict[str, Any] = {"threads": config.optim.threads} if cores is None else {"cores": cores}
    try:
        return zero_offload.step_for(optimizer, zero_optim_cpu.CpuStep(layout=layout, **where))
    except (TypeError, ValueError) as error:
        if config.optim.kind == "own" and config.offload.kind == "none":
            return None  # it runs on the device, as its own class does
        if config.optim.kind == "own":
            text = str(error).replace("pass to shard() what step() does: optimizer_", "say what step() does: optim.")
            text = planning.keyed(text.replace("without store=", "with offload=none"), config)
            raise ConfigError(f"optim.target={config.optim.target}: {text}") from error
        raise ConfigError(
            f"optim={config.optim.kind} with precision.states={config.precision.states} cannot run on the CPU: "
            f"{error}; change one of them"
        ) from error


def make_optimizer(config: Config, model: nn.Module, *, fused: bool = False) -> torch.optim.Optimizer:
    """Returns the optimizer that `config.optim` names. Vectors (norms, biases) are not decayed.

    `fused` asks for torch's fused kernels, which move a third of the bytes when the optimizer updates by itself.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if config.optim.kind == "muon":
        return _muon(config, model, parameters, fused=fused)
    if config.optim.kind == "own":
        return _own(config, parameters)
    return _elementwise(config, config.optim.kind, parameters, fused=fused)


def _muon(
    config: Config, model: nn.Module, parameters: Sequence[nn.Parameter], *, fused: bool
) -> torch.optim.Optimizer:
    """Returns Muon for the model's inner matrices and stacked experts, joined with AdamW for all other parameters."""
    optim = config.optim
    head = getattr(model, "get_output_embeddings", lambda: None)()
    outer = [module for module in model.modules() if isinstance(module, nn.Embedding) or module is head]
    apart = {id(p) for module in outer for p in module.parameters()}
    stacked = {id(p) for stack in find_stacks(model).values() for p in stack.parameters.values()}
    # A stack of experts has one dimension more: three for matrices, two for biases (a vector for each expert).
    # Other tensors of three dimensions are no matrices.
    matrices = [p for p in parameters if p.dim() == 2 + (id(p) in stacked) and id(p) not in apart]
    muon: torch.optim.Optimizer = zero_core.Muon(
        matrices,
        lr=optim.matrix_lr,
        weight_decay=optim.weight_decay,
        momentum=optim.momentum,
        adjust_lr_fn=optim.adjust_lr,
        orthogonal=optim.orthogonal,
    )
    inside = {id(p) for p in matrices}
    others = [p for p in parameters if id(p) not in inside]
    return zero_core.JointOptimizer(muon, _elementwise(config, "adamw", others, fused=fused)) if others else muon


def _own(config: Config, parameters: Sequence[nn.Parameter]) -> torch.optim.Optimizer:
    """Returns the optimizer of the user's class. Raises ConfigError for no class, or arguments that it refuses."""
    optim = config.optim
    kind = extras.named("optim.target", str(optim.target), "class")
    taken = _arguments(kind)
    decays = "weight_decay" in taken
    if optim.weight_decay and not decays:
        raise ConfigError(f"optim.target={optim.target} takes no weight_decay: set optim.weight_decay=0")
    groups: Any = _groups(config, parameters) if decays else parameters
    if unknown := ", ".join(optim.options.keys() - taken):
        raise ConfigError(f"optim.target={optim.target} names no argument {unknown}: remove it from optim.options")
    said = f"optim.target={optim.target} with lr={optim.lr:g} and optim.options={dict(optim.options)}: "
    with told(said, ValueError, TypeError, way_out="; give arguments that it takes"):
        optimizer: torch.optim.Optimizer = kind(groups, lr=optim.lr, **optim.options)
    declare(optimizer, optim.contract)
    return optimizer


def _arguments(kind: Any) -> set[str]:
    """Returns the arguments that the class names. Those of a base class count if `**kwargs` leads to it.

    Other options would end in `**kwargs`: pytorch_optimizer's classes take a misspelt one, and do not read it.
    """
    names: set[str] = set()
    for each in getattr(kind, "__mro__", [kind]):
        arguments = inspect.signature(each).parameters
        names.update(arguments)
        if all(argument.kind is not argument.VAR_KEYWORD for argument in arguments.values()):
            break
    return names


def _groups(config: Config, parameters: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Returns the groups of matrices, which are decayed, and of vectors, which are not."""
    matrices, vectors = [p for p in parameters if p.dim() > 1], [p for p in parameters if p.dim() <= 1]
    decays = ((matrices, config.optim.weight_decay), (vectors, 0.0))
    return [{"params": params, "weight_decay": decay} for params, decay in decays if params]


def _elementwise(
    config: Config, kind: str, parameters: Sequence[nn.Parameter], *, fused: bool
) -> torch.optim.Optimizer:
    optim = config.optim
    options: dict[str, Any] = {key: getattr(optim, key) for key in OPTIMIZERS[kind]}
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    if fused and kind in _FUSED:
        options["fused"] = True
    made = _CLASSES.get(kind) or extras.loaded("zero_optim_cpu").Lion.over  # torch has no Lion
    return cast(torch.optim.Optimizer, made(_groups(config, parameters), lr=optim.lr, **options))


@contextmanager
def assembled(
    draft: Draft, plan: zero_offload.Plan, config: Config, ranks: Ranks, *, clips: bool = True, steady: bool = True
) -> Iterator[Assembled]:
    """Allocates the planned memory and shards the model. Releases everything at the end, also after an error.

    clips: step() clips by optim.max_grad_norm; False: the caller does, with torch's clip_grad_norm_.
    steady: all batches have one shape, so freed memory is kept for the next. With many shapes it would only grow.

    Raises:
        ConfigError: the slab cannot be made, a unit cannot follow offload.activations, or a tier turned out too small.
    """
    dtype, scale = dtypes.DTYPES[config.precision.parameters], config.precision.loss_scale
    with ExitStack() as stack:
        paths = placement.nvme_paths(config, ranks.local_rank)
        durable = config.run.durable is not None
        name = zero_offload.slab_name(config.run.dir, ranks.rank) if durable else None
        uses_nvme = plan.total("nvme") or durable  # under offload=auto ranks may have different plans
        slab = together(ranks, lambda: make_slab(config, paths, stack, name) if uses_nvme else None)
        try:
            store = make_store(config, draft, plan, slab, make_tiers(config, plan, ranks, stack))
            if store is not None:
                stack.callback(store.close)
            timeline = zero_offload.Timeline(rank=ranks.rank) if store is None else store.timeline
            optimizer = zero_core.shard(
                draft.model,
                draft.optimizer,
                mesh=None if config.zero.replicas == 1 else mesh_of_replicas(config.zero.replicas),
                param_dtype=None if dtype == torch.float32 else dtype,
                loss_scale=zero_core.LossScale(**scale) if isinstance(scale, dict) else scale,
                max_grad_norm=config.optim.max_grad_norm if clips else None,
                store=store,
                observer=timeline,
                device=ranks.device,
                **planning.shared_options(config),
            )
            stack.callback(optimizer.close)
            if config.offload.activations is not None:
                parts: dict[str, Any] = {"rows": plan.rows, "tokens": plan.tokens_at_once}
                for name in ("row_modules", "token_modules"):
                    parts[name] = getattr(config.offload, name)
                stack.enter_context(zero_offload.offload_activations(draft.model, store, plan, **parts))
        except (OSError, MemoryError, ValueError, TypeError) as error:
            raise ConfigError(planning.refusal(error, config)) from error
        if ranks.device.type == "cpu" and steady:
            zero_core.keep_freed_memory()
        resident = plan.total("device") + (plan.total("host") if store is None else 0)
        remarks = []
        if slab is not None:
            reason = f" ({slab.reason})" if slab.reason else ""
            remarks.append(f"nvme: {slab.backend}{reason}, in {', '.join(map(str, paths))}")
        if store is not None and (pages := store.stats()["huge_pages"]) != "ok":
            remarks.append(f"no huge pages for the arena ({pages}): direct I/O is slower")
        yield Assembled(draft.model, optimizer, store, timeline, slab, resident, remarks, plan.rows)


def make_store(
    config: Config, draft: Draft, plan: zero_offload.Plan, slab: Any | None, tiers: Mapping[str, Any] | None = None
) -> Any | None:
    """Returns the planned zero_offload.TieredStore, or None if all states stay on the device, which needs none."""
    if draft.step is None or not plan.needs_store:
        return None
    return zero_offload.TieredStore(
        plan=plan,
        nvme=slab,
        tiers=tiers,
        step=draft.step,
        host_bytes=config.offload.host_bytes,
        overlap=config.offload.overlap,
        durable=True if config.run.durable == "power" else config.run.durable or False,
    )


def make_tiers(config: Config, plan: zero_offload.Plan, ranks: Ranks, stack: ExitStack) -> dict[str, Any]:
    """Returns the ByteStore of each of offload.tiers that the plan uses. `stack` closes them.

    Raises:
        ConfigError: a class does not exist, or refuses its arguments.
    """
    found = {}
    for name, given in config.offload.tiers.items():
        if plan.total(name):
            arguments = {
                key: value.replace("{local_rank}", str(ranks.local_rank)) if isinstance(value, str) else value
                for key, value in given.items()
                if key != "_target_"
            }
            kinds = (ImportError, AttributeError, OSError, ValueError, TypeError)
            with told(f"offload.tiers.{name}: ", *kinds, way_out=f"; change offload.tiers.{name}"):
                found[name] = resolve_name(str(given["_target_"]))(**arguments)
            stack.callback(found[name].close)
    return found


def make_slab(config: Config, paths: Sequence[Path], stack: ExitStack, name: str | None = None) -> Any:
    """Returns a zero_nvme.Slab over `paths`, which `stack` closes. Raises ConfigError with the reason and the keys.

    With a name its files stay on disk after closing.
    """
    zero_nvme = extras.loaded("zero_nvme")
    names = [str(path) for path in paths]
    try:
        io = config.io
        return stack.enter_context(zero_nvme.Slab(names, backend=io.backend, allow_memory=io.allow_memory, name=name))
    except (OSError, ValueError, RuntimeError) as error:
        reason = planning.keyed(str(error), config)
        asked = isinstance(error, zero_nvme.BackendUnavailable) and config.io.backend != "auto"
        raise ConfigError(
            f"cannot use offload.nvme_paths={names}: {reason}; change {'io.backend' if asked else 'offload.nvme_paths'}"
        ) from error
