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
from typing import TYPE_CHECKING, ClassVar

from ..errors import CollectiveError
from .outputs import outside_transforms
from .residency import Residency, UnitMemory
from .unit import Unit

if TYPE_CHECKING:
    from .hooks import Engine

__all__ = ["Rounds"]

_DONE, _FAILED, _FIRST = 0, -1, 1
_KIND = "uneven"  # of passes, in `Engine.orders`, where ranks have the same of it


class Rounds:
    """Of one `zero_core.uneven` block, which names `models`. `members`: those whose units are gathered from several
    ranks."""

    entered: ClassVar[Rounds | None] = None  # the block that is open in this process: models that it does not name ask

    def __init__(self, models: Sequence[Engine]) -> None:
        self.named = {model.uses for model in models}
        self.members = members = [model for model in models if model.ranks.shard.size > 1]
        self._ranks = (members or models)[0].ranks
        self._units = [(member, unit) for member in members for unit in member.units]
        self._nodes = [(member, node.index) for member in members for node in member.nodes]
        self._unit_numbers = {unit: number for number, (_, unit) in enumerate(self._units)}
        self._node_numbers = {each: number for number, each in enumerate(self._nodes)}
        self._plan: list[int] = []
        self._past: list[bool] = []  # of each gather of the plan that is over for this rank, whether this rank used it
        self._begun = 0  # gathers of the plan that were begun
        self._node: int | None = None  # what all ranks began together

    @outside_transforms
    def begin(self, member: Engine, node: int) -> None:
        """This rank begins a pass. Returns when every rank that is not done begins one."""
        statement = _FIRST + self._node_numbers[member, node]
        while self._wanted(self._say(statement)):
            pass

    @outside_transforms
    def bring(self, unit: Unit) -> None:
        """Begin to gather a unit that this rank uses next, unless its memory is there. Then gather ahead."""
        if not unit.residency.unsharded:
            number = self._unit_numbers[unit]
            while number not in self._plan[len(self._past) :]:
                self._say(_FIRST + len(self._nodes) + number)
            self._serve(self._plan.index(number, len(self._past)))
            unit.prefetch()
            self._past.append(True)
            self._begun = max(self._begun, len(self._past))
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
        while self.members and any(statement != _DONE for statement in self._say(_DONE)):
            pass

    @outside_transforms
    def fail(self) -> None:
        """This rank leaves by an exception: the others are told at what they say next.

        If this rank cannot gather any more, because its store failed, the others find that its calls cross theirs.
        """
        if self.members:
            with suppress(Exception):
                self.finish()
            self._begun = len(self._plan)
            self._past += [False] * (self._begun - len(self._past))
            self._tell(_FAILED)

    def _say(self, statement: int) -> list[int]:
        """One round. Makes the next plan; returns what each rank said."""
        said, used = self._tell(statement)
        if _FAILED in said:
            raise CollectiveError(
                f"rank {said.index(_FAILED)} of {len(said)} left the block of zero_core.uneven by an exception, which "
                f"it raises itself; rank {self._ranks.rank} cannot gather units without it, and leaves too"
            )
        self._learn([self._units[number] for number, count in zip(self._plan, used, strict=True) if count])
        self._plan = list(dict.fromkeys(self._wanted(said)))
        if not self._plan:
            begun = {number - _FIRST for number in said if number != _DONE}
            self._node = begun.pop() if len(begun) == 1 else None
            self._plan = self._foreseen()
        self._past, self._begun = [], 0
        return said

    def _wanted(self, said: Sequence[int]) -> list[int]:
        """Units that ranks want, of what each rank said."""
        first = _FIRST + len(self._nodes)
        return [statement - first for statement in said if statement >= first]

    def _tell(self, statement: int) -> tuple[list[int], list[int]]:
        """Take part in what is left of the plan, and tell. What each rank says; how many used each gather of the plan.

        A sum over ranks in which each has a place of its own.
        """
        self.finish()
        said = [statement if rank == self._ranks.rank else 0 for rank in range(self._ranks.size)]
        numbers = self._ranks.numbers([float(number) for number in (*said, *self._past)])
        total = [int(number) for number in self._ranks.sum_everywhere(numbers, "what each rank does next").tolist()]
        return total[: len(said)], total[len(said) :]

    def _learn(self, used: Sequence[tuple[Engine, Unit]]) -> None:
        """What some rank used of a plan will be in the plan of the next such pass."""
        if self._node is not None:
            member, index = self._nodes[self._node]
            member.orders[index, _KIND] += [unit.index for owner, unit in used if owner is member]

    def _foreseen(self) -> list[int]:
        """What the last such pass used. The record of this one begins."""
        if self._node is None:
            return []
        member, index = self._nodes[self._node]
        last = member.orders.get((index, _KIND), [])
        member.orders[index, _KIND] = []
        return [self._unit_numbers[member.units[u]] for u in last]

    def _serve(self, stop: int) -> None:
        """Take part in the gathers before place `stop` of the plan that are not over, and drop what they gather."""
        while len(self._past) < stop:
            memory: UnitMemory = self._units[self._plan[len(self._past)]][1]
            self._past.append(False)
            if self._begun < len(self._past):
                self._begun += 1
                if memory.residency is not Residency.SHARDED:  # what this rank has of it stays
                    memory = memory.another()
                memory.prefetch()
            self._gather_ahead()
            memory.reshard()

    def _gather_ahead(self) -> None:
        """As `Uses.prefetch`, which foresees one rank's forward: as many as the bytes allow, one at least."""
        under_way = sum(self._units[number][1].nbytes for number in self._plan[len(self._past) : self._begun])
        while self._begun < len(self._plan):
            member, unit = self._units[self._plan[self._begun]]
            if unit.residency is not Residency.SHARDED:
                return
            allowed = member.uses.turn.prefetch_bytes
            left = allowed - under_way
            if left <= 0 or (left < unit.nbytes and under_way):
                if allowed > 0:
                    unit.foresee()
                return
            unit.prefetch()
            under_way += unit.nbytes
            self._begun += 1
