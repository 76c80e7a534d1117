"""Defines `ZeroConfig`, the stage and tiers of a run, from arguments, a mapping, or a YAML or JSON file."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zero_core.errors import ConfigError

_PLACES = {"none": "device", "host": "host", "nvme": "nvme"}
Place = str | Mapping[str, float] | tuple[tuple[str, float], ...]
_KINDS = ("parameters", "gradients", "optimizer")


@dataclasses.dataclass(frozen=True)
class ZeroConfig:
    """How a model is sharded, and where its state is kept.

    stage: ZeRO stage 0 to 3. replicas: groups of consecutive ranks that each hold all shards, such as one for each
    machine: units are gathered within a group, and gradients are averaged over all ranks. secondary_shards: as
    zero_core.shard takes it, for stage 3 on several machines. offload: where everything is kept, "none" (on the
    device), "host" or "nvme"; parameters, gradients and optimizer say otherwise for one kind: "device", "host", "nvme",
    or fractions of them, such as {"host": 0.4, "nvme": 0.6}. nvme_paths: folders on the drives, in which "{local_rank}"
    is this process's number on its machine; a folder is made if the one above it is there.
    states: a layout of zero_optim_cpu.CpuStep. optimizer_contract: how an optimizer that is not listed and has no
    contract of its own may be stepped in parts, as zero_core.shard takes it.
    activations: where each block of a trained model keeps its memory for backward: "keep" (all that autograd saves, on
    the device), or its input alone, on the device ("recompute"), "host" or "nvme". rows: how many rows of a batch a
    block computes at once. tokens: how many tokens of a row its MLP, its norms and the head compute at once.
    row_modules, token_modules: names or patterns of further modules that may compute in parts. Each as
    zero_offload.offload_activations takes them.
    durable: a Trainer keeps each step on the disk of nvme_paths, in twice the room, and train() of the same script
    continues after the last step. "power" survives a power cut. "process" survives the end of the process (kill -9),
    and never waits for fsync. None: steps are not kept.
    prefetch_bytes, resident_bytes, expert_bytes: as zero_core.shard takes them. tile_numel, slots, host_bytes, overlap:
    as zero_offload.TieredStore takes them. param_dtype: "bf16" or "fp16" computes in it, with fp32 masters, and "fp16"
    needs a loss scale; None computes in the model's own dtype.

    Examples:
        >>> import zero_hf
        >>> config = zero_hf.ZeroConfig(offload="host", optimizer={"host": 0.4, "nvme": 0.6}, nvme_paths="/mnt/nvme0")
        >>> config.stage, config.nvme_paths
        (3, ('/mnt/nvme0',))
    """

    stage: int = 3
    offload: str = "none"
    parameters: Place | None = None
    gradients: Place | None = None
    optimizer: Place | None = None
    nvme_paths: tuple[str, ...] = ()
    param_dtype: str | None = None
    states: str = "fp32"
    optimizer_contract: str | None = None
    activations: str = "keep"
    rows: int | None = None
    tokens: int | None = None
    row_modules: tuple[str, ...] = ()
    token_modules: tuple[str, ...] = ()
    durable: str | None = None
    prefetch_bytes: int = 64 << 20
    resident_bytes: int = 0
    expert_bytes: int | None = 64 << 20
    tile_numel: int = 1 << 22
    slots: int | None = None
    host_bytes: int | None = None
    overlap: bool = True
    replicas: int = 1
    secondary_shards: bool = False

    def __post_init__(self) -> None:
        """Raises ConfigError for values that other packages would ignore, or refuse without naming the setting."""
        for name in ("nvme_paths", "row_modules", "token_modules"):
            given = getattr(self, name)
            each = (given,) if isinstance(given, (str, Path)) else given
            object.__setattr__(self, name, tuple(map(str, each)))
        for kind in _KINDS:  # settings are keys of a cache, and a dict cannot be hashed
            if isinstance(place := getattr(self, kind), Mapping):
                object.__setattr__(self, kind, tuple(place.items()))
        _known("stage", self.stage, (0, 1, 2, 3))
        _known("offload", self.offload, tuple(_PLACES))
        _known("param_dtype", self.param_dtype, (None, "bf16", "fp16"))
        _known("durable", self.durable, (None, "power", "process"))
        _number("replicas", self.replicas, 1)
        for name in ("prefetch_bytes", "resident_bytes", "tile_numel"):
            _number(name, getattr(self, name), 0)
        for name in ("host_bytes", "expert_bytes"):
            _number(name, getattr(self, name) or 0, 0)
        for name in ("rows", "tokens"):
            if (given := getattr(self, name)) is not None and self.activations == "keep":
                raise ConfigError(
                    f"{name}={given} needs blocks that are recomputed, and activations='keep' recomputes none: write "
                    f"activations: recompute (or host, or nvme), or leave {name} out"
                )
        if self.replicas > 1 and (self.stage == 0 or self.durable is not None):
            what = "stage=0 shards nothing" if self.stage == 0 else f"durable={self.durable!r} keeps one group's steps"
            raise ConfigError(
                f"replicas={self.replicas} makes groups of ranks that each hold all shards, and {what}: write "
                f"replicas: 1, or {'stage: 1, 2 or 3' if self.stage == 0 else 'leave durable out and save checkpoints'}"
            )
        for path in self.nvme_paths:
            if set(re.findall(r"{.*?}", path)) - {"{local_rank}"}:
                raise ConfigError(f"nvme_paths has {path!r}: the only placeholder is {{local_rank}}")
        if self.on_nvme and not self.nvme_paths:
            raise ConfigError('nvme_paths is empty, but something is on "nvme": name a folder on your fastest drive')
        if self.durable is not None and not (self.offloads and self.nvme_paths):
            lacks = "nvme_paths is empty" if self.offloads else "nothing is offloaded"
            raise ConfigError(
                f"durable={self.durable!r} keeps the steps of an offloaded run in nvme_paths, and {lacks}: name a "
                "folder on a disk with nvme_paths, and write offload: nvme or offload: host"
            )
        if self.activations == "nvme" and not self.on_nvme:
            raise ConfigError(
                "activations='nvme' uses the files of parameters, gradients or optimizer on nvme, and there are none: "
                "write optimizer: nvme, or activations: host"
            )

    @property
    def placements(self) -> dict[str, str | dict[str, float]]:
        """The tier of parameters, gradients and optimizer states: "device", "host" or "nvme", or fractions of them."""
        places = {kind: getattr(self, kind) or _PLACES[self.offload] for kind in _KINDS}
        return {kind: place if isinstance(place, str) else dict(place) for kind, place in places.items()}

    @property
    def offloads(self) -> bool:
        """Whether any tier beside the device is used."""
        return any(place != "device" for place in self.placements.values())

    @property
    def on_nvme(self) -> bool:
        """Whether anything is placed on nvme, in whole or in part."""
        return any("nvme" in place for place in self.placements.values())

    @classmethod
    def of(cls, given: ZeroConfig | Mapping[str, Any] | str | os.PathLike[str] | None) -> ZeroConfig:
        """Returns a ZeroConfig from one, from a mapping, or from the path of a YAML or JSON file. None: the defaults.

        Raises:
            ConfigError: a key or a value is not known, or the file cannot be read.
        """
        if given is None or isinstance(given, cls):
            return given or cls()
        where = "zero"
        if isinstance(given, (str, os.PathLike)):
            where = os.fspath(given)
            try:
                given = yaml.safe_load(Path(where).read_text(encoding="utf-8"))  # JSON is YAML, too
            except (OSError, yaml.YAMLError) as error:
                raise ConfigError(f"{where}: {error}; give the path of a YAML or JSON file") from error
            if given is None:
                raise ConfigError(f"{where} has no settings: write some, or {{}} to keep everything on the device")
        if not isinstance(given, Mapping):
            raise ConfigError(f"{where} is a {type(given).__name__}: give a mapping, such as {{'offload': 'host'}}")
        names = [field.name for field in dataclasses.fields(cls)]
        unknown = [str(key) for key in given if key not in names]
        if unknown:
            raise ConfigError(f"{where} has unknown settings ({', '.join(unknown)}): choose from {', '.join(names)}")
        return cls(**given)


def _number(name: str, value: object, least: int) -> None:
    if type(value) is not int or value < least:
        raise ConfigError(f"{name}={value!r}: give a whole number of at least {least}, without a unit")


def _known(name: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"{name}={value!r}: choose one of {', '.join(map(repr, allowed))}")
