"""Counts all changes of parameters and gradients, so that readers see by a stamp whether a value has changed.

Owns the counts. Not here: the changes themselves, at the callers of `wrote` and `ended`.

[Note: one barrier]
A step, a visit, a checkpoint, and a write that its home keeps can each change a parameter. A gradient changes when it
arrives, and when it is edited, multiplied, dropped or consumed. Each of these calls `wrote` or `ended` on the value's
`Version`. Caches and views hold a `Stamp`, never a number. If autograd did not count a write itself, the write also
moves autograd's version counter here: see [Note: changes before a backward] in unit_memory/unit.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import increment_version


class Version:
    """Counts the changes of one value, and its ends: see `ended`."""

    def __init__(self) -> None:
        self.changes = self.ends = 0

    def wrote(self, uncounted: Tensor | None = None) -> None:
        """Counts a change. uncounted: the tensor over the value, if autograd does not count this change by itself."""
        self.changes += 1
        if uncounted is not None:
            increment_version(uncounted)

    def ended(self, uncounted: Tensor | None = None) -> None:
        """Counts a change that ends the old value: a gradient was consumed, discarded or dropped, or a parameter no
        longer has the values that the model was built with."""
        self.wrote(uncounted)
        self.ends += 1


class Stamp:
    """The versions of some values at one time."""

    def __init__(self, versions: Iterable[Version]) -> None:
        self._versions = tuple(versions)
        self.renew()

    def renew(self) -> None:
        """Counts from now on. Called by code that has just written the values itself."""
        self._seen = [(version, version.changes, version.ends) for version in self._versions]

    def current(self) -> bool:
        """Whether none of them has changed since."""
        return all(version.changes == changes for version, changes, _ in self._seen)

    def alive(self) -> bool:
        """Whether none of them has ended since."""
        return all(version.ends == ends for version, _, ends in self._seen)
