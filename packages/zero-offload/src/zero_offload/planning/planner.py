"""Plans placements, traffic and step time from a model's sizes and a hardware description.

Owns `plan`, and `Plan` with its printed rows. Not here: the choices (in auto_placement.py), refusals (in
budgets.py). Pure: allocates nothing, touches no device.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..layout.footprint import KINDS, StorePlan
from ..layout.store_plan import MINIMUM_SLOTS
from ..layout.tile import Placement, check_update_share, device_share
from ..protocols import UpdateStep
from ..tier import Tier, tiers_with
from .auto_placement import best, choose_batch, given_placements
from .batches import Batch, batch_of
from .budgets import Budgets, PlanError, check, held_back_bytes
from .hardware import GIB, Hardware, bytes_shown
from .model_sizes import ModelSizes, dtypes_of
from .roofline import Prediction, predict
from .traffic import Account, AdamLayout, Held, Shape, account, loads_of

MIB = 1 << 20


@dataclass(frozen=True)
class Plan:
    """Placements, bytes and times of one rank."""

    placements: Mapping[str, Placement]  # by kind, as `TieredStore` takes them
    activations: tuple[str, ...]  # a unit: keep, recompute, host or nvme
    shape: Shape
    store: StorePlan  # the tiles and memory that a `TieredStore` of this plan reserves
    account: Account
    held: Held
    held_back: int  # bytes of the device's buffers: whole gradients that wait on their rank until the step
    budgets: Budgets | None  # None: planned without a hardware description, so nothing is refused
    hardware: Hardware | None
    prediction: Prediction | None
    batch: Batch

    @property
    def tokens(self) -> int:
        """Tokens of one rank's step."""
        return self.batch.tokens

    @property
    def rows(self) -> int | None:
        """The argument of `offload_activations(rows=)`; None: all rows, or no unit recomputes."""
        cut = self.batch.parts > 1 and any(policy != "keep" for policy in self.activations)
        return self.batch.rows if cut else None

    @property
    def tokens_at_once(self) -> int | None:
        """The argument of `offload_activations(tokens=)`; None: all tokens of a row, or no unit recomputes."""
        cut = self.batch.token_parts > 1 and any(policy != "keep" for policy in self.activations)
        return self.batch.tokens_at_once if cut else None

    @property
    def tile_numel(self) -> int:
        """Elements of a tile."""
        return self.shape.tile_numel

    @property
    def slots(self) -> int | None:
        """The argument `slots` of `TieredStore`; None where no tile passes through slots."""
        slots = max(self.store.state_slots, self.store.gradient_slots)
        return max(MINIMUM_SLOTS, slots) if slots else None

    @property
    def slots_told(self) -> str | None:
        """Text to print: the slots of states, their host memory, and the share of states that stays in them.

        None: no states pass through slots.
        """
        stored = sum(self.bytes_of(tier, "optimizer") for tier in self.shape.tiers if tier.stored)
        if not stored:
            return None
        slots = self.store.state_slots
        tiles = sum(run.count * len(run.unit.stored_records()) for run in self.store.runs)
        taken = bytes_shown(slots * self.store.state_slot_bytes)
        stay = 1 - sum(moved["optimizer_read"] for moved in self.account.moved.values()) / stored
        ways = f"least: slots={MINIMUM_SLOTS}, all: slots={max(MINIMUM_SLOTS, tiles)}"
        return f"{slots} of {tiles} tiles, {taken}; {stay:.0%} of the states stay in them ({ways})"

    @property
    def needs_store(self) -> bool:
        """False if everything stays on a discrete device: then call `zero_core.shard` without a store."""
        shared = self.budgets is None or self.budgets.shared
        return shared or any(device_share(placement) < 1 for placement in self.placements.values())

    def bytes_of(self, tier: str, kind: str) -> int:
        """Bytes of `kind` (parameters, gradients, optimizer, buffers, activations) on `tier`, not compressed."""
        tiers = self.shape.tiers
        if tier not in tiers or kind not in (*KINDS, "activations"):
            raise KeyError(f"no figure for {kind!r} on {tier!r}; tiers {tiers}, kinds {(*KINDS, 'activations')}")
        return self.held.get((tier, kind), 0)

    def total(self, tier: str) -> int:
        """Bytes that one rank has on a tier, of all kinds, buffers and activations included."""
        return sum(self.bytes_of(tier, kind) for kind in (*KINDS, "activations"))

    @property
    def activation_bytes_per_step(self) -> int:
        """Bytes of checkpoints that one step writes to nvme and reads again: an estimate from the model's facts."""
        return self.bytes_of("nvme", "activations") * self.shape.accumulate

    @property
    def read_bytes_per_step(self) -> int:
        """Upper bound on bytes this rank reads from nvme in one step: values that are still in a slot are not read."""
        return self.account.read_bytes("nvme") + self.activation_bytes_per_step

    @property
    def write_bytes_per_step(self) -> int:
        """Bytes this rank writes to nvme in one step. Exact, except that activations are an estimate, and an upper
        bound where units are updated one by one in backward."""
        return self.account.write_bytes("nvme") + self.activation_bytes_per_step

    @property
    def durable_bytes(self) -> int:
        """Bytes of nvme that `TieredStore(durable=True)` takes besides the plan's own bytes there."""
        durable = replace(self.store, durable_on=Tier.NVME)
        return durable.extent_bytes("nvme") - self.store.extent_bytes("nvme")

    @property
    def setup_write_bytes(self) -> int:
        """Bytes this rank writes to nvme once, before the first step."""
        return self.account.moved["nvme"]["setup"]

    def written_bytes(self, steps: int) -> int:
        """Bytes this rank writes to nvme in a run of `steps`."""
        return self.setup_write_bytes + steps * self.write_bytes_per_step

    @property
    def step_seconds(self) -> float | None:
        """Predicted seconds of a step, or None if the hardware's rates are not known."""
        return self.prediction.step_seconds if self.prediction else None

    @property
    def exposed_seconds(self) -> float | None:
        """Predicted seconds of a step in which the training thread waits, or None if rates are not known."""
        return self.prediction.exposed_seconds if self.prediction else None

    @property
    def endurance_steps(self) -> int | None:
        """Steps until the rated writes of an nvme path are used up; None: no rating, or nothing is written."""
        if self.hardware is None or self.hardware.nvme_endurance_tb is None or not self.write_bytes_per_step:
            return None
        rated = self.hardware.nvme_endurance_tb * 1e12 * self.hardware.paths_per_rank
        return int(max(0.0, rated - self.setup_write_bytes) / self.write_bytes_per_step)

    def table(self) -> list[tuple[str, ...]]:
        """Rows to print: a header, then per tier its bytes by kind, their total and the budget ("-": none given).

        The header names the unit: GiB, or MiB if no tier has as much as 0.1 GiB.
        """
        columns = (*KINDS, "activations")
        small = max(self.total(tier) for tier in self.shape.tiers) < 0.1 * GIB
        name, unit = ("MiB", MIB) if small else ("GiB", GIB)
        rows: list[tuple[str, ...]] = [(name, *columns, "total", "budget")]
        for tier in self.shape.tiers:
            budget = self.budgets.of(tier) if self.budgets else None
            figures = (*(self.bytes_of(tier, kind) for kind in columns), self.total(tier))
            cells = [f"{nbytes / unit:.3f}" for nbytes in figures]
            rows.append((tier, *cells, f"{budget / unit:.1f}" if budget else "-"))
        return rows

    def lines(self) -> list[str]:
        """Returns `table` as lines of text with aligned columns."""
        rows = self.table()
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in rows]

    def facts(self) -> list[tuple[str, str]]:
        """(name, value) of the known facts about traffic, time and endurance."""
        rows = [
            ("nvme read per step", f"{self.read_bytes_per_step / GIB:.2f} GiB"),
            ("nvme written per step", f"{self.write_bytes_per_step / GIB:.2f} GiB"),
            ("nvme written by setup", f"{self.setup_write_bytes / GIB:.2f} GiB"),
        ]
        if self.slots_told is not None:
            rows.append(("slots", self.slots_told))
        if self.shape.longest > 1:
            rows.append(("trained elements of the rank with most", f"{self.shape.longest:.3f} of the mean"))
        if self.hardware is not None and not self.hardware.shares_host:
            rows.insert(0, ("reserved of a device", self.hardware.reserved))
        if self.rows:
            rows.append(("rows at a time in a unit", f"{self.rows} of {self.batch.micro_batch}"))
        if self.tokens_at_once:
            rows.append(("tokens of a row at a time in an MLP", f"{self.tokens_at_once} of {self.batch.row_tokens}"))
        for tier in self.account.moved:
            if tier != "nvme" and self.total(tier):
                moved = (self.account.read_bytes(tier), self.account.write_bytes(tier))
                rows.append((f"{tier} read, written per step", " GiB, ".join(f"{n / GIB:.2f}" for n in moved) + " GiB"))
        if self.prediction:
            rows.append(("predicted step", f"{self.prediction.step_seconds:.3g} s"))
            rows.append(("exposed of it", f"{self.prediction.exposed_seconds:.3g} s"))
        if self.endurance_steps is not None:
            rows.append(("nvme endurance", f"{self.endurance_steps} steps"))
        elif self.hardware is not None and self.hardware.nvme_endurance_tb is not None:
            rows.append(("nvme endurance", "no step writes"))
        return rows


def plan(
    model: nn.Module | ModelSizes | Sequence[int],
    hardware: Hardware | None = None,
    *,
    parameters: str | Placement = "auto",
    gradients: str | Placement = "auto",
    optimizer: str | Placement = "auto",
    activations: str | Sequence[str] = "auto",
    step: UpdateStep | None = None,
    parameter_dtype: torch.dtype | None = None,
    reduce_dtype: torch.dtype | None = None,
    shard_count: int | None = None,
    replicas: int = 1,
    stage: int = 3,
    tile_numel: int = 1 << 22,
    slots: int | None = None,
    alignment: int = 4096,
    prefetch_bytes: int = 128 << 20,
    resident_bytes: int = 0,
    expert_bytes: int | None = 64 << 20,
    units: Sequence[type[nn.Module]] | None = None,
    tokens: int = 0,
    accumulate: int = 1,
    micro_batch: int | None = None,
    rows: int | str | None = None,
    tokens_at_once: int | str | None = None,
    whole_logits: bool = False,
    no_sync: bool = False,
    find_unused_parameters: bool = False,
    host_bytes: int | None = None,
    secondary_shards: bool | int = False,
    rank: int | None = None,
    durable: bool = False,
    update_share: float | None = None,
) -> Plan:
    """Plans one rank's memory and step.

    `model`: a module (on any device, meta too), `ModelSizes`, or elements per unit. Each placement is a tier, fractions
    of the tiles, or "auto", which leaves it to the planner: it uses the device, host and nvme, and no tier of
    `hardware.tiers`. `step`: a bound `UpdateStep`, which defines the optimizer states of a tile; without it Adam in
    fp32. `units`, `prefetch_bytes`, `resident_bytes`, `expert_bytes`, `stage`, `secondary_shards`,
    `find_unused_parameters`, dtypes: as given to `zero_core.shard`. `shard_count`: the ranks that share the shards;
    None: the ranks of `hardware` divided by `replicas`, the number of groups of such ranks. At stage 0 all ranks are
    replicas. `secondary_shards` as a number: the ranks of a machine, used without `hardware`. `rank`: the rank, below
    `shard_count`, whose shards are planned where an optimizer needs whole matrices; None: the rank that has most.
    `tokens`: of one rank's step, over its `accumulate` micro-batches. `no_sync`: all micro-batches except the last run
    inside `zero_core.no_sync`, so that each rank keeps whole gradients in fp32. If one gradient reaches the store in a
    step, the plan has no memory for a sum, and a store of this plan refuses a second gradient. `rows`: as
    `offload_activations` takes it, of the `micro_batch` rows of a micro-batch; "auto": of all, half, a quarter and so
    on, the number that fits and is predicted to be fastest. `tokens_at_once`: as `offload_activations(tokens=)` takes
    it; "auto": all tokens of a row, and where that does not fit with any allowed number of `rows`, the largest part
    that does: a half, a quarter and so on, down to 256. `whole_logits`: the loss needs all logits at once also with
    `rows` or `tokens_at_once`, as under a loss scale, or where it is not `torch.nn.functional.cross_entropy`.
    `durable`: for a durable store, which writes each updated tile in each step; the plan's bytes do not include
    `durable_bytes`. `update_share`: the part of the tiles with states outside of a discrete device that the device
    updates, rounded in each unit; None: that of `hardware`. `host_bytes` overrides this rank's share of the host's
    memory. Without `hardware` nothing is refused, and "auto" means host, or all rows and tokens.

    Raises `PlanError` where a budget is too small, which names the tier, the bytes missing and ways out; ValueError for
    an impossible placement.

    Examples:
        >>> import torch, zero_offload
        >>> machine = zero_offload.Hardware(host_gib=8, nvme_gib=100)
        >>> planned = zero_offload.plan(torch.nn.Linear(4096, 4096), machine, optimizer="nvme", tokens=512)
        >>> planned.bytes_of("nvme", "optimizer") / planned.bytes_of("host", "parameters")
        2.0
    """
    tiers, discrete = tiers_with(hardware.tiers if hardware else ()), hardware is not None and not hardware.shares_host
    given = given_placements(tiers, discrete, parameters=parameters, gradients=gradients, optimizer=optimizer)
    share = (hardware.update_share if hardware and discrete else 0.0) if update_share is None else update_share
    check_update_share(share)
    if share and hardware is not None and not discrete:
        raise ValueError(f"update_share={share} needs a device with memory of its own: leave it out on a CPU")
    batch = batch_of(tokens, accumulate, micro_batch, rows, tokens_at_once, whole_logits, activations)
    own, reduced = dtypes_of(model)
    dtype = parameter_dtype or own
    ranks = shard_count or (hardware.ranks // replicas if hardware else 1)
    nodes, local = (hardware.nodes, hardware.ranks_per_node) if hardware else (1, 1)
    if hardware is None and secondary_shards > 1:
        nodes, local = ranks // secondary_shards, int(secondary_shards)
    if secondary_shards and (stage < 3 or replicas > 1 or min(nodes, local) < 2):
        known = f"{nodes} x {local} ranks" if hardware or secondary_shards > 1 else "no hardware"
        raise ValueError(
            "secondary_shards=True needs stage=3, replicas=1, and 2 or more machines with 2 or more ranks each, and "
            f"this plan has stage={stage}, replicas={replicas} and {known}: leave secondary_shards out, or set nodes= "
            "and ranks_per_node= of the Hardware"
        )
    shape = Shape(
        parameter_dtype=dtype,
        reduce_dtype=reduce_dtype or parameter_dtype or reduced,
        shard_count=ranks if stage else 1,
        replicas=replicas if stage else ranks * replicas,
        ranks_per_machine=local if nodes > 1 else 1,
        stage=stage,
        tile_numel=tile_numel,
        alignment=alignment,
        accumulate=accumulate,
        secondary_shards=bool(secondary_shards),
        no_sync=no_sync,
        find_unused_parameters=find_unused_parameters,
        prefetch_bytes=prefetch_bytes,
        resident_bytes=resident_bytes,
        step=AdamLayout() if step is None else step,
        discrete=discrete,
        tiers=tiers,
        durable=durable,
        update_share=share,
    )
    budgets = None if hardware is None else Budgets.of_rank(hardware, host_bytes)
    cut, everybody = expert_bytes if stage == 3 else None, shape.shard_count * shape.replicas
    cast = parameter_dtype is not None
    sizes = ModelSizes.of(model, units, dtype, cast, expert_bytes=cut, ranks=everybody, step=step)
    loads = loads_of(sizes, shape)
    rank = loads.index(max(loads)) if rank is None else rank
    if not 0 <= rank < shape.shard_count:
        raise ValueError(f"rank={rank} of shard_count={shape.shard_count}: it is from 0 to {shape.shard_count - 1}")
    shape = replace(shape, rank=rank, longest=max(loads) * shape.shard_count / max(1, sum(loads)))

    def placed(batch: Batch, whole: bool) -> Plan:
        store, placements, policies, held = best(sizes, shape, budgets, given, batch, activations, slots, whole=whole)
        recomputes = any(policy != "keep" for policy in policies)
        counted = account(store, shape, {i for i, unit in enumerate(sizes.units) if unit.again and recomputes})
        held_back, prediction = held_back_bytes(store, shape), None
        if budgets is not None and hardware is not None:
            check(held, held_back, budgets, hardware, shape)
            if batch.tokens:
                prediction = predict(sizes, shape, store, counted, held, hardware, batch=batch, activations=policies)
        return Plan(placements, policies, shape, store, counted, held, held_back, budgets, hardware, prediction, batch)

    def planned(batch: Batch) -> Plan:
        """The plan of a batch whose `rows` and `tokens_at_once` are chosen."""
        both = discrete and not given and not durable and all(unit.trained for unit in sizes.units)
        orders = (False, True) if both else (False,)
        return min((placed(batch, whole) for whole in orders), key=lambda plan: plan.step_seconds or math.inf)

    if hardware is None:
        return planned(batch)
    return choose_batch(planned, batch, rows, tokens_at_once)


def fits(model: nn.Module | ModelSizes | Sequence[int], hardware: Hardware, **options: Any) -> bool:
    """Whether `plan` with the same arguments accepts."""
    try:
        plan(model, hardware, **options)
    except PlanError:
        return False
    return True
