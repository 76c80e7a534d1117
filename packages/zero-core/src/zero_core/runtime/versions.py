"""Whether a value changed: every change of a parameter or of a gradient is told here, and readers ask a stamp.

Owns the counts. What was changed, and by whom, is known where `wrote` and `ended` are called.

[Note: one barrier]
A parameter changes by a step, by a write that its home keeps, by a visit, and by a checkpoint; a gradient when it
arrives and when it is edited, multiplied, dropped or consumed. Each of them calls `wrote` or `ended` of the value's
`Version`. Caches and views hold a `Stamp`, and no number. A write that autograd did not count itself moves its version
counter here too: see [Note: changes before a backward] in unit.py.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor
from torch.autograd.graph import increment_version

__all__ = ["Stamp", "Version"]


class Version:
    """Of one value: how often it changed, and how often what it began with has gone."""

    def __init__(self) -> None:
        self.changes = self.ends = 0

    def wrote(self, uncounted: Tensor | None = None) -> None:
        """The value changes. uncounted: what lies over it, if autograd does not count this change by itself."""
        self.changes += 1
        if uncounted is not None:
            increment_version(uncounted)

    def ended(self, uncounted: Tensor | None = None) -> None:
        """It changes, and what it began with has gone: a gradient was consumed, discarded or dropped, or a parameter
        no longer has the values that the model was built with."""
        self.wrote(uncounted)
        self.ends += 1


class Stamp:
    """Some values at one time."""

    def __init__(self, versions: Iterable[Version]) -> None:
        self._versions = tuple(versions)
        self.renew()

    def renew(self) -> None:
        """They are seen as they are now, by whoever has written them himself."""
        self._seen = [(version, version.changes, version.ends) for version in self._versions]

    def current(self) -> bool:
        """Whether none of them has changed since."""
        return all(version.changes == changes for version, changes, _ in self._seen)

    def alive(self) -> bool:
        """Whether none of them has ended since."""
        return all(version.ends == ends for version, _, ends in self._seen)
