"""Plans a run: completes the hardware facts from this machine, calls zero-offload's planner and words the result.

zero_offload.plan does the arithmetic and decides whether a tier is too small.
"""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_offload
from zero_offload.planning.hardware import bytes_shown
from zero_offload.planning.probing import device_reserves
from zero_train.errors import ConfigError, told
from zero_train.model import dtypes
from zero_train.run.ranks import Ranks
from zero_train.schema import Config, IoConfig, OffloadConfig, ZeroConfig
from zero_train.settings import checks, placement

GIB = 1 << 30


def _stated(config: Config) -> dict[str, Any]:
    """Returns the configured facts without nulls. Raises ConfigError for an unknown key or an impossible figure."""
    facts = {key: value for key, value in config.hardware.items() if value is not None}
    with told("hardware: ", ValueError):
        zero_offload.Hardware.from_dict(facts)
    return facts


def hardware(config: Config, ranks: Ranks) -> zero_offload.Hardware:
    """Returns the configured facts, with this machine's in place of nulls.

    Raises:
        ConfigError: a figure is impossible.
    """
    facts = _stated(config)
    on_gpu = ranks.device.type != "cpu"
    facts.setdefault("name", "this machine")
    facts.setdefault("device", ranks.device.type)
    facts.setdefault("ranks_per_node", ranks.local_world_size)
    facts.setdefault("nodes", max(1, ranks.world_size // facts["ranks_per_node"]))
    if on_gpu and "device_gib" not in facts:
        free, total = torch.get_device_module(ranks.device).mem_get_info(ranks.device)
        if "device_reserved_gib" in facts:  # the free bytes exclude the context already
            facts["device_gib"] = free / GIB
        else:
            dtype = dtypes.DTYPES.get(config.precision.parameters, torch.bfloat16)  # "auto" before it is settled
            facts |= {"device_gib": total / GIB, "device_reserved_gib": device_reserves(ranks.device, dtype)}
    facts.setdefault("device_gib", 0.0)
    facts.setdefault("host_gib", zero_offload.available_host_bytes() / GIB)
    if placement.uses_nvme(config):
        paths = placement.nvme_paths(config, ranks.local_rank)
        facts.setdefault("nvme_gib", min(placement.free_bytes(path) for path in paths) / GIB)
        every = {path for rank in range(facts["ranks_per_node"]) for path in placement.nvme_paths(config, rank)}
        facts.setdefault("nvme_paths", len(every))
    figures = facts.get("tiers", {})
    names = (*figures, *config.offload.tiers)  # in the order in which the hardware names them
    return zero_offload.Hardware(**facts | {"tiers": {name: figures.get(name) or {} for name in names}})


def here(config: Config, ranks: Ranks) -> None:
    """Refuses to train if `hardware` describes another machine than this one. A dry run may plan for any machine.

    Raises:
        ConfigError: this process computes on another device, or the run has another number of ranks.
    """
    facts = _stated(config)
    if facts.get("device", ranks.device.type) != ranks.device.type:
        raise ConfigError(
            f"hardware.device={facts['device']}, but torch sees no such device here, so this run would compute on "
            f"{ranks.device.type}; plan for that machine with run.dry=true, or run on this one with hardware=detect"
        )
    local = facts.get("ranks_per_node", ranks.local_world_size)
    nodes = facts.get("nodes", max(1, ranks.world_size // local))
    if not facts.keys().isdisjoint(("ranks_per_node", "nodes")) and local * nodes != ranks.world_size:
        raise ConfigError(
            f"hardware.nodes={nodes} with hardware.ranks_per_node={local} are {local * nodes} ranks, this run has "
            f"{ranks.world_size}; plan for them with run.dry=true, start as many with torchrun, or run on this machine "
            "with hardware=detect"
        )


def make(config: Config, model: nn.Module, ranks: Ranks, step: Any | None) -> zero_offload.Plan:
    """Returns the plan of this rank. `step`, the bound UpdateStep, knows the optimizer states; without it Adam in fp32.

    Raises:
        ConfigError: a tier is too small. The message says how much is missing and which key to change.
    """
    facts, offload = hardware(config, ranks), config.offload
    everywhere = {"none": "device", "auto": "auto"}.get(offload.kind)
    placements: dict[str, Any] = {kind: everywhere or getattr(offload, kind) for kind in placement.STATE_KINDS}
    again = offload.planned is not None and not facts.shares_host
    if again:
        placements = offload.planned[ranks.rank]
    try:
        return zero_offload.plan(
            model,
            facts,
            **placements,
            activations=offload.activations or "keep",
            step=step,
            parameter_dtype=dtypes.DTYPES[config.precision.parameters],
            shard_count=_group_size(facts, config, ranks),
            replicas=config.zero.replicas,
            tile_numel=offload.tile_numel,
            slots=offload.slots,
            tokens=_tokens(config),
            accumulate=config.run.accumulate,
            micro_batch=1 if checks.packs(config) else _sequences(config),
            rows=offload.rows,
            tokens_at_once=offload.tokens,
            whole_logits=config.task.kind != "pretrain",
            no_sync=holds_back(config),
            host_bytes=offload.host_bytes,
            durable=config.run.durable is not None,
            update_share=offload.update_share,
            **shared_options(config),
        )
    except (ValueError, MemoryError, RuntimeError) as error:
        kept = (
            ". The run that run.resume=auto continues has these placements. To make a new plan after its last "
            f"checkpoint, with other bits, set run.resume={config.run.dir}"
        )
        raise ConfigError(refusal(error, config) + (kept if again else "")) from error


def shared_options(config: Config) -> dict[str, Any]:
    """Returns the keywords that `zero_offload.plan` and `zero_core.shard` have in common."""
    names = ["stage", "resident_bytes", "secondary_shards", "expert_bytes"]
    names += ["prefetch_bytes"] if config.zero.prefetch_bytes is not None else []
    reduced = dtypes.DTYPES[config.precision.reduce or config.precision.parameters]
    return {"reduce_dtype": reduced, **{name: getattr(config.zero, name) for name in names}}


def described_ranks(facts: zero_offload.Hardware | None, config: Config, ranks: Ranks) -> int:
    """Returns the number of ranks planned for: those of this run, or in a dry run those of the described hardware."""
    return facts.ranks if config.run.dry and facts is not None else ranks.world_size


def _group_size(facts: zero_offload.Hardware, config: Config, ranks: Ranks) -> int:
    """Returns the number of ranks that share the shards. Raises ConfigError if zero.replicas does not divide all."""
    count, replicas = described_ranks(facts, config, ranks), config.zero.replicas
    if count % replicas:
        below = max(number for number in range(1, min(count, replicas) + 1) if count % number == 0)
        raise ConfigError(
            f"zero.replicas={replicas} does not divide {count} rank{'s' if count > 1 else ''} into groups of one size; "
            f"start a multiple of {replicas} ranks, or set zero.replicas={below}"
        )
    return count // replicas


def holds_back(config: Config) -> bool:
    """Returns whether every rank keeps the gradients of all micro-batches but the last until the step."""
    return config.zero.stage < 2 if config.zero.no_sync is None else config.zero.no_sync


def refusal(error: Exception, config: Config) -> str:
    """Returns a sibling's error message in this program's keys, with the one to change added if it names none."""
    text = keyed(str(error), config)
    if any(word in text for word in ("offload.", "offload=", "zero.", "hardware.", "io.")):
        return text
    if isinstance(error, zero_offload.ActivationError) or "activation" in text:
        return f"{text}; change offload.activations"
    if isinstance(error, OSError):  # of a slab or another tier, which is full for example
        return f"{text}; change offload.nvme_paths{' or offload.tiers' if config.offload.tiers else ''}"
    return f"{text}; put more on nvme with offload=nvme offload.slots=3, raise zero.stage, or train a smaller model"


def keyed(text: str, config: Config) -> str:
    """Returns a text of zero-core or zero-offload with this program's keys in place of their arguments."""
    kinds: dict[str, Any] = {"offload": OffloadConfig, "zero": ZeroConfig, "io": IoConfig}
    sections = {key.name: section for section, kind in kinds.items() for key in dataclasses.fields(kind)}

    def key(found: re.Match[str]) -> str:
        name, value = found["name"], found["value"].strip("\"'")
        if name not in sections:
            return found[0]
        if name in placement.STATE_KINDS and value in ("host", "nvme") and config.offload.kind != "placed":
            return f"offload={value}"  # the placements of other kinds cannot be changed one by one
        needs_store = (name, value, config.offload.kind) == ("activations", "nvme", "none")
        value = value.lower() if value in ("True", "False") else value
        return f"{sections[name]}.{name}={value}{' with offload=host' if needs_store else ''}"

    if config.task.kind != "pretrain":  # the Trainer decides when to reduce
        text = text.replace("no_sync=False", "stage=2")
    text = text.replace("smaller units (TiledLinear)", "a model of smaller layers")
    text = re.sub(r"(?<!\.)\bdevice_gib=", "hardware.device_gib=", text)
    text = re.sub(
        rf"^({'|'.join(placement.STATE_KINDS)})(?=: )", r"offload.\1", text.replace("tokens_at_once", "tokens")
    )
    text = text.replace("tokens a micro-batch", "tokens a micro-batch (run.micro_batch, data.sequence_length)")
    text = re.sub(r"""(?<![\w./-])(?P<name>[a-z_]+)=(?P<value>"\w+"|'\w+'|\w*)""", key, text)
    saves = r"(?: \(saves [^)]*\))?"
    return re.sub(rf"(\boffload=\w+)({saves})(?:(?: and |, or )\1\b{saves})+", r"\1\2", text)


def described(plan: zero_offload.Plan, config: Config, ranks: Ranks, done: int = 0) -> str:
    """Returns the plan as text: GiB in each tier for each kind of state, and the bytes that the run writes to disk.

    done: steps in the checkpoint that the run continues from. The text covers the steps that are left.
    """
    count, steps = described_ranks(plan.hardware, config, ranks), config.run.steps - done
    groups = f" in {config.zero.replicas} groups" if config.zero.replicas > 1 else ""
    lines = [f"plan of each of {count} ranks{groups}" if count > 1 else "plan", *plan.lines()]
    saved, written = checkpoint_bytes(plan, config, ranks, done), written_bytes(plan, config, ranks, done)
    most = "at most " if config.run.epochs and config.task.kind != "pretrain" else ""  # rows may be left out
    lines.append(
        f"{most}{steps} steps of {_tokens(config) * count:,} tokens will write {bytes_shown(written)} to disk in "
        f"all: {bytes_shown(plan.setup_write_bytes * count)} before the first step, "
        f"{bytes_shown(plan.write_bytes_per_step * count)} a step"
        + (f", {bytes_shown(saved)} of checkpoints" if saved else "")
    )
    lines.append(f"each step reads {bytes_shown(plan.read_bytes_per_step * count)} back")
    lines += [f"{name}: {keyed(value, config)}" for name, value in plan.facts() if not name.startswith("nvme")]
    if plan.step_seconds is not None:
        lines.append(f"predicted for {steps} steps: {_duration(plan.step_seconds * steps)}")
    if config.run.durable is not None:
        survived = "a power cut" if config.run.durable == "power" else "the end of the process"
        copied = plan.store.copied_bytes * count
        lines.append(
            f"each step survives {survived} (run.durable={config.run.durable}), with "
            f"{bytes_shown(plan.durable_bytes * count)} more on nvme"
            + (f"; {bytes_shown(copied)} that lie in memory are written each time" if copied else "")
        )
    if plan.held_back:
        why = "zero.no_sync=true" if config.zero.no_sync else f"zero.stage={config.zero.stage}"
        held = f"{plan.held_back / GIB:.3f} GiB of the device's buffers"
        lines.append(f"{held} are whole gradients that wait for the step ({why})")
    if plan.endurance_steps is not None:
        assert plan.hardware is not None
        rated = (plan.hardware.nvme_endurance_tb or 0) * plan.hardware.paths_per_rank * count
        lines.append(
            f"the run writes {written / rated / 1e12:.2%} of the {rated:,.0f} TB that the drives are rated for; "
            f"{plan.endurance_steps:,} steps would write all of it"
        )
    return "\n".join(lines)


def _slabs(plan: zero_offload.Plan, config: Config, ranks: Ranks) -> dict[int, tuple[int, Path]]:
    """Maps each disk (st_dev) to the bytes that the slabs of this machine's ranks will take there, and to a folder."""
    found: dict[int, tuple[int, Path]] = {}
    each = plan.total("nvme") + (plan.durable_bytes if config.run.durable is not None else 0)
    for rank in range(ranks.local_world_size) if each else ():
        paths = placement.nvme_paths(config, rank)
        for path in paths:
            device = os.stat(placement.existing(path)).st_dev
            found[device] = (found.get(device, (0, path))[0] + each // len(paths), path)
    return found


def _duration(seconds: float) -> str:
    for length, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * length:
            return f"{seconds / length:.1f} {unit}"
    return f"{seconds:.3g} seconds"


def _tokens(config: Config) -> int:
    """Returns the tokens of one rank's step."""
    return _sequences(config) * config.run.accumulate * config.data.sequence_length


def _sequences(config: Config) -> int:
    """Returns the sequences of a micro-batch. Pairs of answers are computed at once, each with its prompt."""
    return config.run.micro_batch * (2 if config.task.kind in ("dpo", "reward") else 1)


def written_bytes(plan: zero_offload.Plan, config: Config, ranks: Ranks, done: int = 0) -> int:
    """Returns the bytes that all ranks write to disk after step `done` of this run, including checkpoints."""
    count, steps = described_ranks(plan.hardware, config, ranks), config.run.steps - done
    copied = 0 if config.run.durable is None else steps * plan.store.copied_bytes
    return (plan.written_bytes(steps) + copied) * count + checkpoint_bytes(plan, config, ranks, done)


def checkpoint_bytes(plan: zero_offload.Plan, config: Config, ranks: Ranks, done: int = 0) -> int:
    """Returns the bytes of all checkpoints that the run writes after step `done`."""
    return _checkpoints(config, done) * each_checkpoint_bytes(plan, config, ranks)


def each_checkpoint_bytes(plan: zero_offload.Plan, config: Config, ranks: Ranks) -> int:
    """Returns the bytes of one checkpoint, from all ranks. It holds an fp32 master and the optimizer's states.

    With adapters, the base is left out: the trained parameters have about the bytes of their gradients.
    """
    held = "parameters" if config.adapter.kind == "none" else "gradients"
    each = sum(plan.bytes_of(tier, kind) for tier in plan.shape.tiers for kind in ("optimizer", held))
    return each * plan.shape.shard_count  # only the first replica writes


def _checkpoints(config: Config, done: int) -> int:
    """Returns how many checkpoints are saved after step `done`: one after each run.checkpoint_every, and the last."""
    every, steps = config.run.checkpoint_every, config.run.steps
    return -(-steps // every) - done // every if every and done < steps else 0


def room(plan: zero_offload.Plan, config: Config, ranks: Ranks, done: int, there: int) -> None:
    """Refuses a run whose slabs and checkpoints do not fit on its disks. The room of its old slabs counts as free.

    A new checkpoint is complete before the oldest is deleted, so one more than run.keep_checkpoints is there at a time.
    done: steps that are taken already. there: complete checkpoints that the run folder holds already.

    Raises:
        ConfigError: a disk has less room. It names the figures and the keys to change.
    """
    run, keep = config.run, max(config.run.keep_checkpoints, 1 + config.run.keep_best)

    def more(kept: int) -> int:
        return max(0, min(there + _checkpoints(config, done), max(there, kept) + 1) - there)

    each, own = each_checkpoint_bytes(plan, config, ranks), os.stat(placement.existing(Path(run.dir))).st_dev
    mine, disks = zero_offload.slab_name(run.dir, ""), _slabs(plan, config, ranks)
    for device, (slab, path) in ({own: (0, Path(run.dir))} | disks).items():
        new = more(keep) if device == own else 0
        files = [file for file in path.glob("*.slab") if slab and file.stem.startswith(mine)]
        free = placement.free_bytes(path) + sum(file.stat().st_blocks * 512 for file in files)
        if slab + new * each <= free:
            continue
        ways = ["name a folder on a larger disk with run.dir=… or offload.nvme_paths=[…]"]
        if new and slab + more(1) * each <= free:
            ways.append("keep fewer checkpoints with run.keep_checkpoints=1")
        if new:
            ways.append("save no checkpoints with run.checkpoint_every=0")
        if slab and run.durable is not None:
            ways.append("set run.durable=null, which halves the room of trained values")
        raise ConfigError(
            f"{path} has {bytes_shown(free)} free, less than the run needs there: {bytes_shown(slab)} for slabs and "
            f"{bytes_shown(new * each)} for {new} checkpoint{'s' * (new != 1)} at a time; {'. Or '.join(ways)}"
        )
