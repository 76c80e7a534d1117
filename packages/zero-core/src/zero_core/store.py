"""Defines `ShardStore`, the one seam of the core: the protocol that keeps a rank's shards. Passes shard_spec.py on.

Owns no tensors and no policy. `DeviceStore` (optim/device_store.py) is the default; other packages bring tiers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from .errors import StoreError
from .shard_spec import CHUNK_NUMEL as CHUNK_NUMEL
from .shard_spec import Initial as Initial
from .shard_spec import Segment as Segment
from .shard_spec import ShardSpec as ShardSpec
from .shard_spec import stretches as stretches


class Observer(Protocol):
    """Records which work runs when. Kinds: gather, part, reduce, wait, update, swap_in, swap_out, norm, commit."""

    def span(self, kind: str, unit: str) -> AbstractContextManager[None]:
        """Returns a context manager around a piece of work: its kind, such as "gather", and the unit's name."""


class NullObserver:
    """Sees nothing, costs nothing."""

    def span(self, kind: str, unit: str) -> AbstractContextManager[None]:
        return nullcontext()


@dataclass(frozen=True)
class StoreContext:
    """Where a store lives. `rank` is this rank's shard index, `shard_count` the number of shards.

    prefetch_bytes: of unsharded units, how much is asked for ahead of its use, and on one shard how much stays in use,
    see `lent_bytes`. The store lends that much at once, and two units more. keeps_parameters: unsharded units stay
    until the step (stages 0 to 2), each asked for once. keeps_gradients: so do whole gradients, which the step reduces.
    rescue: an `attach` that fails calls it before it raises, with (i, master) of every shard that `initial` yielded and
    that the store still has: the user has no other copy.
    agree: of a durable store: given the numbers of the generations that it found, the one that all ranks go on from, or
    0 for none. Collective.
    """

    device: torch.device
    rank: int = 0
    shard_count: int = 1
    reduce_dtype: torch.dtype = torch.float32
    prefetch_bytes: int = 0
    keeps_parameters: bool = False
    keeps_gradients: bool = False
    observer: Observer = NullObserver()
    rescue: Callable[[int, Tensor], None] = lambda i, master: None
    agree: Callable[[Sequence[int]], int] = lambda found: max(found, default=0)


def lent_bytes(unit_bytes: Iterable[int], prefetch_bytes: int, resident_bytes: int, shard_count: int) -> int:
    """`StoreContext.prefetch_bytes`. `unit_bytes`: of each unit, unsharded.

    On one shard the store lends each unit its memory, so a resident unit stays lent. Beside these, three units are in
    use in backward: the one that is opened, the one before it, and the one that encloses them.
    """
    if shard_count > 1 or not resident_bytes:
        return prefetch_bytes
    return max(prefetch_bytes, *unit_bytes, 0) + resident_bytes


@dataclass(frozen=True)
class GroupStep:
    """A frozen copy of one of the optimizer's `param_groups` at a step, without "params"."""

    options: Mapping[str, Any]


@runtime_checkable
class ShardStore(Protocol):
    """Keeps one rank's shards: parameters out, gradients in, updates in between.

    Never called concurrently (backward hooks may run on autograd's thread). Tensors are ordered on the caller's current
    stream; the store records its own events. Every method first raises an error of the background; after that only
    close() works.

    Members from `swaps_in` on have defaults, which `zero_core.shard` gives a store that lacks them. Such a store lends
    its memory, updates at once and cannot sleep. It has no numbers, no states of other shapes and no durable steps.
    """

    def attach(
        self, shards: Sequence[ShardSpec], optimizer: torch.optim.Optimizer, initial: Initial, *, context: StoreContext
    ) -> None:
        """Take over the shards, once. `initial(i)` yields shard i's master (numel,) in its `master_dtype`, called once
        each, in order. It may call `wait`, which returns when all that was taken over before is kept.

        `optimizer` is the user's own: its type, defaults and param_groups are read. Raises TypeError naming a type that
        the store cannot run.
        """

    def prefetch(self, i: int) -> None:
        """Shard i will be wanted soon. Optional work."""

    def parameters(self, i: int) -> Tensor:
        """(numel,) parameter dtype, compute device; valid until release(i). Waits for unit i's own update only.

        The caller may write into it between parameters() and release() only through write_state.
        """

    def release(self, i: int) -> None:
        """The tensor that parameters(i) returned is not used after this."""

    def gradient_buffer(self, i: int) -> Tensor | None:
        """Optional memory (numel,) in the reduce dtype, on the compute device, for a reduced gradient.

        Given to accept_gradient(i, it) without a copy, or forgotten. None: the caller brings its own memory. It may be
        written in the order of the stream that is current at this call.
        """

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        """Add the reduced gradient (numel,), reduce dtype, to shard i's. Accumulates in fp32.

        `gradient` may be reused by the caller afterwards, in stream order, unless it is gradient_buffer(i).
        """

    def discard_gradients(self) -> None:
        """Forget every gradient: overflow, or zero_grad()."""

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        """Elements [start, stop) of shard i's gradient become zero, where there is one: nobody will step them."""

    def gradient_norm_squared(self) -> Tensor:
        """() float64 on the compute device: chunks of CHUNK_NUMEL elements of a stretch, summed and added in double.

        In an order that does not depend on where the shards lie; on the CPU, in that of the chunks.
        """

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        """Run the optimizer on every shard that has a gradient. Consumes the gradients; may return before the end.

        `steps[i][k]`: 1-based step number of segment k of unit i in this update; 0 skips that segment.
        `scale` multiplies gradients. `order`: units in order of their next use.
        """

    def wait(self) -> None:
        """Return when every update is done."""

    def state_names(self) -> tuple[str, ...]:
        """Logical values that read_state knows: ("master", "exp_avg", "exp_avg_sq") for Adam.

        They are fp32, except the master of a shard that is not trained: see `ShardSpec`.
        """

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,), CPU or compute device: a copy. Waits first."""

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        """Overwrite elements [start, start + len(values)). Waits first; invalidates resident values."""

    def close(self) -> None:
        """Give all memory back. Idempotent."""

    # -- members with a default -------------------------------------------------------------------------------------

    @property
    def swaps_in(self) -> bool:
        """Whether the store keeps shards off the compute device, so that the caller brings memory and `swap_in` copies.

        Known after attach. Where it is False, call `parameters`.
        """
        return False

    @property
    def lends_masters(self) -> bool:
        """Whether `parameters` of a shard in its master's dtype are its masters, and keep writes into them."""
        return False

    @property
    def updates_later(self) -> bool:
        """Whether `parameters` may have to wait for an update."""
        return False

    @property
    def asleep(self) -> bool:
        """Whether `sleep` was called, and `wake` was not."""
        return False

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Before shards are cut. A store that steps parameters in parts by code of its own knows some optimizers only.

        It declares "by itself" the elementwise optimizers that it cannot step in parts. TypeError and ValueError name
        an optimizer, or an option, that it cannot step at all.
        """

    def swap_in(self, i: int, out: Tensor) -> Arrival:
        """Copy shard i into `out` (numel,), parameter dtype, compute device, after the current stream's queued work.

        May begin late: when unit i's own update is done, or when its bytes are in memory. Either wait() or drop() ends
        it; nothing is to be released.
        """
        raise _lacking(self, "swap_in")

    def read_gradient(self, i: int, start: int, stop: int) -> Tensor:
        """(stop - start,) fp32, CPU or compute device: a copy of these elements of shard i's gradient.

        Raises an error if no gradient of shard i was accepted since the last update.
        """
        raise _lacking(self, "read_gradient")

    def write_gradient(self, i: int, start: int, values: Tensor) -> None:
        """Overwrite elements [start, start + len(values)) of shard i's gradient, as `gradient_norm_squared` sees.

        `values`: fp32, CPU or compute device. All their bits are kept, in whatever dtype the gradient arrived, or an
        error is raised and nothing is written; so it is if there is no gradient.
        """
        raise _lacking(self, "write_gradient")

    def late_state(self) -> tuple[str, str] | None:
        """A segment's name and a state of it that a later step than its first one made.

        Only a store which runs the user's optimizer may have states that nobody knew of.
        """
        return None

    def scalar_names(self) -> tuple[str, ...]:
        """Names of numbers that the optimizer keeps of a parameter besides its step count: ("mu_product",) for NAdam.

        Most optimizers have none. `k` below is the segment's place in the spec of shard `i`. Write them after the
        tensors of that segment.
        """
        return ()

    def read_scalar(self, i: int, k: int, name: str) -> float | None:
        """The number; None while the segment has taken no step. Waits first."""
        raise _lacking(self, "read_scalar")

    def write_scalar(self, i: int, k: int, name: str, value: float) -> None:
        """Overwrite it."""
        raise _lacking(self, "write_scalar")

    def state_shapes(self, group: int, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the states of an uncut parameter of `shape` in this group that have not its shape (SOAP).

        `state_names` has none of them. All values are fp32.
        """
        return {}

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,) elements of the flattened state, CPU or compute device: a copy. Waits first."""
        raise _lacking(self, "read_shaped")

    def write_shaped(self, i: int, k: int, name: str, start: int, values: Tensor) -> None:
        """Overwrite elements [start, start + len(values)) of the flattened state. Waits first."""
        raise _lacking(self, "write_shaped")

    def sleep(self, to: Any = None) -> None:
        """Finish work under way, move all values in memory into `to`, a `zero_offload.ByteStore`, and free the memory.

        None: where the store has slower memory of its own. Gradients that wait for a step are kept. No shard is lent
        meanwhile. When it raises, the store is awake and has everything. Until wake(), every other method raises, and
        close() works. A second sleep() changes nothing.
        """
        raise _lacking(self, "sleep")

    def wake(self) -> None:
        """Take the memory back, with the same bits. When it raises, the store still sleeps, and wake() may be repeated.

        An awake store does not change.
        """

    def give_up(self, i: int) -> bool:
        """Another store takes the shards over, and shard i was read for the last time: its memory goes.

        So does the memory of all gradients. Nothing is lent or updated.
        Only `read_state` of other shards, `give_up`, `take_up` and `close` may follow. False: all of it stays.
        """
        return False

    def take_up(self, i: int) -> None:
        """Shard i, which was given up, has memory again: zeros, with states as at attach. `write_state` follows."""

    # -- each step on disk, as a generation, for a process that starts later ----------------------------------------

    @property
    def durable(self) -> bool:
        """Whether each step is left there. Without it nothing below is called."""
        return False

    @property
    def resumed(self) -> bytes | None:
        """After attach, the blob of the generation that it went on from; None: it began."""
        return None

    def make_room(self, nbytes: int) -> None:
        """Reserve the room of commits beside the values, for blobs of about `nbytes` bytes. Called before the first."""
        raise _lacking(self, "make_room")

    def commit(self, blob: bytes) -> None:
        """Make the updates until now the next generation, together with `blob`. Returns at once.

        A later call raises its errors. No update may begin before all ranks' `committed`.
        """
        raise _lacking(self, "commit")

    def committed(self) -> None:
        """Return when every commit is done."""
        raise _lacking(self, "committed")

    def pin(self) -> Pinned:
        """The values after every update that was asked for until now. Returns at once; one at a time."""
        raise _lacking(self, "pin")


def _lacking(store: ShardStore, name: str) -> StoreError:
    return StoreError(f"the store, a {type(store).__name__}, has no {name}: give it all that zero_core.ShardStore has")


class Arrival(Protocol):
    """A shard on its way into memory on the compute device."""

    def wait(self) -> None:
        """The current stream goes on when the shard is there. The host waits only for a copy that has not begun."""

    def drop(self) -> None:
        """The shard is not wanted: its memory may be used for something else, in the caller's stream order.

        Harmless after a wait() that raised.
        """


class Pinned(Protocol):
    """A snapshot of the trained shards of a durable store, while the store goes on. For one thread, any one."""

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        """As ShardStore.read_state, of that moment, for trained shards. Gives up the elements before `start`, in the
        order of shards and elements: they cannot be read after it."""

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        """As ShardStore.read_shaped, of that moment. It comes when the first element of segment `k` might."""

    def close(self) -> None:
        """Give up the rest: an update that has come this far waits until then. Idempotent."""
