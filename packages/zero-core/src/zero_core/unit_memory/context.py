"""Holds the objects that all units of one sharded model share, and lists the stages of ZeRO as a table of residency."""

from __future__ import annotations

from dataclasses import dataclass

from ..comm.ranks import Ranks
from ..pool import Pool
from ..store import Observer, ShardStore


@dataclass(frozen=True)
class UnitContext:
    """The ranks, the store and the buffers of one sharded model, and the observer of its transfers."""

    ranks: Ranks
    store: ShardStore
    pool: Pool
    observer: Observer
    updates_later: bool = False  # on any rank, a unit's parameters may have to be waited for after a step


@dataclass(frozen=True)
class StageRow:
    """The unsharded values that a stage keeps between uses. Stages differ in the first three facts alone."""

    sharded: bool  # optimizer states (and with them the store's shards) are cut over the ranks
    keeps_parameters: bool  # unsharded parameters stay from their first use until the step
    keeps_gradients: bool  # unsharded gradients stay until the step, instead of being reduced in backward
    everywhere: bool = False  # every rank gathers and reduces every unit, whichever it runs: find_unused_parameters


STAGES = {
    0: StageRow(sharded=False, keeps_parameters=True, keeps_gradients=False),
    1: StageRow(sharded=True, keeps_parameters=True, keeps_gradients=True),
    2: StageRow(sharded=True, keeps_parameters=True, keeps_gradients=False),
    3: StageRow(sharded=True, keeps_parameters=False, keeps_gradients=False),
}
