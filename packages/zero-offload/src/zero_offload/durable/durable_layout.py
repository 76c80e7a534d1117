"""Describes the layout of durable values, which must be equal for a process to take over an earlier one's. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..core import Segment, ShardSpec, StoreContext, kind_of
from ..errors import GenerationError
from ..layout.footprint import StorePlan
from ..protocols import UpdateStep
from ..uncut_step import shapes_of


def generation_layout(
    plan: StorePlan, step: UpdateStep, optimizer: torch.optim.Optimizer, context: StoreContext
) -> dict[str, Any]:
    """The layout of a process, equal to that of the process before it. Placements between host and nvme may differ.

    Raises GenerationError for values on another tier, and for states on a discrete device.
    """
    for unit in plan.units:
        for tile, record, parameter, _, state in unit.rows():
            for tier in (parameter, *((state,) if record is not None else ())):
                elsewhere = tier.stored and tier != plan.durable_on
                if tile.trainable and (elsewhere or unit.whole):
                    raise GenerationError(
                        f"a durable store cannot have trained values on {tier} (those of {unit.spec.name}), only in "
                        f'host memory or on {plan.durable_on}; place parameters and optimizer on "host" or '
                        f'"{plan.durable_on}", or on a GPU the parameters alone'
                    )
    trained = [unit.spec for unit in plan.units if unit.spec.trained]
    units = [
        {
            "place": place,
            "name": unit.spec.name,
            "numel": unit.spec.numel,
            "dtype": str(unit.spec.dtype),
            "segments": [
                [s.start, s.stop, s.group, s.name, s.shape and list(s.shape), s.offset, *([True] if s.uncut else [])]
                for s in unit.spec.segments
            ],
        }
        for place, unit in enumerate(plan.units)
        if unit.spec.trained
    ]
    return {
        "trained units": len(trained),
        "trained elements": sum(spec.numel for spec in trained),
        "dtypes": sorted({str(spec.dtype) for spec in trained}),
        "tile_numel": plan.tile_numel,
        "optimizer": kind_of(optimizer),
        "step": names_in(step),
        "shards": context.shard_count,
        "rank": context.rank,
        "alignment": plan.alignment,
        "units": units,
    } | ({"shapes": shapes} if (shapes := shapes_in(step, trained)) else {})


def names_in(step: UpdateStep) -> list[str]:
    """The step's class, with the class of a step inside it, then the names of its states."""
    inside = getattr(step, "step", None)
    kind = type(step).__name__ + (f"({type(inside).__name__})" if inside is not None else "")
    return [kind, *step.state_names()]


def shapes_in(step: UpdateStep, specs: Sequence[ShardSpec]) -> dict[str, dict[str, list[int]]]:
    """Maps a parameter's name to the shapes of its states that differ from its own, in JSON's types."""
    found = {s.name: shapes_of(step, s) for spec in specs for s in spec.segments}
    return {name: {state: list(shape) for state, shape in each.items()} for name, each in found.items() if each}


def shards_of(layout: Mapping[str, Any]) -> tuple[ShardSpec, ...]:
    """The shards whose values a generation of this layout has. Shards that are not trained have no elements."""
    last = max((unit["place"] for unit in layout["units"]), default=-1)
    found = [ShardSpec("not trained", 0, torch.float32, (), trained=False)] * (last + 1)
    for unit in layout["units"]:
        segments = (
            Segment(start, stop, group, name, shape and tuple(shape), offset, *uncut)
            for start, stop, group, name, shape, offset, *uncut in unit["segments"]
        )
        dtype = getattr(torch, unit["dtype"].removeprefix("torch."))
        found[unit["place"]] = ShardSpec(unit["name"], unit["numel"], dtype, tuple(segments))
    return tuple(found)
