"""Moves a model's values out of the shards that it is in already: into other shards, or into plain parameters.

Owns which of them are given up, and puts the model back into them if the other side fails. Not here: the new place of
the values (in assemble.py and shard.py).
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from types import TracebackType

import torch
from torch import Tensor, nn

from ..errors import AlreadyShardedError, StoreError, ZeroError, listed, noted
from ..hooks.engine import Engine
from ..hooks.parameter_access import Left, connect, disconnect, leave_behind, places_of
from ..model.aliases import Follower
from ..store import ShardStore
from ..tensors.inner_tensors import named_parts
from ..unit_memory.unit import Unit
from ..unit_memory.unit_gradient import Leftover
from ..util.freed_memory import give_back_freed_memory


class Earlier:
    """A context in which the values of a model leave the shards that it is in. Without shards, nothing happens.

    Inside, no hook is on the model, and its parameters have no memory and their own classes. On an exception, restores
    the old shards. Otherwise closes them, and a later use of them raises an error with the reason, `why`.
    """

    def __init__(self, model: nn.Module, call: str, why: str) -> None:
        """Raises AlreadyShardedError where the shards are not those of all of the model, and of one model alone."""
        self._call, self._why = call, why
        places = places_of(model)
        if gone := [place.name for place in places if isinstance(place, Left)]:
            raise AlreadyShardedError(
                f"the values of {listed(gone)} were lost when the {type(places[0].engine.model).__name__} was sharded "
                f"again without them: build their module again, and load its values, before zero_core.{call}"
            )
        engines = {id(place.engine): place.engine for place in places}
        self.engine: Engine | None = places[0].engine if places else None
        units = () if self.engine is None else self.engine.units
        self._mine = {id(part.tensor) for part in named_parts(model)}
        self._places: dict[int, list[tuple[Unit, int]]] = {}  # by the ids of parameters, in the order of their rows
        for unit in units:
            for k, p in enumerate(unit.wholes):
                self._places.setdefault(id(p), []).append((unit, k))
        # Of each unit, the elements that nobody has taken of each parameter that the model has.
        self._waiting = [
            {k: slot.numel for k, slot in enumerate(unit.layout.slots) if id(unit.wholes[k]) in self._mine}
            for unit in units
        ]
        self._spare: list[int] = []  # indices of units whose values were all taken
        self._given_up: set[int] = set()  # of those that were given up, also if they have memory again
        self._away: set[int] = set()  # of those that have none
        self._lost: list[str] = []  # names of parameters
        self._moved = False  # somebody else has values from here
        if len(engines) > 1:
            kinds = " and ".join(type(engine.model).__name__ for engine in engines.values())
            raise AlreadyShardedError(
                f"the model has parameters of {len(engines)} models that were sharded separately ({kinds}), such as "
                f"{places[0].name}: call zero_core.unshard on each of these models first"
            )
        held = set() if self.engine is None else {id(part.tensor) for part in named_parts(self.engine.model)}
        others = [u.layout.slots[k].whole.name for i, ((u, k), *_) in self._places.items() if i in held - self._mine]
        if others:
            raise AlreadyShardedError(
                f"{call}() was given a part of a sharded {type(places[0].engine.model).__name__}, without its "
                f"{listed(others)}: call zero_core.{call} on the whole {type(places[0].engine.model).__name__}"
            )

    # -- in and out ----------------------------------------------------------------------------------------------------

    def __enter__(self) -> Earlier:
        if self.engine is not None:
            self._settle(self.engine)
            disconnect(self.engine)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.engine is None:
            return
        if error is None:
            leave_behind(self.engine)
            self._leave(self.engine, self._why)
            return
        self._go_back(self.engine)
        told = self._told(self.engine)
        if self._lost:
            self._leave(self.engine, f"because its values were lost when {self._call}() failed: build the model again")
        if not told:
            return
        if not isinstance(error, Exception):  # such as KeyboardInterrupt, whose type is kept
            noted(error, told)
            return
        raise StoreError(f"{told} The failure: {type(error).__name__}: {error}") from error

    def _told(self, engine: Engine) -> str:
        """Text that names the losses of a failure; '' if there are none."""
        several = engine.ranks.size > 1 and self._moved
        others = " Other ranks may have lost values too: build the model again on all ranks." if several else ""
        again = "" if several else f" Call {self._call}() again when the cause is gone."
        if self._lost:
            return (
                f"{self._call}() failed after {listed(self._lost, most=4)} had left their shards. On this rank their "
                f"values are lost: build the model again, and load the last checkpoint.{others}"
            )
        if self._given_up:
            return (
                f"{self._call}() failed, and the model is in its earlier shards, with all values. The optimizer states "
                f"of {len(self._given_up)} of {len(engine.units)} units were reset. 16-bit parameters that the new "
                f"optimizer does not train have lost the extra precision of their fp32 masters.{others}{again}"
            )
        told = f"{self._call}() failed, and on this rank the model is in its earlier shards, with all values.{others}"
        return told if others else ""

    def _settle(self, engine: Engine) -> None:
        """Finish all work under way. Raises ZeroError if values would be lost, on all ranks or on none."""
        call, store = self._call, engine.store
        if engine.busy:
            raise ZeroError(f"{call}() inside forward or backward: call it between steps")
        if engine.averages:
            raise ZeroError(f"{call}() inside AveragedModel.swapped_in: leave the with block first")
        if store.asleep:
            raise ZeroError(f"{call}() of a model whose store sleeps: call zero_core.wake(model) first")
        with torch.no_grad():
            engine.settle()
        try:
            store.wait()
        except Exception as error:
            raise AlreadyShardedError(
                f"{call}() cannot read the values of a sharded model: {error}. Build it again, and load a checkpoint"
            ) from error
        self._refuse_gradients(engine)
        if engine.commits is not None:
            engine.commits.begin_step()
            engine.commits.end_copy()

    def _refuse_gradients(self, engine: Engine) -> None:
        """Raises ZeroError, on all ranks, where one has gradients that would be lost. `unshard` loses none of those
        that the optimizer did not have."""
        lost = [
            unit.layout.slots[k].whole.name
            for unit in engine.units
            for k in range(len(unit.steps))
            if unit.gradient.waits(k) or (self._call == "shard" and unit.has_own_gradient(k))
        ]
        if engine.ranks.anywhere([bool(lost)], self._call)[0]:
            whose = listed(list(dict.fromkeys(lost))) if lost else "on another rank"
            raise ZeroError(
                f"parameters have gradients ({whose}), which {self._call}() would lose: before {self._call}(), call "
                "model.zero_grad(). To use these gradients, call step() of their optimizer before that"
            )

    def _go_back(self, engine: Engine) -> None:
        for stacked in engine.stacks.parameters:
            stacked.adopt()
        for unit in engine.units:
            unit.adopt_parameters()
            if unit.index in self._given_up:
                unit.steps = [0] * len(unit.steps)
        connect(engine)

    @staticmethod
    def _leave(engine: Engine, why: str) -> None:
        engine.over = why
        engine.attachment.detach()
        for unit in engine.units:
            for version in unit.versions:  # views of values that are kept elsewhere now
                version.ended()
        for call in (*reversed(engine.leaving), engine.store.close, engine.pool.clear):
            try:
                call()
            except Exception as error:  # the values have left, and the caller gets their new owner
                warnings.warn(
                    f"the earlier shards of {type(engine.model).__name__} did not end as they should, and may keep "
                    f"memory or files: {type(error).__name__}: {error}",
                    stacklevel=4,
                )

    # -- contents of these shards --------------------------------------------------------------------------------------

    def has(self, parameter: Tensor) -> bool:
        return id(parameter) in self._places

    def was_changed(self, parameter: Tensor) -> bool:
        """Whether the parameter has no longer the values that the model was built with."""
        return any(unit.versions[k].ends > 0 for unit, k in self._places.get(id(parameter), ()))

    def leftover(self, parameter: Tensor) -> Leftover:
        """The parameter's `Leftover` in these shards: without zero_grad(), the next optimizer would step it."""
        return next((unit.gradient.leftover[k] for unit, k in self._places.get(id(parameter), ())), Leftover.NOTHING)

    def followers(self) -> list[Follower]:
        """Tensors that share the memory of parameters which the model still has."""
        units = () if self.engine is None else self.engine.units
        return [f for unit in units for _, f in unit.followers if id(f.lead) in self._mine]

    def values(self, parameter: Tensor, start: int, stop: int) -> Tensor | None:
        """Elements [start, stop) of the parameter's master, with all their bits; None: it is not in these shards.
        Collective."""
        if not self.has(parameter):
            return None
        within = self._within(parameter, start, stop)
        found = [u.master(k).reshape(-1)[low - at : high - at] for u, k, low, high, at in within]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _within(self, parameter: Tensor, start: int, stop: int) -> Iterator[tuple[Unit, int, int, int, int]]:
        """Where elements [start, stop) of the parameter are: the unit, the number in it, which of these elements it has
        (the first, and the one after the last), and the element with which it begins."""
        for unit, k in self._places.get(id(parameter), ()):
            slot = unit.layout.slots[k]
            at = slot.whole.flat_start
            low, high = max(start, at), min(stop, at + slot.numel)
            if low < high or start == stop:
                yield unit, k, low, high, at

    def taken(self, by: Unit) -> None:
        """The unit `by` of other shards has the values of its parameters."""
        for parameter, slot in zip(by.wholes, by.layout.slots, strict=True):
            first = slot.whole.flat_start
            for unit, k, low, high, _ in self._within(parameter, first, first + slot.numel):
                self._moved = True
                waiting = self._waiting[unit.index]
                waiting[k] = waiting.get(k, 0) - (high - low)
                if waiting[k] <= 0:
                    del waiting[k]
                if not waiting:
                    self._spare.append(unit.index)

    def give_up(self, to: ShardStore) -> None:
        """Give up the units whose values were all taken, once `to` has them for sure."""
        if not self._spare or self.engine is None:
            return
        to.wait()
        for u in self._spare:
            if self.engine.store.give_up(u):
                self._given_up.add(u)
                self._away.add(u)
        self._spare.clear()
        give_back_freed_memory()

    def put_back(self, by: Unit, at: int, values: Tensor | None) -> None:
        """Parameter `at` of the unit `by` is in these shards again. values: its own, (numel,); None: nobody knows."""
        first = by.layout.slots[at].whole.flat_start
        for unit, k, low, high, begin in self._within(by.wholes[at], first, first + by.layout.slots[at].numel):
            if unit.index in self._spare:
                self._spare.remove(unit.index)
            if unit.index not in self._given_up:
                continue
            if values is None:
                self._lost.append(unit.layout.slots[k].name)
                continue
            if unit.index in self._away and self.engine is not None:
                self.engine.store.take_up(unit.index)
                self._away.discard(unit.index)
            unit.write_part("master", k, values[low - first : high - first], low - begin)
