"""Continues a run from its last step (run.durable), and refuses the durable steps of another run.

Owns that policy. If the slabs do not fit the run (other ranks, another stage or tile size, run.durable=null), their
steps are written as a checkpoint, and the run continues from that. Not here: restoring a step, and the check that all
ranks' steps are of one run (in zero_core.resume); the keys that identify a run (in resume.py).
"""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

import zero_core
import zero_offload
from zero_train.errors import ConfigError, told
from zero_train.run import resume
from zero_train.run.assemble import Assembled, Draft, make_slab
from zero_train.run.ranks import Ranks
from zero_train.schema import Config
from zero_train.settings import placement


def go_on(ready: Assembled, config: Config, text: str, step: Callable[[], int]) -> tuple[int, str]:
    """Makes each step durable from here on, and restores the last one of an earlier process. Returns its number, or 0,
    and a sentence on how this run differs, or "".

    text: the corpus's digest. step: returns the number of the current step, from 1. Collective.

    Raises:
        ConfigError: the steps are of another run or text, or this run is not to be continued.
    """
    kept = {"text": text, "config": OmegaConf.to_yaml(OmegaConf.structured(config))}
    with told("run.durable: ", zero_core.ZeroError):
        found = zero_core.resume(ready.model, ready.optimizer, extra=lambda: {"step": step(), **kept}).extra
    if found is None:
        return 0, ""
    slabs = f"{Path(config.run.dir).name}: {ready.slab.name}.slab in {', '.join(ready.slab.paths)}"
    if config.run.resume != "auto":
        raise ConfigError(
            f"run.dir={config.run.dir} has durable steps up to {found['step'] - 1} ({slabs}); continue them with "
            "run.resume=auto, name another folder with run.dir=…, or remove these files to begin anew"
        )
    before: Any = OmegaConf.create(found["config"])
    if differ := resume.identity(before, config):
        raise ConfigError(
            f"run.resume=auto: the durable steps of run.dir={config.run.dir} are another run's "
            f"({resume.listed(differ)}); set {resume.back(differ)}, or name another folder with run.dir=…"
        )
    if found["text"] != text:
        raise ConfigError(
            f"run.resume=auto: the text differs from that of the durable steps: it is {text}, and was "
            f"{found['text']}; bring that text back, or name another folder with run.dir=…"
        )
    return int(found["step"]) - 1, resume.differing(before, config)


def on_their_disks(config: Config, ranks: Ranks) -> None:
    """Refuses a run that would start again beside a slab of its own, on a machine where another rank runs. Collective.

    Call it after `as_checkpoint`. zero_core refuses a run in which some ranks have lost their slabs.

    Raises:
        ConfigError: a rank's slab is on a machine where that rank does not run.
    """
    prefix, paths = zero_offload.slab_name(config.run.dir, ""), placement.nvme_paths(config, ranks.local_rank)
    names = [file.stem.removeprefix(prefix) for path in paths for file in path.glob("*.slab")]
    numbers = {int(name) for name in names if name.isdigit()}
    machines = ranks.gather((socket.gethostname(), numbers))
    for host, found in machines:
        for rank in sorted(found):
            if rank < len(machines) and rank in machines[rank][1]:
                continue
            now = f"runs on {machines[rank][0]}" if rank < len(machines) else "does not exist"
            raise ConfigError(
                f"the durable steps of run.dir={config.run.dir} are on other machines than their ranks: rank {rank} "
                f"{now}, and its slab, {prefix}{rank}.slab, is on {host}; start as many ranks as there were, each on "
                f"the machine where it was (torchrun --node-rank), or give these steps up: remove {prefix}*.slab on "
                "every machine, and start from the last checkpoint, if there is one"
            )


def as_checkpoint(config: Config, draft: Draft, plan: zero_offload.Plan, ranks: Ranks) -> str:
    """Writes the durable steps in the run's folders as a checkpoint, if this run cannot continue from their slabs.

    Returns a sentence to print, or "". Only the first rank acts, before any rank opens its slab.

    Raises:
        ConfigError: there is no room for it, slabs are missing or in use, or the offload cannot read them.
    """
    if config.run.resume != "auto" or not ranks.leader:
        return ""
    with ExitStack() as stack:

        def opened(rank: int) -> Any:
            name, paths = zero_offload.slab_name(config.run.dir, rank), placement.nvme_paths(config, rank)
            there = all((path / f"{name}.slab").exists() for path in paths)
            return make_slab(config, paths, stack, name) if there else None

        here = (ranks.world_size if config.zero.stage else 1, plan.tile_numel)
        with told("run.durable: ", zero_offload.OffloadError):
            slabs, shards = zero_offload.slabs_to_move(opened, None if config.run.durable is None else here)
        if not slabs:
            return ""
        if draft.step is None:
            raise ConfigError(
                f"run.resume=auto: the last steps of run.dir={config.run.dir} are in slabs, which a run with "
                f"offload={config.offload.kind} cannot read; choose offload=host or offload=nvme"
            )
        said = f"run.resume=auto: the durable steps of run.dir={config.run.dir} cannot be made a checkpoint: "
        way_out = (
            f"; make room, start the run as it was, on {shards} ranks and their machines, or remove "
            f"{slabs[0].name}.slab and those like it to go on from the last checkpoint"
        )
        with told(said, zero_core.ZeroError, zero_offload.OffloadError, ValueError, OSError, way_out=way_out):
            folder = Path(config.run.dir) / "checkpoints"
            begun = folder / "durable"
            shutil.rmtree(begun, ignore_errors=True)
            _, extra = zero_offload.write_checkpoint(slabs[:shards], begun, step=draft.step, optimizer=draft.optimizer)
            (begun / resume.CONFIG).write_text(extra["config"], encoding="utf-8")
            target = folder / f"step_{extra['step'] - 1:07d}"
            shutil.rmtree(target, ignore_errors=True)  # an earlier checkpoint of the same step
            begun.rename(target)
            os.sync()  # before the slabs are removed
        for slab in slabs:
            slab.remove()
    return f"the durable steps are of another number of ranks, or in other tiles: they are a checkpoint now, {target}"
