"""Bounded buffers: a pool of equal slots, back-pressure included.

[Note: a slot's life]
    free ──take──> held ──give──────────────> free
                     └───give(after=write)──> draining ──write done──> free
Whoever takes next waits for the oldest write. Nothing else ever grows: three slots are a read, an update and a write
at a time; more slots let reads run further ahead and writes trail further behind.
"""

from __future__ import annotations

from collections import deque

from ..arena import Block
from ..monitor import Monitor
from ..tier import Transfer

__all__ = ["SlotPool"]


class SlotPool:
    """Equal blocks, taken and given back by any thread."""

    def __init__(self, blocks: list[Block], monitor: Monitor) -> None:
        self.count = len(blocks)
        self._monitor = monitor
        self._changed = monitor.condition
        self._free = list(reversed(blocks))
        self._draining: deque[tuple[Block, Transfer]] = deque()

    def try_take(self) -> Block | None:
        """A block if one can be had without waiting."""
        with self._changed:
            if self._free:
                return self._free.pop()
            done = next((pair for pair in self._draining if pair[1].done()), None)
            if done is None:
                return None
            self._draining.remove(done)
        block, transfer = done
        self._finish(block, transfer)
        return block

    def take(self) -> Block:
        """A block; waits for a write, or until one is given back. Raises the write's error, or the background's."""
        with self._changed:
            while not self._free and not self._draining:
                self._monitor.check()  # a failed thread gives nothing back
                self._changed.wait()
            if self._free:
                return self._free.pop()
            block, transfer = self._draining.popleft()
        self._finish(block, transfer)
        return block

    def _finish(self, block: Block, transfer: Transfer) -> None:
        try:
            transfer.wait()
        except BaseException:
            self.give(block, after=None if transfer.done() else transfer)  # Ctrl-C ends the wait, not the write
            raise

    def give(self, block: Block, after: Transfer | None = None) -> None:
        """The block is free, at once or when `after` is done."""
        with self._changed:
            if after is None:
                self._free.append(block)
            else:
                self._draining.append((block, after))
            self._changed.notify_all()

    def drain(self) -> None:
        """Return when no write is in flight. Raises the first error, after all are done."""
        failure: BaseException | None = None
        while True:
            with self._changed:
                if not self._draining:
                    break
                block, transfer = self._draining.popleft()
            try:
                transfer.wait()
            except Exception as error:
                failure = failure or error
            self.give(block)
        if failure is not None:
            raise failure
