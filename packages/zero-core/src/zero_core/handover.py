"""Hands the parameters of a model to the store during `shard`, and takes them back if that fails.

Owns the earlier state of each parameter: the user's plain tensor, or a place in earlier shards. The store hands back
the values that it still has: `StoreContext.rescue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress

import torch
from torch import Tensor

from .earlier import Earlier
from .errors import StoreError, listed, noted
from .runtime.stacked import Stacked
from .runtime.unit import Unit
from .store import ShardStore

__all__ = ["Handover"]


class Handover:
    """Takes unit after unit from the user, and gives all of them back where `shard` fails."""

    def __init__(self, units: Sequence[Unit], stacks: Mapping[int, Stacked], earlier: Earlier) -> None:
        """stacks: by the ids of parameters that are cut into rows of several units."""
        self._units, self._stacks, self._earlier = units, stacks, earlier
        self._taken: Counter[int] = Counter()  # rows of these, by the same ids
        # By unit, of the parameters that are not back, by their numbers: a tensor like each on meta, and its device. A
        # deferred one itself, which its recording knows.
        self._away: dict[int, dict[int, tuple[Tensor, torch.device]]] = {}

    def take(self, i: int) -> None:
        """Unit i's parameters become views without memory: the caller has their values."""
        parameters = enumerate(self._units[i].parameters)
        self._away[i] = {
            k: (p.detach() if p.is_meta else torch.empty_like(p.data, device="meta"), p.device) for k, p in parameters
        }
        self._units[i].adopt_parameters()
        self._earlier.taken(self._units[i])
        for whole in self._units[i].wholes:
            if (stacked := self._stacks.get(id(whole))) is not None:
                self._taken[id(whole)] += 1
                if self._taken[id(whole)] == len(stacked.parts):
                    stacked.adopt()

    def give_back(self, i: int, master: Tensor) -> None:
        """Unit i's parameters have memory and values again, if this rank's shard of its master (numel,) is all of it.

        A frozen parameter that the store keeps in fewer bits than the user did has lost them, and stays away.
        """
        unit, away = self._units[i], self._away.get(i, {})
        unit.unseal()
        whole = unit.ranks.shard.size == 1
        for k, (like, device) in list(away.items()):
            slot = unit.layout.slots[k]
            kept = unit.trainable or like.dtype.itemsize <= unit.dtype.itemsize
            values = master[slot.offset : slot.stop] if whole and kept else None
            if self._earlier.has(unit.wholes[k]):
                self._earlier.put_back(unit, k, values)
            elif device.type == "meta":
                unit.give_back(k, like)
            elif values is not None:
                unit.give_back(k, torch.empty_like(like, device=device).copy_(values.view(slot.shape)))
            else:
                continue
            del away[k]
        for each in unit.composites:
            each.give_back(plain=not self._earlier.has(next(iter(each.parts.values()))))

    @torch.no_grad()
    def undo(self, error: BaseException, store: ShardStore, *, close: bool) -> None:
        """Put back every parameter that can be, and close the store if asked to. Raises StoreError naming the lost. An
        `error` that is no Exception, such as KeyboardInterrupt, gets them as a note."""
        lost = []
        for i, away in self._away.items():
            unit = self._units[i]
            with suppress(Exception):  # a store that failed has handed back its last values by `rescue`
                self.give_back(i, store.read_state(i, "master", 0, unit.shard_numel))
            unit.unseal()
            for k, (like, device) in away.items():
                if self._earlier.has(unit.wholes[k]):
                    self._earlier.put_back(unit, k, None)
                    continue
                unit.give_back(k, like)
                if device.type != "meta":
                    lost.append(unit.layout.slots[k].name)
        for key, stacked in self._stacks.items():
            if self._taken[key] == len(stacked.parts) and not self._earlier.has(stacked.parameter):
                stacked.restore()
        if close:
            with suppress(Exception):
                store.close()
        if lost:
            told = (
                f"shard() failed after it had handed {listed(lost, most=4)} to the store, and this rank cannot have "
                "their values again: they are on the meta device now. Build the model again before the next shard(); "
                "one that is built in deferred_init() loses nothing"
            )
            if isinstance(error, Exception):
                raise StoreError(f"{told}. The failure: {type(error).__name__}: {error}") from error
            noted(error, told)  # KeyboardInterrupt keeps its type
