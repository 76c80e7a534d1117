"""Counts the bytes of a host memory budget that several stores share. Owns no memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import BudgetError, gib


class HostBudget:
    """A budget of `nbytes` of host memory. Give the same one to several stores: `TieredStore(host_bytes=budget)`.

    A store takes the bytes of its arena when it is attached, and again when it wakes up. It gives them back when it
    sleeps, is closed or is forgotten. Threads may share it, processes may not.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"HostBudget({nbytes}): the bytes cannot be negative")
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._taken = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that no store has taken."""
        return self.nbytes - self._taken

    def take(self, nbytes: int) -> None:
        """Takes `nbytes`. Raises BudgetError if fewer are free; then nothing is taken."""
        with self._lock, self.explained():
            if nbytes > self.free_bytes:
                raise BudgetError(f"{gib(nbytes)} of host memory are wanted and {gib(self.free_bytes)} are free")
            self._taken += nbytes

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context in which a BudgetError also names the bytes of the other stores."""
        try:
            yield
        except BudgetError as error:
            raise BudgetError(
                f"{error}. Other stores have {gib(self._taken)} of the shared budget of {gib(self.nbytes)}: sleep() or "
                "close() of one of them gives its bytes back"
            ) from error

    def give(self, nbytes: int) -> None:
        """Gives `nbytes` back."""
        with self._lock:
            self._taken -= nbytes
