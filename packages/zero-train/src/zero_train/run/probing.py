"""Measures this machine with zero_offload.probe and words the figures as YAML for conf/hardware (`run.probe=true`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from contextlib import ExitStack

import torch
from omegaconf import OmegaConf

import zero_offload
from zero_train.errors import told
from zero_train.model import dtypes
from zero_train.run import assemble, planning
from zero_train.run.ranks import Ranks
from zero_train.schema import Config
from zero_train.settings import checks, placement


def measured(config: Config, ranks: Ranks, cores: Sequence[int] | None = None) -> str:
    """Returns YAML to save as conf/hardware/NAME.yaml. Takes some seconds. Other ranks than the first return "".

    Raises:
        ConfigError: a folder of offload.nvme_paths cannot hold a slab.
    """
    if not ranks.leader:
        return ""
    checks.values(config)
    dtypes.resolve(config, ranks.device)
    checks.packages(config)
    with ExitStack() as stack:
        step = None if config.offload.kind == "none" else assemble.draft(config, cores).step
        folders = [placement.existing(path) for path in placement.nvme_paths(config, ranks.local_rank)]
        nvme = assemble.make_slab(config, folders, stack) if placement.uses_nvme(config) else None
        way_out = "; change offload.nvme_paths, or choose offload=host"
        with told("run.probe: ", OSError, ValueError, RuntimeError, way_out=way_out):
            found = zero_offload.probe(
                nvme=nvme,
                step=step,
                device=ranks.device,
                parameter_dtype=dtypes.DTYPES[config.precision.parameters],
                dtypes=(torch.float32, torch.bfloat16),  # those that precision=auto chooses from
                hidden_size=config.model.hidden_size,
                tokens=config.run.micro_batch * config.data.sequence_length,
                ranks_per_node=ranks.local_world_size,
            )
    if nvme is not None:  # the slab that was measured is closed, and its space free again
        room = min(placement.free_bytes(folder) for folder in folders)
        found = dataclasses.replace(found, nvme_gib=round(room / planning.GIB, 1), nvme_paths=len(folders))
    heading = f"# Measured by zero-train run.probe=true; save as conf/hardware/{found.name}.yaml\n"
    return heading + OmegaConf.to_yaml(OmegaConf.create(found.to_dict())).strip()
