"""The parameters of a model while `shard` hands them to the store, and back where that fails.

Owns what each parameter was: the user's, or one of earlier shards. Which values can be had again is the store's to
say: `StoreContext.rescue`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from .building.init import become
from .building.overlaps import Follower
from .building.parts import forget_parts
from .earlier import Earlier
from .errors import StoreError, listed, noted
from .runtime.stacked import Stacked
from .runtime.unit import Unit
from .store import ShardStore

__all__ = ["Handover"]


@dataclass(frozen=True)
class _Was:
    """What a parameter was. `like`: on meta; of a deferred one itself, which its recording knows."""

    parameter: nn.Parameter
    kind: type[nn.Parameter]
    like: Tensor
    device: torch.device
    followers: tuple[Follower, ...]


class Handover:
    """Takes unit after unit from the user, and gives all of them back where `shard` fails."""

    def __init__(self, units: Sequence[Unit], stacks: Mapping[int, Stacked], earlier: Earlier) -> None:
        """stacks: by the ids of parameters that are cut into rows of several units."""
        self._units, self._stacks, self._earlier = units, stacks, earlier
        self._taken: Counter[int] = Counter()  # rows of these, by the same ids
        self._away: dict[int, list[_Was]] = {}  # by unit, those that are not back

    def take(self, i: int) -> None:
        """Unit i's parameters become views without memory: the caller has their values."""
        self._away[i] = [
            _Was(
                *(p, type(p), p.detach() if p.is_meta else torch.empty_like(p.data, device="meta"), p.device),
                tuple(follower for j, follower in self._units[i].followers if j == k),
            )
            for k, p in enumerate(self._units[i].parameters)
        ]
        self._units[i].adopt_parameters(become)
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
        unit, lost = self._units[i], []
        unit.unseal()
        whole = unit.ranks.shard.size == 1
        for k, was in enumerate(self._away.pop(i, ())):
            slot = unit.layout.slots[k]
            kept = unit.trainable or was.like.dtype.itemsize <= unit.dtype.itemsize
            values = master[slot.offset : slot.stop] if whole and kept else None
            if self._earlier.has(unit.wholes[k]):
                self._earlier.put_back(unit, k, values)
            elif was.device.type == "meta":
                _restore(was, was.like)
            elif values is not None:
                own = torch.empty_like(was.like, device=was.device)
                _restore(was, own.copy_(values.view(slot.shape)))
            else:
                lost.append(was)
        for each in unit.composites:
            each.give_back(plain=not self._earlier.has(next(iter(each.parts.values()))))
        if lost:
            self._away[i] = lost

    @torch.no_grad()
    def undo(self, error: BaseException, store: ShardStore, *, close: bool) -> None:
        """Put back every parameter that can be, and close the store if asked to. Raises StoreError naming the lost, or
        notes them on what is no Exception, such as Ctrl-C."""
        lost = []
        for i in list(self._away):
            unit = self._units[i]
            with suppress(Exception):  # a store that failed has told what it has left
                self.give_back(i, store.read_state(i, "master", 0, unit.shard_numel))
            unit.unseal()
            for was in self._away.pop(i, ()):
                k = next(k for k, p in enumerate(unit.parameters) if p is was.parameter)
                if self._earlier.has(unit.wholes[k]):
                    self._earlier.put_back(unit, k, None)
                    continue
                _restore(was, was.like)
                if was.device.type != "meta":
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
            noted(error, told)  # Ctrl-C stays what it is


def _restore(was: _Was, data: Tensor) -> None:
    was.parameter.__class__ = nn.Parameter
    was.parameter.__dict__.pop("_zero_home", None)
    forget_parts(was.parameter)
    become(was.parameter, data)
    was.parameter.__class__ = was.kind
    for follower in was.followers:
        follower.tensor.__class__ = torch.Tensor
        follower.tensor.__dict__.pop("_zero_home", None)
        become(follower.tensor, follower.over(was.parameter.detach()))
        follower.tensor.__class__ = torch.Tensor  # from meta and back, `become` makes it a parameter
