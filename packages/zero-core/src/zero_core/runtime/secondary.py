"""Keeps this rank's part of a unit among its machine's ranks, for gathers until the unit's values change.

Owns that copy and whether it is current. Not here: the gathers (in residency.py).

[Note: a second cut]
hpZ of ZeRO++ (Wang et al. 2023, arXiv 2306.10209, section 3.2). A shard is cut over all ranks, and a gather of it
crosses the link between machines. The first gather after a change leaves 1/l of the unit on each of the l ranks of
every machine, and gathers after it, backward's above all, stay inside. Whether a copy is current is the same on every
rank: parameters change by a step, or by writes that all ranks make.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..comm.collectives import Axis
from .versions import Stamp, Version

__all__ = ["Secondary", "secondary_bytes"]


def secondary_bytes(nbytes: int, ranks_per_machine: int) -> int:
    """Returns the bytes that stay on each rank, for a unit of `nbytes` with padding."""
    return nbytes // ranks_per_machine


class Secondary:
    """This rank's part of one unit. versions: those of the unit's parameters. inside: the ranks of this machine."""

    def __init__(self, inside: Axis, versions: Iterable[Version]) -> None:
        self._inside, self._stamp = inside, Stamp(versions)
        self._part: Tensor | None = None

    def part(self) -> Tensor | None:
        """Returns (numel / l,) of the unit's values. None: they have changed since, or were never gathered."""
        return self._part if self._part is not None and self._stamp.current() else None

    def keep(self, whole: Tensor) -> None:
        """Keeps this rank's part of `whole` (numel,), which was gathered from all ranks."""
        mine = whole.view(self._inside.size, -1)[self._inside.rank]
        if self._part is None:
            self._part = mine.clone()
        else:
            self._part.copy_(mine)
        self._stamp.renew()

    def forget(self) -> None:
        """Frees the memory."""
        self._part = None
