"""Checks writes into parameters outside of `step()`: whether all ranks wrote the same, and whether one would be lost.

Owns the digests for the next step, and the counts and digests from the beginning of a visit (`Watch`). Each rank keeps
only its own slice of a write. If ranks write different values, the slices together make a parameter that no rank wrote,
so the step compares digests and refuses. A forward's writes through `p.data` move no version counter, so they would be
lost. Some visits of a unit therefore compare its values before and after, and the step refuses if they differ.

`p.data = tensor` copies the tensor's values into the shards, where torch would make the two share memory. A user who
keeps that tensor would see a difference once either of them changes, so that is refused.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..comm.ranks import Ranks
from ..errors import ChangedParameterError

_BITS = 20  # as in a digest of collectives
_ROW = 1024  # words of a digest
_SUMMED_ROWS = 64  # at a time
_MIXER = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio: Knuth, The Art of Computer Programming, volume 3, 6.4


def digest(values: Tensor) -> Tensor:
    """Returns () int64 on the device: a digest of all bits of `values` and of their places.

    They are read as 64-bit words in rows of `_ROW`. Each word is multiplied by an odd number of its own, the sum of
    its column's number and its row's.
    """
    bits = values.detach().reshape(-1).view(torch.uint8)
    rows = bits[: bits.numel() // (8 * _ROW) * 8 * _ROW].view(torch.int64).view(-1, _ROW)

    def weighed(sums: Tensor, first: int, step: int) -> Tensor:
        return (sums * torch.arange(first, first + step * sums.numel(), step, device=sums.device)).sum()

    rest = bits[rows.numel() * 8 :].to(torch.int64)
    return weighed(_summed(rows), 1, 2) + weighed(rows.sum(1), 0, 2 * _ROW) + weighed(rest, 1, 2)


def _summed(rows: Tensor) -> Tensor:
    """rows.sum(0), of int64. On a GPU few rows at a time, with a 64th of their memory: a sum of many takes 33 MiB."""
    more: Tensor | int = 0
    while rows.device.type != "cpu" and rows.size(0) > _SUMMED_ROWS:
        many = rows.size(0) // _SUMMED_ROWS * _SUMMED_ROWS
        more = rows[many:].sum(0) + more
        rows = rows[:many].view(-1, _SUMMED_ROWS, rows.size(1)).sum(1)
    return rows.sum(0) + more


@dataclass(frozen=True)
class _Given:
    """A tensor that a parameter was given with `p.data = tensor`, and its memory, which other tensors may share."""

    tensor: weakref.ref[Tensor]
    version: int
    storage: StorageWeakRef
    trained: bool

    def written(self) -> bool:
        """Whether it was written since. The tensor has no name where errors are raised: a traceback would keep it."""
        tensor = self.tensor()
        return tensor is not None and tensor._version != self.version


class Writes:
    """The writes of this rank since the last step: digests of the values, by the name of the parameter or unit."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self.digests: dict[str, int] = {}  # by the name of the parameter or unit
        self._unseen: list[tuple[str, Tensor]] = []
        self._given: dict[str, _Given] = {}

    def given(self, name: str, values: Tensor, *, trained: bool) -> None:
        """Notes that the parameter `name` was given the values of a user's tensor."""
        storage = StorageWeakRef(values.untyped_storage())
        self._given[name] = _Given(weakref.ref(values), values._version, storage, trained)

    def check_given(self, *, stepping: bool) -> None:
        """Raises ChangedParameterError if a given tensor no longer has the values that it would have in torch."""
        for name, given in list(self._given.items()):
            if given.storage.expired():
                del self._given[name]
            elif (stepping and given.trained) or given.written():
                what = "a step is about to change the parameter" if stepping else "the tensor has changed since"
                raise ChangedParameterError(
                    f"p.data = tensor for {name} copied the tensor into shards, and {what}. In torch the two share "
                    "memory, and both would change. Write p.data.copy_(tensor) instead, or delete the tensor right "
                    "after p.data = tensor"
                )

    def note(self, name: str, values: Tensor) -> None:
        """Notes the new `values` of the parameter or the unit `name`. Waits for the device."""
        if self._ranks.size == 1:
            return
        mixed = (int(digest(values)) * _MIXER % (1 << 64)) >> (64 - _BITS)  # the low bits of round numbers are zeros
        self.digests[name] = (self.digests.get(name, 0) * 31 + mixed) % (1 << _BITS)

    @property
    def digest(self) -> int:
        """Digest of all writes of this rank since the last step."""
        found = 0
        for name, of_name in self.digests.items():
            found = (found * 31 + of_name + len(name)) % (1 << _BITS)
        return found

    def unseen(self, name: str, written: Tensor | None) -> None:
        """Notes `written`, () bool on the device: whether a visit of the unit `name` changed values without a trace."""
        if written is not None:
            self._unseen.append((name, written))

    def unseen_count(self) -> Tensor | None:
        """Returns () float64 on the device: visits that did; None where none was compared since the last step."""
        return torch.stack([flag for _, flag in self._unseen]).sum(dtype=torch.float64) if self._unseen else None

    def unseen_names(self) -> list[str]:
        """Returns the units whose visits did. Waits for the device."""
        return [name for name, flag in self._unseen if bool(flag)]

    def forget(self) -> None:
        self.digests.clear()
        self._unseen.clear()


class Watch:
    """Watches the parameters of one unit, which are views of `flat`, while it is visited."""

    def __init__(self, flat: Tensor, views: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        self._flat, self._views, self._parameters = flat, views, parameters
        self._visits: Counter[Any] = Counter()  # by kind: some visits compare the values before and after
        # When the first of the open visits began: the parameters' versions, and a digest of the values, or None.
        self._begun: tuple[list[int], Tensor | None] = [], None

    def begin(self, kind: Any, *, compares: bool) -> None:
        """Begins the first of the open visits.

        kind: if it is not None and `compares`, the values are compared before and after in the 1st, 2nd, 4th ... 256th
        visit of that kind and in each 256th after that, see `unseen_write`.
        """
        self._visits[kind] += 1
        count = self._visits[kind]
        compares &= (count & (count - 1) == 0 if count < 256 else count % 256 == 0) and kind is not None
        before = digest(self._flat) if compares and not self._flat.is_meta else None
        self._begun = [parameter._version for parameter in self._parameters], before

    def was_written(self) -> bool:
        """Whether the parameters were written since the first open visit began. Writes through `p.data` are not seen.

        If a parameter was given other memory (`p.data = tensor`), that is copied into the unit's memory and released.
        """
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for k, (parameter, view) in enumerate(zip(self._parameters, self._views, strict=True)):
                alike = parameter.shape == view.shape and parameter.dtype == view.dtype
                if alike and parameter.data_ptr() != view.data_ptr():  # else the next visit refuses
                    view.copy_(parameter)
                    parameter.data = view
                    self._begun[0][k] = -1
        return any(self.written())

    def written(self) -> list[bool]:
        """For each parameter, whether its version counter moved since the first of the open visits began."""
        return [p._version != before for p, before in zip(self._parameters, self._begun[0], strict=True)]

    def forgive(self, k: int) -> None:
        """Ignores one move of parameter k's counter, which was not a write by a visit."""
        self._begun[0][k] += 1

    def unseen_write(self) -> Tensor | None:
        """Returns () bool on the device: whether values changed while no version counter moved. None: not compared."""
        versions, before = self._begun
        self._begun = versions, None  # the digest is on the device
        return None if before is None else digest(self._flat) != before
