"""Stores that swap in: a `DeviceStore` which copies its parameters into what it is given, late. Importable in ranks.

Where the memory is has no part in the promise, so it is held on the CPU: what was not waited for is NaN.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zero_core.optim.device_store import DeviceStore
from zero_core.precision import as_bytes
from zero_core.store import GroupStep, StoreContext


class LateArrival:
    """Copies when it is waited for, and not before."""

    def __init__(self, store: SwappingStore, i: int, out: Tensor) -> None:
        self._store, self._i, self._out = store, i, out
        self._open = True
        as_bytes(out).fill_(0xFF)  # NaN in floats
        store.begun(self, i)

    def wait(self) -> None:
        self._end("waited")
        with torch.no_grad():
            self._out.copy_(self._store.source(self._i))

    def drop(self) -> None:
        self._end("dropped")

    def _end(self, how: str) -> None:
        assert self._open, f"an arrival of unit {self._i} was {how} after it had ended"
        assert self._out.untyped_storage().nbytes(), f"unit {self._i}'s memory was given back while it was copied into"
        self._open = False
        self._store.ended(self, how)


class SwappingStore(DeviceStore):
    """`counts`: arrivals begun, waited for and dropped. `most`: arrivals under way at once."""

    swaps_in = False  # until attach
    arrival: type[LateArrival] = LateArrival

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.under_way: dict[LateArrival, int] = {}
        self.most = 0
        self.fail_at: int | None = None  # the unit that cannot be copied

    def attach(self, *args: Any, context: StoreContext, **options: Any) -> None:
        super().attach(*args, context=replace(context, keeps_parameters=False), **options)  # what is copied from stays
        self.swaps_in = True

    def swap_in(self, i: int, out: Tensor) -> LateArrival:
        self._check()
        assert out.is_contiguous() and out.shape == self.source(i).shape
        return (FailingArrival if self.fail_at == i else self.arrival)(self, i, out)

    def source(self, i: int) -> Tensor:
        """What arrivals of unit i copy."""
        return self._shards[i].parameter

    def begun(self, arrival: LateArrival, i: int) -> None:
        assert i not in self.under_way.values(), f"unit {i} is under way twice"
        self.under_way[arrival] = i
        self.most = max(self.most, len(self.under_way))
        self.counts["begun"] += 1

    def ended(self, arrival: LateArrival, how: str) -> None:
        del self.under_way[arrival]
        self.counts[how] += 1

    def parameters(self, i: int) -> Tensor:
        raise AssertionError("a store that swaps in was asked to lend")

    def release(self, i: int) -> None:
        raise AssertionError("a store that swaps in lent nothing")

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        assert not set(order) & set(self.under_way.values()), "a unit is updated while it is copied"
        super().update(groups, scale, order, steps)

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        assert i not in self.under_way.values(), "a unit is written while it is copied"
        super().write_state(i, name, start, values)


class FailingArrival(LateArrival):
    """Cannot be waited for; dropped after that, as the protocol has it."""

    def wait(self) -> None:
        raise OSError(5, "the copy failed")
