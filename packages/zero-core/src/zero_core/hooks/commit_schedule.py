"""Tells a durable store to commit each step on disk, as the forward after the step begins.

[Note: the moment of a commit]
    step N returns     random state is noted: from here the next batch is drawn
    forward N+1        the rest is noted (scheduler, buffers, the caller's own), and the store begins to commit N
    backward N+1       on several ranks: waits until this rank has committed N, then takes part in the first reduction
    step N+1           waits until N is committed. On several ranks all have N: they took part in that reduction

A forward that records no gradients belongs to no step. So when a step returns, the one before it is on disk. Values of
step N are not written over on any rank before all ranks have N on disk. After any crash two ranks' last generations
differ by one at most, and both ranks have the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import ZeroError
from ..store import ShardStore
from ..util.threads import Saving


class Commits:
    """The commits of one sharded model."""

    def __init__(self, store: ShardStore, *, several: bool) -> None:
        self._store, self._several = store, several
        self._run: tuple[Callable[[], Any], Callable[[Any], bytes], int] | None = None  # the arguments of `begin`
        self._pending: tuple[Any, int] | None = None  # the random state after the last step, and steps to commit
        self._copy: Saving | None = None

    @property
    def begun(self) -> bool:
        """Whether `begin` was called."""
        return self._run is not None

    def begin(self, random_state: Callable[[], Any], blob_of: Callable[[Any], bytes], every: int = 1) -> None:
        """blob_of: packs a generation's values besides shards, given the result of `random_state` after its step.

        every: each `every`-th step is committed; the same on all ranks.
        """
        self._run = random_state, blob_of, every

    def stepped(self) -> None:
        """Notes that a step is over, except its updates in the background."""
        if self._run is not None:
            self._pending = self._run[0](), 1 + (0 if self._pending is None else self._pending[1])

    def begin_forward(self, *, last: bool = False) -> None:
        """Commits the step before, if there is one. last: whatever `every` is. Raises ZeroError before `begin`."""
        if self._run is None:
            raise ZeroError(
                "the store of this model is durable, and nobody has said what belongs to a step besides its tensors: "
                "call zero_core.resume(model, optimizer) after shard() and before the first forward"
            )
        _, blob_of, every = self._run
        if self._pending is not None and (last or self._pending[1] >= every):
            blob, self._pending = blob_of(self._pending[0]), None
            self._store.commit(blob)

    def begin_backward(self) -> None:
        """Waits on several ranks: no rank takes part in a reduction before it has committed the step before."""
        if self._several:
            self._store.committed()

    def begin_step(self) -> None:
        """Waits until the step before is committed."""
        self._store.committed()

    def finish(self) -> None:
        """Commits the last step, if that is still to do, and returns when it is on disk."""
        self.begin_forward(last=True)
        self._store.committed()

    def begin_copy(self, copy: Saving) -> None:
        """Registers a copy. There is one at a time: call `end_copy` before the next, and before the store is closed."""
        self._copy = copy

    def end_copy(self) -> None:
        """Returns when the last copy is over. Raises its error, unless its `wait` has raised it before."""
        copy, self._copy = self._copy, None
        if copy is not None:
            copy.end()
