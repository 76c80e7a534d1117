"""Registers the collectives' backend `simccl`, which `init_process_group("cpu:gloo,sim:simccl")` uses."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist

from .build import native


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a communicator: gloo moves the bytes, in the order of the devices' streams."""
    return native.SimCCL(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)


def register() -> None:
    if dist.is_available() and "simccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("simccl", _create, devices=["sim"])
