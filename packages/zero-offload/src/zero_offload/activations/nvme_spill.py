"""Tensors set aside on nvme between forward and backward, through a few slots of host memory.

Owns the slots, the extents and the order of reads. How a tensor lies in memory is `spill`'s. Here it lies on the host;
from a device apart the same is done by a thread, see `queued_spill`.

[Note: a piece's life]
A tensor is cut into pieces of one slot. A slot is written out at once and keeps its bytes until another piece needs it,
so the last ones packed, which backward wants first, are not read at all:

    forward    pack 0 | pack 1 | pack 2 | pack 3          writes run behind; a slot is free when its write is done
    slots      [0]      [0 1]    [0 1 2]  [3 1 2]
    backward   load 3 (there) | load 2 (there) | load 1 (there), begins to read 0 | load 0 (read by then)
Memory is the slots, however deep the model. A tensor's extent goes back to a list when the graph that wanted it dies.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..arena import Arena
from ..ending import Ending
from ..errors import BudgetError, ClosedError, gib
from ..protocols import Extent
from ..streams import Lane, Mark
from ..tier import Transfer, Transfers
from ..tiles.footprint import SPILL_PIECE_BYTES, SPILL_SLOTS
from ..tiles.tile import round_up
from .spill import Form, Spilled

__all__ = ["NvmeSpill", "OnNvme"]

Copy = Callable[[Lane, Tensor, Tensor], "Mark | None"]  # (lane, into, source): done when the mark is, or done (None)
Kind = TypeVar("Kind", bound="OnNvme")


@dataclass(eq=False)
class _Slot:
    """Memory for one piece. `piece`: whose bytes it has, or will have when `transfer` is done."""

    memory: Tensor
    piece: _Piece | None = None
    transfer: Transfer | None = None
    copied: Mark | None = None  # the last copy into it or out of it
    used: int = 0

    def drain(self) -> None:
        """Return when nothing is in flight; raises the transfer's error."""
        if self.copied is not None:
            self.copied.wait()
            self.copied = None
        if self.transfer is not None:
            self.transfer.wait()
            self.transfer = None  # not before: after an error or Ctrl-C the bytes are still not there


@dataclass(eq=False)
class _Piece:
    """Bytes [start, start + nbytes) of a tensor and of its extent."""

    start: int
    nbytes: int
    slot: _Slot | None = None


@dataclass(eq=False)
class OnNvme:
    """See `Spilled`. Its extent is given back when nobody can ask for it any more."""

    spill: NvmeSpill
    form: Form
    what: str
    extent: Extent
    pieces: list[_Piece]
    before: weakref.ref[OnNvme] | None = field(repr=False)  # packed before this one, so wanted after it

    def load(self) -> Tensor:
        return self.spill.load(self)

    def __del__(self) -> None:
        self.spill.dropped.append((self.extent, self.pieces))  # any thread, any time: only noted


class NvmeSpill:
    """NVMe, through `slots` pieces of host memory. Transfers carry the store's names, counters and errors.

    Any thread may pack and load; one at a time does.
    """

    def __init__(self, nvme: Transfers, *, slots: int = SPILL_SLOTS, piece_bytes: int = SPILL_PIECE_BYTES) -> None:
        if slots < 2:
            raise ValueError(f"slots={slots}: at least 2, one being written or read beside the one in use")
        self._nvme = nvme
        self._piece_bytes = round_up(piece_bytes, nvme.alignment)
        self.host_bytes = slots * Arena.rounded(self._piece_bytes)  # of the slots
        memory, stop, release = self._memory()
        self._slots = [_Slot(slot[: self._piece_bytes]) for slot in memory.split(Arena.rounded(self._piece_bytes))]
        self._extents: dict[int, list[Extent]] = {}  # unused ones, by their size
        self._all: list[Extent] = []
        self._last: weakref.ref[OnNvme] | None = None
        self._clock = 0
        self._failure: Exception | None = None
        self._lock = threading.RLock()
        self._room = threading.Lock()  # of the extents' account
        self._open = True
        self.dropped: deque[tuple[Extent, list[_Piece]]] = deque()
        # Also when model and graphs are forgotten without a close(): the ByteStore may live on.
        self._ending = Ending(self, partial(_give_back, nvme, stop, release, self._slots, self._all, self._extents))

    def _memory(self) -> tuple[Tensor, Callable[[], None], Callable[[], None]]:
        """(host_bytes,) uint8 for the slots; how to stop what uses them, and how to give them back."""
        arena = Arena(self.host_bytes)
        return arena.whole(), lambda: None, arena.close

    @property
    def extent_bytes(self) -> int:
        """On nvme, in use or not."""
        return sum(extent.nbytes for extent in self._all)

    def pack(self, tensor: Tensor, what: str) -> Spilled:
        """Begin to write the tensor; its own memory is not needed after this returns."""
        with self._lock, self._guard():
            self._collect()
            spilled, values = self._begin(tensor, what, OnNvme)
            self._write_pieces(spilled, values, _copy)
            return spilled

    def _begin(self, tensor: Tensor, what: str, kind: type[Kind]) -> tuple[Kind, Tensor]:
        """What stands for the tensor, with an extent, and its values as bytes where they are."""
        form = Form.of(tensor)
        values = form.flatten(tensor)
        pieces = [
            _Piece(start, min(self._piece_bytes, values.numel() - start))
            for start in range(0, values.numel(), self._piece_bytes)
        ]
        extent = self._extent(round_up(values.numel(), self._nvme.alignment), what)
        spilled = kind(self, form, what, extent, pieces, self._last)
        self._last = weakref.ref(spilled)
        return spilled, values

    def _write_pieces(self, spilled: OnNvme, values: Tensor, copy: Copy) -> None:
        """Copy each piece into a slot; write it when its copy is done, while the next one is copied."""
        behind: tuple[_Slot, _Piece] | None = None
        for piece in [*spilled.pieces, None]:
            slot = None
            if piece is not None:
                slot = self._take(piece)
                slot.copied = copy("swap_out", slot.memory[: piece.nbytes], _part(values, piece))
            if behind is not None:
                self._write(spilled, *behind)
            behind = (slot, piece) if slot is not None and piece is not None else None

    def _write(self, spilled: OnNvme, slot: _Slot, piece: _Piece) -> None:
        slot.drain()
        what = f"activation of {spilled.what}"
        slot.transfer = self._nvme.write(spilled.extent, self._source(slot, piece), what, piece.start)

    def load(self, spilled: OnNvme) -> Tensor:
        """The tensor again; begins to read the one that was packed before it."""
        with self._lock, self._guard():
            values = spilled.form.empty()
            self._read_pieces(spilled, values.view(-1).view(torch.uint8), _copy)
            return spilled.form.restore(values)

    def _read_pieces(self, spilled: OnNvme, values: Tensor, copy: Copy) -> None:
        """Copy each piece out of a slot, those that are not there behind their reads; begin to read the one before."""
        for piece in spilled.pieces:
            slot = self._read(spilled, piece)
            if slot.transfer is not None and slot.transfer.kind == "swap_in":
                slot.drain()
            slot.copied = copy("swap_in", _part(values, piece), slot.memory[: piece.nbytes])
            self._touch(slot, least=True)
        self._read_ahead(spilled)

    def close(self) -> None:
        """Wait for what is in flight and give everything back. Idempotent."""
        with self._lock:
            if not self._open:
                return
            self._open, self.host_bytes = False, 0
            failure: OSError | None = None
            for slot in self._slots:
                try:
                    slot.drain()
                except OSError as error:
                    failure = failure or (None if self._failure else error)  # raised once already
            self._ending()
            if failure is not None:
                raise failure

    # -- slots ------------------------------------------------------------------------------------------------------

    def _read(self, spilled: OnNvme, piece: _Piece) -> _Slot:
        """The slot that has the piece, or is being filled with it."""
        if piece.slot is None:
            slot = self._take(piece)
            what = f"activation of {spilled.what}"
            slot.transfer = self._nvme.read(spilled.extent, self._source(slot, piece), what, piece.start)
        assert piece.slot is not None
        return piece.slot

    def _read_ahead(self, spilled: OnNvme) -> None:
        """Begin to read the one before, into slots that nothing is wanted of."""
        before = spilled.before() if spilled.before is not None else None
        if before is None:
            return
        for piece in before.pieces:
            if piece.slot is None:
                if not any(slot.used <= 0 for slot in self._slots):
                    return
                self._read(before, piece)

    def _take(self, piece: _Piece) -> _Slot:
        """The slot longest unused, its write done, now the piece's."""
        slot = min(self._slots, key=lambda s: (s.piece is not None, s.used))
        slot.drain()
        if slot.piece is not None:
            slot.piece.slot = None
        slot.piece, piece.slot = piece, slot
        self._touch(slot)
        return slot

    def _touch(self, slot: _Slot, *, least: bool = False) -> None:
        """Most recently used, or (`least`) the first to be taken: backward is done with it."""
        self._clock += 1
        slot.used = -self._clock if least else self._clock

    def _source(self, slot: _Slot, piece: _Piece) -> Tensor:
        return slot.memory[: round_up(piece.nbytes, self._nvme.alignment)]

    # -- extents ----------------------------------------------------------------------------------------------------

    def _extent(self, nbytes: int, what: str) -> Extent:
        """The smallest unused one that is large enough, or a new one in the place of all unused ones: batches of many
        lengths take the room of the longest. Raises BudgetError where there is none; what was set aside before stands.
        """
        with self._room:
            return self._unused_extent(nbytes, what)

    def _unused_extent(self, nbytes: int, what: str) -> Extent:
        enough = min((size for size, unused in self._extents.items() if unused and size >= nbytes), default=None)
        if enough is not None:
            return self._extents[enough].pop()
        for extent in [extent for unused in self._extents.values() for extent in unused]:
            self._all.remove(extent)
            self._nvme.store.free(extent)
        self._extents.clear()
        try:
            extent = self._nvme.allocate(nbytes)
        except (OSError, BudgetError) as error:
            raise BudgetError(
                f"no room on nvme for {gib(nbytes)} of activations of {what}: {error}; take fewer tokens a "
                'micro-batch, or give some units the policy "recompute"'
            ) from error
        self._all.append(extent)
        return extent

    def _collect(self) -> None:
        """Take back the extents of what died, after their last write."""
        while self.dropped:
            extent, pieces = self.dropped.popleft()
            for piece in pieces:
                if piece.slot is not None:
                    slot, piece.slot = piece.slot, None
                    slot.piece, slot.used = None, 0
                    slot.drain()
            with self._room:
                self._extents.setdefault(extent.nbytes, []).append(extent)

    @contextmanager
    def _guard(self) -> Iterator[None]:
        """The first error of a transfer is every later call's too: what is on nvme can no longer be relied on."""
        if self._failure is not None:
            raise self._failure
        if not self._open:
            raise ClosedError("the activation offload is closed; call offload_activations again")
        try:
            yield
        except OSError as error:
            self._failure = error
            raise


def _part(values: Tensor, piece: _Piece) -> Tensor:
    return values[piece.start : piece.start + piece.nbytes]


def _copy(lane: Lane, into: Tensor, source: Tensor) -> None:
    into.copy_(source)


def _give_back(
    nvme: Transfers,
    stop: Callable[[], None],
    release: Callable[[], None],
    slots: list[_Slot],
    extents: list[Extent],
    unused: dict[int, list[Extent]],
) -> None:
    stop()
    for slot in slots:
        with suppress(OSError):
            slot.drain()
    for extent in extents:
        with suppress(Exception):  # its owner may have closed it already
            nvme.store.free(extent)
    release()
    slots.clear()
    extents.clear()
    unused.clear()
