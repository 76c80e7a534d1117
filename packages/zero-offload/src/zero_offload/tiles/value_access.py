"""Sets a shard's first values, and reads and writes the values that checkpoints ask for by name.

Owns moving one tile after another through memory. `Values` runs while no update does; store/tiered_store.py waits for
updates. `PinnedValues` runs beside updates, on another thread.
"""

from __future__ import annotations

import mmap
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import torch
from torch import Tensor

from ..core import round_to
from ..durable.ab_places import parameters_of, states_of
from ..durable.generations import Generations
from ..layout.footprint import PlacedUnit
from ..layout.tile import Tile, round_up
from ..protocols import TileView, UpdateStep
from .parameters import ParameterStore
from .states import StateStore
from .store_context import save

SERIAL_NUMEL = 1 << 14  # that torch copies on one thread (at::internal::GRAIN_SIZE is 1 << 15)


class _Reader(ABC):
    """Reads logical values out of tiles."""

    def __init__(self, units: Sequence[PlacedUnit], step: UpdateStep) -> None:
        self._units, self._step = units, step

    @abstractmethod
    def _opened(self, tile: Tile, *, change: bool, states: bool = True) -> AbstractContextManager[TileView]:
        """The tile in memory."""

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,), a copy."""
        spec = self._units[i].spec
        values = torch.empty(stop - start, dtype=spec.master_dtype if name == "master" else torch.float32, device="cpu")
        is_parameter = name == "master" and spec.dtype == torch.float32  # see UpdateStep.layout
        for tile in self._tiles(i, start, stop):
            low, high = max(start, tile.start), min(stop, tile.stop)
            needs_states = tile.trainable and not is_parameter
            with self._opened(tile, change=False, states=needs_states) as view:
                if needs_states:
                    found = self._decoded(tile, view, name)
                else:
                    found = view.parameter if name == "master" else torch.zeros(tile.numel, device="cpu")
                self._copy(found[low - tile.start : high - tile.start], values[low - start : high - start])
        return values

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,), a copy: elements of a state of segment k of shard i in its own shape."""
        tile = self._tile_of(i, k)
        with self._opened(tile, change=False) as view:
            return self._decoded(tile, view, name)[start:stop].clone()

    def _tile_of(self, i: int, k: int) -> Tile:
        """The tile of an uncut segment."""
        unit = self._units[i]
        return next(tile for tile in unit.tiles if tile.start == unit.spec.segments[k].start and tile.uncut is not None)

    def _decoded(self, tile: Tile, view: TileView, name: str) -> Tensor:
        """fp32: "master" or a state, (tile.numel,) unless the state has a shape of its own."""
        return self._step.read(view, name)

    def _copy(self, values: Tensor, into: Tensor) -> None:
        into.copy_(values)

    def _tiles(self, i: int, start: int, stop: int) -> Iterator[Tile]:
        tiles = self._units[i].tiles if start < stop else ()
        return (tile for tile in tiles if tile.start < stop and tile.stop > start)


class Values(_Reader):
    """Logical values of every shard: "master" and the step's states, wherever and in whatever layout they are.

    They are fp32. The master of a shard that is not trained is the shard itself, in its own dtype.
    """

    def __init__(self, units: Sequence[PlacedUnit], host: ParameterStore, states: StateStore, step: UpdateStep) -> None:
        super().__init__(units, step)
        self._host, self._states = host, states

    def first(self, i: int, master: Tensor, *, kept: bool = False) -> None:
        """Lays out shard i from its master (shard_numel,), unless it is whole on a device.

        kept: trained tiles keep the values that an earlier process left on disk. Without it nothing is read.
        """
        unit = self._units[i]
        if master.numel() != unit.spec.numel:
            raise ValueError(f"initial({i}) has {master.numel()} elements, {unit.spec.name} has {unit.spec.numel}")
        if unit.whole:  # the device's store lays it out
            return
        master = master.detach().to("cpu", unit.spec.master_dtype)
        for tile in unit.tiles:
            if kept and tile.trainable:
                self._host.restore(tile)
                continue
            values = master[tile.start : tile.stop]
            with self._opened(tile, change=True, read=kept) as view:
                if tile.trainable:
                    self._step.initialise(view, values)
                else:
                    round_to(values, view.parameter)
                self._host.changed(tile)

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        """Overwrites elements [start, start + len(values)). A new master also sets the parameter."""
        stop = start + values.numel()
        dtype = self._units[i].spec.master_dtype if name == "master" else torch.float32
        values = values.detach().to("cpu", dtype).reshape(-1)
        for tile in self._tiles(i, start, stop):
            low, high = max(start, tile.start), min(stop, tile.stop)
            part = values[low - start : high - start]
            with self._opened(tile, change=True) as view:
                if tile.trainable:
                    whole = part
                    if part.numel() != tile.numel:
                        whole = self._step.read(view, name)
                        whole[low - tile.start : high - tile.start] = part
                    self._step.write(view, name, whole)
                elif name == "master":
                    round_to(part, view.parameter[low - tile.start : high - tile.start])
                if name == "master":
                    self._host.changed(tile)

    def write_shaped(self, i: int, k: int, name: str, start: int, values: Tensor) -> None:
        with self._opened(self._tile_of(i, k), change=True) as view:
            view.states[name][start : start + values.numel()].copy_(values)

    @contextmanager
    def _opened(self, tile: Tile, *, change: bool, states: bool = True, read: bool = True) -> Iterator[TileView]:
        """The tile in memory, with or without its `states`. With `change` these are written back, else they stay in
        their slot, as if read ahead. `read=False`: everything will be written, so nothing need be read.
        """
        self._host.begin_update(tile.unit, wait=True, read=read, steal=True)
        slot = None
        try:
            if states and tile in self._states.stored:
                slot = self._states.begin_read(tile, wait=True) if read else self._states.slots.take(tile)
                assert slot is not None
                slot.wait_changeable()
                if change:  # where this ends early, the tier must have the old values
                    save([(self._states.slots, slot)])
            views = self._states.views(tile, slot) if tile.trainable else {}
            parameter = self._host.for_update(tile, read=read)
            yield TileView(views, parameter, parameter[:0], tile.uncut)
            if states and change:
                self._states.changed(tile, slot)
                slot = None
        finally:
            if slot is not None and change:  # it ended early: the tier has the old values
                self._states.slots.give(slot)
            elif slot is not None:
                self._states.keep(slot)
            self._host.end_update(tile.unit, wanted=False)


class PinnedValues(_Reader):
    """A durable store's values at the time of pinning, read from disk tile by tile. As zero_core.store.Pinned.

    A tile is read and decoded once, and kept in memory until a read begins after it. ready: returns when the
    generation is pinned, or raises.
    """

    def __init__(
        self,
        units: Sequence[PlacedUnit],
        step: UpdateStep,
        alignment: int,
        generations: Generations,
        ready: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(units, step)
        self._alignment, self._generations, self._ready = alignment, generations, ready
        self._held: dict[Tile, tuple[TileView, list[Tensor], dict[str, Tensor]]] = {}
        self._spare: dict[int, list[Tensor]] = {}  # memory, by its bytes: a page that was touched costs nothing again
        self._ahead = deque(tile for unit in units for tile in unit.tiles)

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        """(stop - start,). Reads go forward through shards and elements; the last elements may be read again."""
        self._advance(i, start)
        with torch.no_grad():
            return super().read_state(i, name, start, stop)

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        """As zero_core.store.Pinned."""
        self._advance(i, self._tile_of(i, k).start)
        with torch.no_grad():
            return super().read_shaped(i, k, name, start, stop)

    def _advance(self, i: int, start: int) -> None:
        """Gives up all tiles before element `start` of shard i."""
        self._ready()
        for tile in [tile for tile in self._held if tile.unit != i or tile.stop <= start]:
            for memory in self._held.pop(tile)[1]:
                self._spare.setdefault(memory.numel(), []).append(memory)
        while self._ahead and (self._ahead[0].unit, self._ahead[0].stop) <= (i, start):
            tile = self._ahead.popleft()
            self._generations.give_up([parameters_of(tile), states_of(tile)])

    def close(self) -> None:
        """Gives up all tiles that were not read. Idempotent."""
        with suppress(Exception):  # else it could be pinned after this, for good
            self._ready()
        self._held.clear()
        self._spare.clear()
        self._generations.pins.give_up()

    def _opened(self, tile: Tile, *, change: bool, states: bool = True) -> AbstractContextManager[TileView]:
        assert tile.trainable and not change, f"{tile} is not pinned"
        if tile not in self._held:
            self._held[tile] = self._fetched(tile)
        return nullcontext(self._held[tile][0])

    def _decoded(self, tile: Tile, view: TileView, name: str) -> Tensor:
        found = self._held[tile][2]
        if name not in found:
            found[name] = super()._decoded(tile, view, name)
        return found[name]

    def _copy(self, values: Tensor, into: Tensor) -> None:
        """Copies in pieces that torch copies on one thread: its other threads would spin beside those of training."""
        for piece, target in zip(values.split(SERIAL_NUMEL), into.split(SERIAL_NUMEL), strict=True):
            target.copy_(piece)

    def _fetched(self, tile: Tile) -> tuple[TileView, list[Tensor], dict[str, Tensor]]:
        unit = self._units[tile.unit]
        dtype, record = unit.spec.dtype, unit.records[tile.index]
        nbytes = tile.numel * dtype.itemsize
        memories = [self._bytes(parameters_of(tile), round_up(nbytes, self._alignment))]
        parameter, states = memories[0][:nbytes].view(dtype), {}
        if record is not None:
            memories.append(self._bytes(states_of(tile), record.nbytes))
            for field, offset in zip(record.fields, record.offsets, strict=True):
                states[field.name] = memories[1][offset : offset + field.nbytes].view(field.dtype)
        return TileView(states, parameter, parameter[:0], tile.uncut), memories, {}

    def _bytes(self, name: str, nbytes: int) -> Tensor:
        """(nbytes,) uint8 with the pinned value, in whole pages, which go back to the kernel when they are dropped."""
        spare = self._spare.get(nbytes)
        memory = spare.pop() if spare else torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8)
        self._generations.read_pinned(name, memory)
        return memory
