"""Detects whether a visit of a unit wrote into its parameters, by autograd's counters, or in some visits by the values.

Owns the counts and digests from the beginning of a visit. Not here: handling a write (in uses.py and writes.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..precision import digest

__all__ = ["Watch"]


class Watch:
    """Watches the parameters of one unit, which are views of `flat`, while it is visited."""

    def __init__(self, flat: Tensor, views: Sequence[Tensor], parameters: Sequence[Tensor]) -> None:
        self._flat, self._views, self._parameters = flat, views, parameters
        self._visits: Counter[Any] = Counter()  # by kind: some visits compare the values before and after
        self._versions: list[int] = []  # of the parameters, when the first of the open visits began
        self._before: Tensor | None = None  # a digest of the values then

    def begin(self, kind: Any, *, compares: bool) -> None:
        """Begins the first of the open visits.

        kind: if it is not None and `compares`, the values are compared before and after in the 1st, 2nd, 4th ... 256th
        visit of that kind and in each 256th after that, see `unseen_write`.
        """
        self._versions = [parameter._version for parameter in self._parameters]
        self._visits[kind] += 1
        count = self._visits[kind]
        compares &= (count & (count - 1) == 0 if count < 256 else count % 256 == 0) and kind is not None
        self._before = digest(self._flat) if compares and not self._flat.is_meta else None

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
                    self._versions[k] = -1
        return any(self.written())

    def written(self) -> list[bool]:
        """For each parameter, whether its version counter moved since the first of the open visits began."""
        return [p._version != before for p, before in zip(self._parameters, self._versions, strict=True)]

    def forgive(self, k: int) -> None:
        """Ignores one move of parameter k's counter, which was not a write by a visit."""
        self._versions[k] += 1

    def unseen_write(self) -> Tensor | None:
        """Returns () bool on the device: whether values changed while no version counter moved. None: not compared."""
        before, self._before = self._before, None
        return None if before is None else digest(self._flat) != before
