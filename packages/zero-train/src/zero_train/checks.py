"""What can be said about a configuration before anything is built: values, paths, missing packages.

Every check raises ConfigError with the key to change. Memory is the planner's: see planning.py. Nothing stays behind:
the file that tries a folder is deleted at once.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError, choices
from zero_train.schema import Config

TIERS = ("device", "host", "nvme")
STATE_KINDS = ("parameters", "gradients", "optimizer")
ACTIVATIONS = ("keep", "recompute", "host", "nvme")
FORMATS = ("auto", "fp32", "bf16", "fp16")
LAYOUTS = ("auto", "split", "fp32", "split_bf16m", "split_8bit")
BACKENDS = ("auto", "io_uring", "libaio", "threads", "aiofiles")
OPTIMIZERS = ("adamw", "adam", "lion", "adagrad", "sgd")
EXTRAS = {"zero_nvme": "nvme", "zero_optim_cpu": "cpu", "transformers": "hf"}

# f_type of statfs(2) where the filesystem is memory.
_MEMORY_FILESYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs", 0x958458F6: "hugetlbfs"}


def values(config: Config) -> None:
    """Ranges and names that types alone do not say, and combinations that exclude each other.

    Raises:
        ConfigError: the first one that does not hold.
    """
    _counts(config)
    for key, value in (("run.dir", config.run.dir), ("run.resume", config.run.resume)):
        if value is not None and not value.strip():  # of a shell's variable that is not set, say
            raise ConfigError(f"{key} is empty; name a folder with {key}=…, or leave {key} out")
    if config.zero.stage not in range(4):
        raise choices("zero.stage", config.zero.stage, range(4))
    _named("optim", config.optim.kind, OPTIMIZERS)
    _named("io.backend", config.io.backend, BACKENDS)
    if config.hardware.device is not None:
        _device(config.hardware.device)
    _named("offload", config.offload.kind, ("none", "placed", "auto"))
    _named("precision.parameters", config.precision.parameters, FORMATS)
    if config.precision.reduce is not None:
        _named("precision.reduce", config.precision.reduce, FORMATS[1:])
    _named("precision.states", config.precision.states, LAYOUTS)
    for kind in STATE_KINDS:
        _placement(f"offload.{kind}", getattr(config.offload, kind))
    _activations(config)
    if config.precision.states.startswith("split") and config.precision.parameters in ("fp32", "fp16"):
        if config.offload.kind != "none":
            raise ConfigError(
                f"precision.states={config.precision.states} splits the master into bf16 and a remainder, but "
                f"precision.parameters={config.precision.parameters}; set precision.states=fp32 or precision=bf16"
            )
    if config.zero.update_in_backward and config.optim.max_grad_norm is not None:
        raise ConfigError(
            f"zero.update_in_backward=true cannot clip, but optim.max_grad_norm={config.optim.max_grad_norm}; "
            "set optim.max_grad_norm=null or zero.update_in_backward=false"
        )
    if config.zero.update_in_backward and config.run.accumulate > 1:
        raise ConfigError(
            f"zero.update_in_backward=true updates a unit in its one backward of a step, but run.accumulate="
            f"{config.run.accumulate}; set run.accumulate=1 or zero.update_in_backward=false"
        )
    if config.zero.stage == 1 and config.zero.no_sync is False:
        raise ConfigError(
            "zero.no_sync=false, but zero.stage=1 keeps whole gradients until the step in any case; leave the key out, "
            "or choose zero.stage=2, which reduces every micro-batch"
        )
    if len(config.optim.betas) != 2 or not all(0 <= beta < 1 for beta in config.optim.betas):
        raise ConfigError(f"optim.betas={list(config.optim.betas)} are two numbers from 0 up to, not including, 1")


def packages(config: Config) -> None:
    """Are the siblings installed that this run uses? Raises ConfigError with the extra to install."""
    needed = ["transformers"]
    if config.offload.kind != "none" or config.optim.kind == "lion":
        needed.append("zero_optim_cpu")
    if uses_nvme(config):
        needed.append("zero_nvme")
    for module in needed:
        if importlib.util.find_spec(module) is None:
            reason = {
                "zero_nvme": "offload=nvme",
                "zero_optim_cpu": f"offload={'nvme' if uses_nvme(config) else 'host'}",
            }
            raise ConfigError(
                f"{reason.get(module, 'model=' + config.model.kind)} needs {module.replace('_', '-')}, which is not "
                f"installed; pip install 'zero-train[{EXTRAS[module]}]', or choose "
                f"{'offload=none' if module != 'zero_nvme' else 'offload=host'}"
            )


def sibling(module: str) -> Any:
    """The package, imported. Raises ConfigError where it is there but does not load: built for another Python, say."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{module.replace('_', '-')} is installed but does not load ({error}); reinstall it with "
            f"pip install --force-reinstall 'zero-train[{EXTRAS[module]}]', or choose offload=none"
        ) from error


def uses_nvme(config: Config) -> bool:
    """Whether any tile may lie on nvme. Under offload=auto: where paths are given, or a disk is there."""
    if config.offload.kind == "auto":
        return not auto_without_nvme(config)
    states = any(on(getattr(config.offload, kind), "nvme") for kind in STATE_KINDS)
    return config.offload.kind == "placed" and (states or "nvme" in activations(config))


def auto_without_nvme(config: Config) -> str:
    """Why offload=auto plans without nvme; empty where it may use one."""
    if config.offload.kind != "auto" or config.offload.nvme_paths:
        return ""
    if importlib.util.find_spec("zero_nvme") is None:
        return "zero-nvme is not installed"
    folder = existing(nvme_paths(config, 0)[0])
    memory = memory_filesystem(folder)
    return f"{folder} is in memory ({memory})" if memory else ""


def activations(config: Config) -> tuple[str, ...]:
    """The policies that offload.activations names, each once; what model.checkpointing comes to where it names none."""
    given = config.offload.activations
    if given is None:
        return ("recompute" if config.model.checkpointing else "keep",)
    return (given,) if isinstance(given, str) else tuple(dict.fromkeys(given))


def on(placement: Any, tier: str) -> bool:
    """Whether a placement (a tier, or fractions) puts anything on `tier`."""
    return placement.get(tier, 0) > 0 if isinstance(placement, Mapping) else placement == tier


def nvme_paths(config: Config, local_rank: int) -> list[Path]:
    """The folders of this rank's slab, `{local_rank}` filled in. Empty in the configuration: the run folder."""
    given = config.offload.nvme_paths
    texts = [given] if isinstance(given, str) else [str(path) for path in given or [config.run.dir]]
    return [Path(text.replace("{local_rank}", str(local_rank))) for text in texts]


def nvme(config: Config, local_rank: int) -> None:
    """Tries every folder of the slab: there, a disk, and writable.

    Raises:
        ConfigError: naming the folder, what it is, and offload.nvme_paths.
    """
    if not uses_nvme(config):
        return
    key = "offload.nvme_paths" if config.offload.nvme_paths else "run.dir (offload.nvme_paths is empty)"
    for path in nvme_paths(config, local_rank):
        folder = path if config.offload.nvme_paths else existing(path)  # the run folder need not exist yet
        way_out = "name a writable folder on a disk with offload.nvme_paths=[…], or choose offload=host"
        if not folder.exists():
            raise ConfigError(f"{key}: {path} does not exist; {way_out}")
        if not folder.is_dir():
            raise ConfigError(f"{key}: {path} is not a folder; {way_out}")
        memory = memory_filesystem(folder)
        if memory and not config.io.allow_memory:
            raise ConfigError(f"{key}: {path} is in memory ({memory}), nothing would be saved; {way_out}")
        try:
            with tempfile.TemporaryFile(dir=folder) as file:
                file.write(b"\0")
        except OSError as error:
            raise ConfigError(f"{key}: cannot write in {path}: {error.strerror}; {way_out}") from error


def free_bytes(folder: Path) -> int:
    """Bytes that this user may still write to the filesystem of `folder`, or of its nearest parent that exists."""
    found = os.statvfs(existing(folder))
    return found.f_bavail * found.f_frsize


def memory_filesystem(folder: Path) -> str | None:
    """The name of the filesystem of `folder` where that is memory, else None. statfs(2), as tmpfs accepts O_DIRECT."""
    libc = ctypes.CDLL(None, use_errno=True)
    buffer = (ctypes.c_long * 64)()  # struct statfs: its first word is f_type, on every 64-bit Linux
    if libc.statfs(os.fsencode(folder), ctypes.byref(buffer)) != 0:
        return None
    return _MEMORY_FILESYSTEMS.get(buffer[0] & 0xFFFFFFFF)


def run_folder(config: Config) -> None:
    """Can the run folder be made? Raises ConfigError naming run.dir."""
    path = Path(config.run.dir)
    there = existing(path)
    if not there.is_dir():
        raise ConfigError(f"run.dir={path}: {there} is a file; name another folder with run.dir=…")
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise ConfigError(f"run.dir={path}: cannot write in {there}: {error.strerror}; change run.dir") from error


def existing(path: Path) -> Path:
    """`path`, or the nearest of its parents that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _counts(config: Config) -> None:
    least = {
        "run.steps": 1,
        "run.micro_batch": 1,
        "run.accumulate": 1,
        "run.seed": 0,
        "run.checkpoint_every": 0,
        "run.keep_checkpoints": 1,
        "run.evaluate_every": 0,
        "run.evaluate_batches": 1,
        "run.sample_bytes": 0,
        "run.threads": 1,
        "data.sequence_length": 2,
        "zero.resident_bytes": 0,
        "offload.tile_numel": 1,
        "offload.slots": 1,
        "offload.host_bytes": 0,
        "optim.lr": 0,
        "optim.eps": 0,
        "optim.weight_decay": 0,
        "optim.warmup_steps": 0,
        "optim.final_fraction": 0,
        "optim.threads": 1,
    }
    for key, smallest in least.items():
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value is not None and not value >= smallest:
            raise ConfigError(f"{key}={value} must be at least {smallest}")
    norm = config.optim.max_grad_norm
    if norm is not None and not norm > 0:
        raise ConfigError(f"optim.max_grad_norm={norm} must be above 0; set it to null for no clipping")
    if not 0 < config.data.validation_fraction < 1:
        raise ConfigError(f"data.validation_fraction={config.data.validation_fraction} must lie between 0 and 1")
    scale = config.precision.loss_scale
    if not (scale is None or scale == "dynamic" or (isinstance(scale, (int, float)) and 0 < scale < float("inf"))):
        raise ConfigError(f"precision.loss_scale={scale} is neither a positive number nor dynamic nor null")


def _device(name: str) -> None:
    """A type of device is one that torch has streams for: its own, or one that a package registered on import."""
    import torch  # seconds that a mistyped key need not wait for

    try:
        known = name == "cpu" or hasattr(torch.get_device_module(name), "Stream")
    except RuntimeError:
        known = False
    if not known:
        raise ConfigError(
            f"hardware.device={name} is no type of device that torch {torch.__version__} knows and has streams for; "
            "choose cpu, cuda, xpu, or one that an installed package adds to torch (by the entry point torch.backends)"
        )


def _named(key: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise choices(key, value, allowed)


def _activations(config: Config) -> None:
    given = config.offload.activations
    if not (given is None or isinstance(given, str) or (isinstance(given, Sequence) and given)):
        raise ConfigError(f"offload.activations={given} is neither a policy nor a list of them, one a unit")
    for policy in activations(config):
        _named("offload.activations", policy, ACTIVATIONS if not isinstance(given, str) else (*ACTIVATIONS, "auto"))
    if config.offload.kind == "none" and "nvme" in activations(config):
        raise ConfigError(
            "offload.activations=nvme needs a store with an nvme, and offload=none has no store; "
            "set offload.activations=recompute, or choose offload=host or offload=nvme"
        )


def _placement(key: str, placement: Any) -> None:
    if isinstance(placement, str):
        _named(key, placement, TIERS)
        return
    if not isinstance(placement, Mapping) or not placement:
        raise ConfigError(f"{key}={placement} is neither a tier nor fractions such as {{host: 0.5, nvme: 0.5}}")
    for tier, fraction in placement.items():
        _named(key, tier, TIERS)
        if not isinstance(fraction, (int, float)) or not 0 <= fraction <= 1:
            raise ConfigError(f"{key}: the fraction on {tier} is {fraction}; it lies between 0 and 1")
    if abs(sum(placement.values()) - 1) > 1e-6:
        raise ConfigError(f"{key}: the fractions add up to {sum(placement.values()):g}, not 1; change {key}")
