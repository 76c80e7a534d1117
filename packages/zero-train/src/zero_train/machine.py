"""Declares the keys that describe a machine. See schema.py."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Optional

from zero_train.declaring import SIZE, count, gib, speed

# ruff: noqa: UP045  (OmegaConf reads the annotations at run time, see schema.py)


@dataclass
class HardwareConfig:
    """Describes the machine with the fields of `zero_offload.Hardware`. null: ask the machine, or leave it unknown."""

    name: str = "this machine"
    """The name of the machine in reports."""
    nodes: Optional[int] = count(None, SIZE)
    """Number of hosts. null: the number of ranks divided by ranks_per_node."""
    ranks_per_node: Optional[int] = count(None, SIZE)
    """Ranks, one for each device, that share a host's memory and NVMe. null: as many as run on this host."""
    device: Optional[str] = None
    """Type of torch device that the ranks compute on. null: torch's accelerator if there is one, else cpu."""
    device_gib: Optional[float] = gib()
    """Memory of one device. 0: the device tier is host memory. null: ask the device."""
    device_reserved_gib: Optional[float] = gib()
    """Memory of one device that tiers cannot use: context, workspaces, libraries, fragments. null: measured where
    device_gib is null too, and else 2 GiB and 5 % of device_gib."""
    host_gib: Optional[float] = gib()
    """Memory of one host that runs may use. null: what is available now."""
    host_reserved_gib: Optional[float] = gib()
    """Host memory of one rank that tiers cannot use: interpreter, libraries."""
    nvme_gib: Optional[float] = gib()
    """Free space on one NVMe path. null: that of the path with the least."""
    nvme_paths: Optional[int] = count(None, SIZE)
    """NVMe paths of one host. null: as many as in offload.nvme_paths."""
    tflops: Any = None
    """TFLOP/s that a model's forward and backward reach on one device: by format, {fp32: 60, bf16: 400}, or a number
    for every format. null, or a format that is left out: do not predict the step time."""
    device_gbps: Optional[float] = speed()
    """GB/s of device memory."""
    link_gbps: Optional[float] = speed()
    """GB/s from the host to a device."""
    link_out_gbps: Optional[float] = speed()
    """GB/s from a device to its host. null: the same as link_gbps."""
    link_mixed_gbps: Optional[float] = speed()
    """GB/s of both directions together when both are in use. null: they do not slow each other."""
    update_gbps: Optional[float] = speed()
    """GB/s of memory traffic of a host's optimizer step."""
    nvme_read_gbps: Optional[float] = speed()
    """GB/s read from one path."""
    nvme_write_gbps: Optional[float] = speed()
    """GB/s written to one path."""
    nvme_mixed_gbps: Optional[float] = speed()
    """GB/s of reads plus writes to one path when both are in flight."""
    network_gbps: Optional[float] = speed()
    """GB/s that a collective moves for one rank."""
    nvme_endurance_tb: Optional[float] = speed()
    """Terabytes that may be written to one path in its lifetime, as rated by its maker."""
    tiers: dict[str, Any] = field(default_factory=dict)
    """Figures of offload.tiers by name, of one rank: gib, read_gbps, write_gbps, in_host_memory (it counts against
    host_gib too) and ratio (bytes that one byte there holds). null: no limit of its own, or not known."""
