"""Describes the hardware: counts, GiB, GB/s, TFLOP/s, and which of them ranks share.

Owns `Hardware`, its dict form (the files of ``conf/hardware``), and each rank's share of a node's resources. Not here:
measuring (in probing.py), choosing (in planner.py).

[Note: Shared resources]
    device   memory, link and TFLOP/s are a rank's own
    host     memory and the update's bandwidth belong to the node; its ranks have equal shares
    tiers    other stored tiers, from fast to slow: their figures are a rank's own
    nvme     capacity and bandwidth are given for one path. With at least as many paths as ranks a rank has
             ``paths // ranks`` of its own; with fewer, the ranks that share a path share its figures too.
    With ``device_gib=0`` the ranks compute on the CPU: their device tier *is* host memory, and both draw on one budget.
    Otherwise a part of a device's memory is not planned: `Hardware.reserves`.
Units: GiB is 2**30 bytes, GB/s is 1e9 bytes a second, as the data sheets have it.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..layout.tile import check_update_share
from ..tier import Tier

GIB = 1 << 30
GB = 10**9
UNMEASURED_GIB = 2.0  # of a device's memory: a context, workspaces and what libraries load. A guess
FRAGMENTS = 0.05  # of it, left unused by an allocator with expandable segments. A guess, no run has shown it
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}  # by their names in `tflops`


def bytes_shown(nbytes: float) -> str:
    """Formats bytes as 56.0 GB, 0.31 GB or 21.3 KB: in the largest unit, of powers of 1000, that gives at least 0.1."""
    for unit, size in (("GB", GB), ("MB", 10**6), ("KB", 10**3)):
        if nbytes >= size / 10:
            return f"{nbytes / size:.{1 if nbytes >= 10 * size else 2}f} {unit}"
    return f"{nbytes:.0f} bytes"


class HardwareError(ValueError):
    """An impossible hardware description. The message names the key, its value, and a value that would do."""


def _quantity(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not math.isfinite(value):
        raise HardwareError(f"{name} is {value!r}, and must be a finite number")
    least = "at least" if name.endswith("gib") else "above"
    if value < 0 or (value == 0 and least == "above"):
        raise HardwareError(f"{name} is {value}, and must be {least} 0; leave it out if it is not known")


def _check_keys(kind: type, values: Mapping[str, Any], what: str) -> None:
    """Raises `HardwareError` naming a key that `kind` does not have, and the nearest one that it has."""
    known = {field.name for field in dataclasses.fields(kind)}
    for key in values:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; known: {', '.join(sorted(known))}"
            raise HardwareError(f"{what} has no key {key!r}{hint}")


@dataclass(frozen=True)
class TierFigures:
    """Figures of a stored tier for which `Hardware` has no fields, for one rank."""

    gib: float | None = None  # None: the tier has no limit of its own
    read_gbps: float | None = None
    write_gbps: float | None = None
    in_host_memory: bool = False  # the tier's bytes are in host memory, and count against that budget too
    ratio: float = 1.0  # bytes that one byte there holds, for a tier that compresses

    def check(self, tier: str) -> None:
        """Raises `HardwareError` for an impossible figure."""
        for name in ("gib", "read_gbps", "write_gbps", "ratio"):
            value = getattr(self, name)
            if value is not None or name == "ratio":
                _quantity(f"tiers.{tier}.{name}", value)


@dataclass(frozen=True)
class Hardware:
    """The hardware of one training job. Figures left ``None`` are not known: then no time is predicted from them."""

    name: str = "unnamed"
    nodes: int = 1
    ranks_per_node: int = 1
    device: str = "cpu"  # torch device type that the ranks compute on
    device_gib: float = 0.0  # a rank; 0: the device tier is host memory
    # A rank: device memory that tiers cannot use. A number, or numbers by cause. None: see `reserves`.
    device_reserved_gib: float | Mapping[str, float] | None = None
    host_gib: float = 0.0  # a node
    host_reserved_gib: float = 0.6  # a rank: interpreter, torch, libraries
    nvme_gib: float = 0.0  # a path
    nvme_paths: int = 1  # a node
    # A rank: the rate that a model's forward and backward reach, not the data sheet's peak. By format, such as
    # {"fp32": 60, "bf16": 400}; a format that is left out is not known. A single number is every format's.
    tflops: float | Mapping[str, float] | None = None
    device_gbps: float | None = None  # a rank: device memory, for an update on the device
    link_gbps: float | None = None  # a rank: host to device, from registered memory; not used on the CPU
    link_out_gbps: float | None = None  # a rank: device to host; None: as host to device
    link_mixed_gbps: float | None = None  # a rank: both directions at once, summed; None: neither slows the other
    update_share: float = 0.0  # of the tiles with states outside of the device, the part that it updates; 0 to 1
    update_gbps: float | None = None  # a node: bytes an optimizer step on the host moves, see `UpdateTraffic`
    nvme_read_gbps: float | None = None  # a path
    nvme_write_gbps: float | None = None  # a path
    nvme_mixed_gbps: float | None = None  # a path: reads plus writes when both are in flight; None: they take turns
    network_gbps: float | None = None  # a rank: bytes that a collective moves between ranks
    nvme_endurance_tb: float | None = None  # a path: terabytes it is rated to take in its life
    tiers: Mapping[str, TierFigures] = dataclasses.field(default_factory=dict)  # see `_set_tiers`

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("nodes", "ranks_per_node", "nvme_paths"):
                if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                    raise HardwareError(f"{field.name} is {value!r}, and must be a whole number of at least 1")
            elif field.name == "update_share":
                check_update_share(value)
            elif field.name == "tflops" and isinstance(value, Mapping):
                for name, figure in value.items():
                    if name not in FORMATS:
                        raise HardwareError(f"tflops has no format {name!r}; known: {', '.join(FORMATS)}")
                    _quantity(f"tflops.{name}", figure)
            elif field.name == "device_reserved_gib" and isinstance(value, Mapping):
                for figure in value.values():
                    _quantity(field.name, figure)
            elif field.name not in ("name", "device", "tiers") and (value is not None or field.default is not None):
                _quantity(field.name, value)
        self._set_tiers()

    def _set_tiers(self) -> None:
        """Stored tiers by name, from fast to slow, as `TierFigures` or as mappings of those.

        They come between "host" and "nvme". The name "nvme", without figures, may be among them to give its position.
        """
        found = {}
        for name, given in self.tiers.items():
            if not isinstance(given, TierFigures):
                _check_keys(TierFigures, given or {}, f"tiers.{name}")
                given = TierFigures(**dict(given or {}))
            given.check(name)
            if not Tier(name).stored or (name == Tier.NVME and given != TierFigures()):
                raise HardwareError(f"tiers cannot describe {name!r}; set fields of Hardware, such as {name}_gib")
            found[name] = given
        object.__setattr__(self, "tiers", found)

    # -- counts and each rank's share; bytes and bytes a second -------------------------------------------------

    @property
    def ranks(self) -> int:
        """Ranks on all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def shares_host(self) -> bool:
        """Whether the device tier is host memory."""
        return self.device_gib == 0

    @property
    def reserves(self) -> Mapping[str, float]:
        """GiB of a rank's device that tiers cannot use, by cause: the figures given, or else guesses."""
        given = self.device_reserved_gib
        if isinstance(given, Mapping):
            return given
        if given is not None:
            return {"as given": given}
        return {"context and libraries": UNMEASURED_GIB, "fragments": FRAGMENTS * self.device_gib}

    @property
    def reserved_gib(self) -> float:
        """The sum of `reserves`."""
        return sum(self.reserves.values())

    @property
    def reserved(self) -> str:
        """`reserves` to print, such as "5.9 GiB: context and libraries 2.0, fragments 3.9"."""
        causes = ", ".join(f"{cause} {figure:.2g}" for cause, figure in self.reserves.items())
        return f"{self.reserved_gib:.1f} GiB: {causes}"

    @property
    def device_bytes(self) -> int:
        """A rank's device budget: its memory less the reserve; 0 where the device tier is host memory."""
        return max(0, int((self.device_gib - self.reserved_gib) * GIB))

    @property
    def host_bytes(self) -> int:
        """A rank's host budget: its share of the node's memory, less the reserve."""
        return max(0, int((self.host_gib / self.ranks_per_node - self.host_reserved_gib) * GIB))

    @property
    def paths_per_rank(self) -> float:
        """The paths of the rank of a node that has fewest; a fraction if it shares one."""
        if self.nvme_paths >= self.ranks_per_node:
            return float(self.nvme_paths // self.ranks_per_node)
        return 1.0 / math.ceil(self.ranks_per_node / self.nvme_paths)

    @property
    def nvme_bytes(self) -> int:
        """Bytes on nvme that one rank may use, on all of its paths."""
        return int(self.nvme_gib * self.paths_per_rank * GIB)

    @property
    def rooms(self) -> dict[str, int]:
        """Bytes of one rank on each tier that has a limit of its own. A device tier that is host memory has none."""
        found: dict[str, int] = {} if self.shares_host else {Tier.DEVICE: self.device_bytes}
        others = {name: figures for name, figures in self.tiers.items() if figures.gib is not None}
        rooms = {name: int((figures.gib or 0.0) * GIB * figures.ratio) for name, figures in others.items()}
        return found | {Tier.HOST: self.host_bytes, Tier.NVME: self.nvme_bytes} | rooms

    def more_room(self, tier: str) -> str:
        """Advice where a stored tier is too small."""
        if tier == Tier.NVME:
            return "give more nvme paths or room (hardware.nvme_gib, hardware.nvme_paths), or train on more nodes"
        return f"give it more room (hardware.tiers.{tier}.gib), or place less there"

    def flops(self, dtype: torch.dtype) -> float | None:
        """FLOP per second of one rank that computes in `dtype`; None: not known."""
        found = self.tflops
        if isinstance(found, Mapping):
            found = next((found[name] for name in found if FORMATS[name] == dtype), None)
        return None if found is None else found * 1e12

    def rank_rate(self, name: str) -> float | None:
        """Bytes per second of one rank while all ranks work; None: not known."""
        value: float | None = getattr(self, name)
        if name == "link_out_gbps" and value is None:
            value = self.link_gbps
        if value is None:
            return None
        if name == "update_gbps":
            return value * GB / self.ranks_per_node
        if name.startswith("nvme_"):
            return value * GB * self.paths_per_rank
        return value * GB

    def tier_rates(self, tier: str) -> tuple[float | None, float | None, float | None]:
        """A stored tier's bytes per second for one rank: of reads, of writes, of both at once. None: not known."""
        if tier == Tier.NVME:
            read, write, mixed = (self.rank_rate(f"nvme_{name}_gbps") for name in ("read", "write", "mixed"))
            return read, write, mixed
        figures = self.tiers[tier]
        read, write = (None if rate is None else rate * GB for rate in (figures.read_gbps, figures.write_gbps))
        return read, write, None

    # -- the dict form ------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a YAML file, without unknown figures. `from_dict` is the inverse."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None and value != {}}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Hardware:
        """The inverse of `to_dict`. Raises `HardwareError` naming an unknown key, and the nearest known one."""
        _check_keys(cls, values, "hardware")
        return cls(**dict(values))
