"""Forwards that differ between ranks: agrees with the other ranks on the units that all of them gather next.

Owns the plan that the ranks agreed on and this rank's place in it. What a unit does with its memory is `residency`'s.

[Note: ranks that differ]
A gather needs every rank of the group. Inside `zero_core.uneven` a rank gathers a unit only after all ranks know of it.
They agree in rounds, each of one all-reduce in which every rank says what it does next:

    "I begin a pass of module m"    "I want unit u"    "I am done"    "I failed"

From what they said, all ranks make the same plan, which is a list of units. Each rank then takes part in all gathers of
the plan, in its order, before it says anything again. It keeps the units that its own forward wants, and drops others.

    some rank wants a unit                     the plan is the units that are wanted
    all that are not done begin module m       the plan is what some rank used in the last such pass

So ranks call the same collectives in the same order, whatever their forwards do. The first pass has a round for every
unit. Later passes have one each, as long as they use the same units in the same order. Rank 1 is done after one pass:

    rank 0   begin | a | b | c | begin | a b c         | begin | a b c         | done
    rank 1   begin | a | b | c | done  | a b c dropped | done  | a b c dropped | done

Gathers of a plan begin ahead, as many as the prefetch budget allows, on ranks that use the units and on those that drop
them. A rank that has a unit's memory already, which it kept, gathers it into scratch memory for the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import ClassVar, Protocol

from ..comm.ranks import Ranks
from ..errors import CollectiveError
from ..store import ShardStore
from .attaching import Node
from .outputs import outside_transforms
from .residency import Residency, UnitMemory
from .unit import Unit

__all__ = ["Member", "Rounds"]

_DONE, _FAILED, _FIRST = 0, -1, 1


class Member(Protocol):
    """A sharded model whose forwards may differ: its engine."""

    units: Sequence[Unit]
    nodes: list[Node]
    ranks: Ranks
    store: ShardStore
    plans: dict[int, list[int]]  # node -> units that its last pass gathered, the same on every rank

    @property
    def prefetch_bytes(self) -> int: ...


class Rounds:
    """Of one `zero_core.uneven` block. `members`: those of its models whose units are gathered from several ranks."""

    entered: ClassVar[Rounds | None] = None  # the block that is open

    def __init__(self, models: Sequence[Member]) -> None:
        self.members = members = [model for model in models if model.ranks.shard.size > 1]
        self._ranks = (members or models)[0].ranks
        self._units = [(member, unit) for member in members for unit in member.units]
        self._nodes = [(member, node.index) for member in members for node in member.nodes]
        self._unit_numbers = {unit: number for number, (_, unit) in enumerate(self._units)}
        self._node_numbers = {each: number for number, each in enumerate(self._nodes)}
        self._plan: list[int] = []
        self._begun = self._passed = 0  # gathers of the plan that were begun, and those that are over for this rank
        self._used: set[int] = set()  # places in the plan of gathers that this rank used
        self._record: list[int] = []  # units that some rank used, since a pass began
        self._node: int | None = None  # what all ranks began together
        self._going_on = bool(members)  # some rank was not done in the last round

    @outside_transforms
    def begin(self, member: Member, node: int) -> None:
        """This rank begins a pass. Returns when every rank that is not done begins one."""
        wanted = True
        while wanted:
            wanted = self._say(_FIRST + self._node_numbers[member, node])

    @outside_transforms
    def bring(self, unit: Unit) -> None:
        """Begin to gather a unit that this rank uses next, unless its memory is there. Then gather ahead."""
        if not unit.residency.whole:
            number = self._unit_numbers[unit]
            while number not in self._plan[self._passed :]:
                self._say(_FIRST + len(self._nodes) + number)
            place = self._plan.index(number, self._passed)
            self._serve(place)
            unit.prefetch()
            self._used.add(place)
            self._passed, self._begun = place + 1, max(self._begun, place + 1)
        self._gather_ahead()

    @outside_transforms
    def finish(self) -> None:
        """This rank uses nothing more of the plan: it takes part in what is left."""
        self._serve(len(self._plan))

    @outside_transforms
    def serve(self) -> None:
        """This rank is done: it takes part in the gathers of the others until they are done too."""
        for member in self.members:
            member.ranks.side.go_on()
        while self._going_on:
            self._say(_DONE)

    @outside_transforms
    def fail(self) -> None:
        """This rank leaves by an exception: the others are told at what they say next.

        If this rank cannot gather any more, because its store failed, the others find that its calls cross theirs.
        """
        if self.members:
            with suppress(Exception):
                self.finish()
            self._begun = self._passed = len(self._plan)
            self._tell(_FAILED)

    def _say(self, statement: int) -> bool:
        """One round. Makes the next plan; returns whether some rank wants a unit."""
        said, used = self._tell(statement)
        if _FAILED in said:
            raise CollectiveError(
                f"rank {said.index(_FAILED)} of {len(said)} left the block of zero_core.uneven by an exception, which "
                f"it raises itself; rank {self._ranks.rank} cannot gather units without it, and leaves too"
            )
        self._record += [number for number, count in zip(self._plan, used, strict=True) if count]
        wanted = [number - _FIRST - len(self._nodes) for number in said if number >= _FIRST + len(self._nodes)]
        if wanted:
            self._plan = list(dict.fromkeys(wanted))
        else:
            self._learn()
            begun = {number - _FIRST for number in said if number != _DONE}
            self._going_on = bool(begun)
            self._node = begun.pop() if len(begun) == 1 else None
            self._plan = self._foreseen()
        self._begun = self._passed = 0
        self._used.clear()
        return bool(wanted)

    def _tell(self, statement: int) -> tuple[list[int], list[int]]:
        """Take part in what is left of the plan, and tell. What each rank says; how many used each gather of the plan.

        A sum over ranks in which each has a place of its own.
        """
        self.finish()
        said = [statement if rank == self._ranks.rank else 0 for rank in range(self._ranks.size)]
        used = [place in self._used for place in range(len(self._plan))]
        numbers = self._ranks.numbers([float(number) for number in (*said, *used)])
        total = [int(number) for number in self._ranks.sum_everywhere(numbers, "what each rank does next").tolist()]
        return total[: len(said)], total[len(said) :]

    def _learn(self) -> None:
        """The pass is over: its gathers are the plan of the next one, but for those that nobody used."""
        if self._node is not None:
            member, index = self._nodes[self._node]
            mine = [self._units[number] for number in self._record]
            member.plans[index] = [unit.index for owner, unit in mine if owner is member]
        self._record = []

    def _foreseen(self) -> list[int]:
        if self._node is None:
            return []
        member, index = self._nodes[self._node]
        return [self._unit_numbers[member.units[u]] for u in member.plans.get(index, ())]

    def _serve(self, stop: int) -> None:
        """Take part in the gathers before place `stop` of the plan that are not over, and drop what they gather."""
        while self._passed < stop:
            memory: UnitMemory = self._units[self._plan[self._passed]][1]
            self._passed += 1
            if self._begun < self._passed:
                self._begun = self._passed
                if memory.residency is not Residency.SHARDED:  # what this rank has of it stays
                    memory = memory.another()
                memory.prefetch()
            self._gather_ahead()
            memory.reshard()

    def _gather_ahead(self) -> None:
        """As `Uses.prefetch`, which foresees one rank's forward: as many as the bytes allow, one at least."""
        under_way = sum(self._units[number][1].nbytes for number in self._plan[self._passed : self._begun])
        while self._begun < len(self._plan):
            member, unit = self._units[self._plan[self._begun]]
            if unit.residency is not Residency.SHARDED:
                return
            left = member.prefetch_bytes - under_way
            if left <= 0 or (left < unit.nbytes and under_way):
                if member.prefetch_bytes > 0:
                    member.store.prefetch(unit.index)
                return
            unit.prefetch()
            under_way += unit.nbytes
            self._begun += 1
