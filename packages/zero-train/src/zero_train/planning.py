"""The plan of a run: hardware as configured or as found, what zero-offload makes of it, and the text people read.

Owns the questions to the machine and the wording. The arithmetic and the refusals are zero_offload.plan's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import zero_offload
from zero_train import checks, formats
from zero_train.errors import ConfigError
from zero_train.progress import table
from zero_train.ranks import Ranks
from zero_train.schema import Config, OffloadConfig

GIB = 1 << 30


def hardware(config: Config, ranks: Ranks) -> zero_offload.Hardware:
    """The configured facts, with what was left null asked of this machine.

    Raises:
        ConfigError: a figure that cannot be.
    """
    facts = {key: value for key, value in dataclasses.asdict(config.hardware).items() if value is not None}
    on_gpu = ranks.device.type != "cpu"
    facts.setdefault("device", ranks.device.type)
    facts.setdefault("ranks_per_node", ranks.local_world_size)
    facts.setdefault("nodes", max(1, ranks.world_size // int(facts["ranks_per_node"])))
    free_bytes = torch.get_device_module(ranks.device).mem_get_info(ranks.device)[0] if on_gpu else 0
    facts.setdefault("device_gib", free_bytes / GIB)
    if on_gpu:  # what is free counts the context already; this is for the allocator's fragments and workspaces
        facts.setdefault("device_reserved_gib", 2.0)
    facts.setdefault("host_gib", zero_offload.available_host_bytes() / GIB)
    paths = checks.nvme_paths(config, ranks.local_rank)
    if checks.uses_nvme(config):
        facts.setdefault("nvme_gib", min(checks.free_bytes(path) for path in paths) / GIB)
        every = {path for rank in range(int(facts["ranks_per_node"])) for path in checks.nvme_paths(config, rank)}
        facts.setdefault("nvme_paths", len(every))
    try:
        return zero_offload.Hardware(**facts)
    except ValueError as error:
        raise ConfigError(f"hardware.{error}") from error


def here(config: Config, ranks: Ranks) -> None:
    """Refuses to run on another machine than the one that `hardware` describes; any may be planned for.

    Raises:
        ConfigError: hardware.device that this process does not compute on, or a number of ranks that it is not.
    """
    facts = config.hardware
    if facts.device is not None and facts.device != ranks.device.type:
        raise ConfigError(
            f"hardware.device={facts.device}, but torch sees no such device here, so this run would compute on "
            f"{ranks.device.type}; plan for that machine with run.dry=true, or run on this one with hardware=detect"
        )
    if facts.ranks_per_node is None and facts.nodes is None:
        return
    local = facts.ranks_per_node or ranks.local_world_size
    nodes = facts.nodes if facts.nodes is not None else max(1, ranks.world_size // local)
    if local * nodes != ranks.world_size:
        raise ConfigError(
            f"hardware.nodes={nodes} with hardware.ranks_per_node={local} are {local * nodes} ranks, this run has "
            f"{ranks.world_size}; plan for them with run.dry=true, start as many with torchrun, or run on this machine "
            "with hardware=detect"
        )


def make(config: Config, model: nn.Module, ranks: Ranks, step: Any | None) -> zero_offload.Plan:
    """The plan of this rank.

    `step` is the bound UpdateStep that says what the states of a tile are; None under offload=none.

    Raises:
        ConfigError: a tier that is too small, with what is missing and the key to change.
    """
    options: dict[str, Any] = dict(placements(config))
    if step is not None:
        options["step"] = step
    for section, key in (("offload", "host_bytes"), ("zero", "prefetch_bytes")):
        if (value := getattr(getattr(config, section), key)) is not None:
            options[key] = value
    facts = hardware(config, ranks)
    try:
        return zero_offload.plan(
            model,
            facts,
            parameter_dtype=formats.DTYPES[config.precision.parameters],
            reduce_dtype=formats.reduce_dtype(config),
            activations=config.offload.activations or checks.activations(config)[0],
            shard_count=described_ranks(facts, config, ranks),
            stage=config.zero.stage,
            tile_numel=config.offload.tile_numel,
            slots=config.offload.slots,
            resident_bytes=config.zero.resident_bytes,
            tokens=config.run.micro_batch * config.run.accumulate * config.data.sequence_length,
            accumulate=config.run.accumulate,
            no_sync=holds_back(config),
            **options,
        )
    except (ValueError, MemoryError, RuntimeError) as error:
        raise ConfigError(refusal(str(error))) from error


def described_ranks(facts: zero_offload.Hardware | None, config: Config, ranks: Ranks) -> int:
    """Ranks that the plan is for: those of this run; if dry, those of the hardware that is described."""
    return facts.ranks if config.run.dry and facts is not None else ranks.world_size


def holds_back(config: Config) -> bool:
    """Whether the gradients of all micro-batches but the last wait on their rank until the step."""
    return config.zero.stage < 2 if config.zero.no_sync is None else config.zero.no_sync


def placements(config: Config) -> Mapping[str, Any]:
    """By kind: a tier, fractions, or `auto`, as zero_offload takes them."""
    if config.offload.kind == "none":
        return dict.fromkeys(checks.STATE_KINDS, "device")
    if config.offload.kind == "auto":
        return dict.fromkeys(checks.STATE_KINDS, "auto")
    return {kind: getattr(config.offload, kind) for kind in checks.STATE_KINDS}


def refusal(text: str) -> str:
    """A sibling's refusal, with this app's keys where it names none."""
    if any(f"{section}." in text for section in ("offload", "zero", "hardware", "io")):
        return text
    if text.split("=")[0] in OffloadConfig.__dataclass_fields__:  # names its own argument, which is our key
        return f"offload.{text}"
    if "activation" in text:
        return f"{text}; change offload.activations"
    return f"{text}; change offload.parameters, offload.optimizer, zero.stage or the model's size"


def described(plan: zero_offload.Plan, config: Config, ranks: Ranks) -> str:
    """The plan as people read it: GiB per tier for each kind of state, and what the run writes to disk."""
    count = described_ranks(plan.hardware, config, ranks)
    lines = [f"plan of each of {count} ranks" if count > 1 else "plan", table(rows(plan))]
    tokens = config.run.micro_batch * config.run.accumulate * config.data.sequence_length * count
    saved, written = checkpoint_bytes(plan, config, ranks), written_bytes(plan, config, ranks)
    lines.append(
        f"{config.run.steps} steps of {tokens:,} tokens will write {written / 1e9:.1f} GB to disk in all: "
        f"{plan.setup_write_bytes * count / 1e9:.2f} GB before the first step, "
        f"{plan.write_bytes_per_step * count / 1e9:.2f} GB a step"
        + (f", {saved / 1e9:.2f} GB of checkpoints" if saved else "")
    )
    if plan.not_sharded:
        lines.append(plan.told_of_not_sharded)
    if reason := checks.auto_without_nvme(config):
        lines.append(f"offload=auto planned without nvme: {reason}; name a folder with offload.nvme_paths=[…]")
    lines.append(f"each step reads {plan.read_bytes_per_step * count / 1e9:.2f} GB back")
    if plan.step_seconds is not None:
        lines.append(f"predicted step: {plan.step_seconds:.3g} s, {plan.exposed_seconds or 0:.3g} s of it exposed")
    if plan.buffers.held_back:
        why = "zero.no_sync=true" if config.zero.no_sync else f"zero.stage={config.zero.stage}"
        held = f"{plan.buffers.held_back / GIB:.3f} GiB of the device's buffers"
        lines.append(f"{held} are whole gradients that wait for the step ({why})")
    if plan.hides_from_tokens is not None:
        lines.append(f"transfers hide from {plan.hides_from_tokens:,} tokens a step and rank")
    if plan.endurance_steps is not None:
        lines.append(f"nvme endurance: {plan.endurance_steps:,} steps")
    return "\n".join(lines)


def rows(plan: zero_offload.Plan) -> list[tuple[str, ...]]:
    """The plan's table: GiB of a rank, a row for each tier; `-` where no budget is known."""
    kinds = (*checks.STATE_KINDS, "buffers", "activations")
    lines: list[tuple[str, ...]] = [("GiB", *kinds, "total", "budget")]
    for tier in checks.TIERS:
        cells = [f"{plan.bytes_of(tier, kind) / GIB:.3f}" for kind in kinds]
        budget = plan.budgets.of(tier) if plan.budgets else None
        lines.append((tier, *cells, f"{plan.total(tier) / GIB:.3f}", "-" if not budget else f"{budget / GIB:.1f}"))
    return lines


def written_bytes(plan: zero_offload.Plan, config: Config, ranks: Ranks) -> int:
    """Bytes that all ranks write to disk in this run, checkpoints included."""
    count = described_ranks(plan.hardware, config, ranks)
    return plan.written_bytes(config.run.steps) * count + checkpoint_bytes(plan, config, ranks)


def checkpoint_bytes(plan: zero_offload.Plan, config: Config, ranks: Ranks) -> int:
    """Bytes of all the run's checkpoints: an fp32 master and the optimizer's states, each time."""
    if not config.run.checkpoint_every:
        return 0
    count = -(-config.run.steps // config.run.checkpoint_every)
    each = sum(plan.bytes_of(tier, kind) for tier in checks.TIERS for kind in ("optimizer", "parameters"))
    return count * each * described_ranks(plan.hardware, config, ranks)
