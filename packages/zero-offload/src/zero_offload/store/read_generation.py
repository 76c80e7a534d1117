"""Writes the slabs that a durable TieredStore left behind as a checkpoint, without a TieredStore.

Owns the description of the layout that a generation keeps, which must be equal for a process to take over an earlier
one's values, and opening a generation from its manifest alone. Not here: the layout of values in it (in tiles/).
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from ..core import Segment, ShardSpec, StoreContext, kind_of, resume
from ..durable.generations import Generations
from ..errors import GenerationError
from ..layout.footprint import PlacedUnit, StorePlan
from ..layout.tile import cut, record_of
from ..memory.transfers import InFlight, Transfers
from ..protocols import NamedByteStore, UpdateStep
from ..tiles.value_access import PinnedValues
from ..timeline import Timeline
from ..uncut_step import names_of, shapes_of, step_for


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
                        f'durable= cannot keep the trained values of unit {unit.spec.name} on tier "{tier}"; place '
                        f'parameters and optimizer on "host" or "{plan.durable_on}". Parameters may also be on a GPU'
                    )
    trained = [unit.spec for unit in plan.units if unit.spec.trained]
    units = [
        {
            "place": place,
            "name": unit.spec.name,
            "numel": unit.spec.numel,
            "dtype": str(unit.spec.dtype),
            "segments": [
                [s.start, s.stop, s.group, s.name, s.shape, s.offset, *([True] if s.uncut else [])]
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
            Segment(start, stop, group, name, None if shape is None else tuple(shape), offset, *uncut)
            for start, stop, group, name, shape, offset, *uncut in unit["segments"]
        )
        dtype = getattr(torch, unit["dtype"].removeprefix("torch."))
        found[unit["place"]] = ShardSpec(unit["name"], unit["numel"], dtype, tuple(segments))
    return tuple(found)


def slab_name(folder: str | os.PathLike[str], rank: int | str) -> str:
    """A name for the slab of one rank of the run in `folder`, different from those of runs in other folders."""
    path = os.path.abspath(folder)
    return f"{os.path.basename(path)}-{zlib.crc32(path.encode()):08x}-rank{rank}"


def slabs_to_move(
    open_slab: Callable[[int], NamedByteStore | None], here: tuple[int, int] | None
) -> tuple[list[NamedByteStore], int]:
    """All slabs of a run that cannot go on in them, and the number of the first ones that `write_checkpoint` needs.

    ([], 0) if there are none, or the run can go on. open_slab: opens the slab of a rank; None: it has none. here: the
    shard ranks and the tile size of the run that wants to go on; None: it has no slabs. Raises GenerationError if a
    newer version wrote a slab, or it is damaged, and any error of open_slab.
    """
    first = open_slab(0)
    if first is None:
        return [], 0
    generations = _opened(first)
    layout = generations.found_layout()
    generations.close()
    if layout is None or here == (layout["shards"], layout["tile_numel"]):
        return [], 0
    slabs = [first]
    while (slab := open_slab(len(slabs))) is not None:
        slabs.append(slab)
    return slabs, layout["shards"]


def write_checkpoint(
    slabs: Sequence[NamedByteStore], folder: str | os.PathLike[str], *, step: UpdateStep, optimizer: Optimizer
) -> tuple[int, Any]:
    """Writes the last generation that all `slabs` have as a checkpoint, which any number of ranks, stage, placement and
    tile size can load with zero_core.checkpoint.load. Returns its step, and the result of zero_core.resume's `extra`.

    slabs: of every shard rank of the run, open, in any order. step: of the run's class. optimizer: of the run's type
    and options, over any parameters. One tile is in memory at a time. The slabs keep that generation; a later one that
    only some of them have is given up. The caller closes or removes them. Frozen parameters are not in the checkpoint.
    Raises GenerationError if slabs are missing or of another step, and CheckpointError if the folder cannot be written.
    """
    step = step_for(optimizer, step)
    opened = [_opened(slab) for slab in slabs]
    ranks = sorted((_layout(each)["rank"], place) for place, each in enumerate(opened))
    shards = _layout(opened[0])["shards"] if opened else 0
    if [rank for rank, _ in ranks] != list(range(shards)):
        raise GenerationError(
            f"the run had {shards} ranks with a shard each, and the slabs given are of ranks "
            f"{[rank for rank, _ in ranks]}: give the slab of each rank once"
        )
    opened = [opened[place] for _, place in ranks]
    number = min(each.found[0].number for each in opened)
    return resume.write_checkpoint([_Kept(each, number, step) for each in opened], folder)


def _opened(slab: NamedByteStore) -> Generations:
    return Generations(Transfers(slab, InFlight(Timeline())), {}, sync=True)


def _layout(generations: Generations) -> Any:
    layout = generations.found_layout()
    if layout is None:
        raise GenerationError("a slab without a generation was given: no step of its run was committed")
    return layout


class _Kept(PinnedValues):
    """Generation `number` of a slab, as zero_core.api.resume.write_checkpoint reads it.

    Raises GenerationError for the values of another step.
    """

    def __init__(self, generations: Generations, number: int, step: UpdateStep) -> None:
        layout = _layout(generations)
        mine, specs = names_in(step), shards_of(layout)
        if layout["step"] != mine:
            raise GenerationError(
                f"the run updated by {layout['step'][0]} with states {', '.join(layout['step'][1:])}, and the store "
                f"has step={mine[0]} with {', '.join(mine[1:])}: give the `step` and the optimizer that the run had"
            )
        was, now = layout.get("shapes", {}), shapes_in(step, specs)
        if other := next((name for name in was | now if was.get(name) != now.get(name)), None):
            raise GenerationError(
                f"the states of {other} had shapes {was.get(other)} in the run, and have {now.get(other)} with the "
                "optimizer given: give it the options that the run had"
            )
        generations.adopt(number, any_layout=True)
        generations.pin()
        units = [_placed(i, spec, layout, step) for i, spec in enumerate(specs)]
        super().__init__(units, step, layout["alignment"], generations)
        self.blob, self.segments = generations.blob or b"", [spec.segments for spec in specs]

    def state_names_of(self, segment: Segment) -> Sequence[str]:
        return names_of(self._step, segment)

    def state_shapes_of(self, segment: Segment) -> Mapping[str, tuple[int, ...]]:
        return shapes_of(self._step, segment)


def _placed(i: int, spec: ShardSpec, layout: Any, step: UpdateStep) -> PlacedUnit:
    tiles = cut(i, spec, layout["tile_numel"])
    records = [
        record_of(step, t.numel, spec.dtype, layout["alignment"], t.uncut) if t.trainable else None for t in tiles
    ]
    return PlacedUnit(spec, tiles, tuple(records), (), (), ())  # no tiers: `PinnedValues` reads from the generation
