"""Commits steps to disk as generations: each value has two places, and a manifest says which one is current.

Owns the manifests, and the order in which a commit writes them and the values. The caller decides when a step is
complete, and gives the other data of the step (`blob`).

[Note: a commit]
A step writes each value to the place that the last generation does not use, so that generation stays whole:

    values of step N      to the places that generation N-1 does not use
    body of N             which place each value is in, and the caller's blob; over the body of N-2
    sync                  from here on values and body survive a power cut
    header of N           where the body is, and checksums; over the header of N-2
    sync                  from here on N is the last generation

Headers are the first two extents of the ByteStore, so that a later process can find them. A crash before the last sync
leaves generation N-1, whose places, body and header were not written to. Without the syncs (`sync=False`) this holds if
the process is killed, but not after a power cut, which may leave a header without its body.

Nothing may be written for step N+1 until every rank has committed N: see `zero_core.api.resume`.
"""

from __future__ import annotations

import errno
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import START_AGAIN, GenerationError, SwapError
from ..layout.tile import round_up
from ..memory.transfers import Stored, Transfer, Transfers
from ..protocols import NamedByteStore
from .ab_places import Pins, TwoPlaces

FORMAT = 1
DELETE = "delete the slab with slab.remove(), and load a checkpoint"
MAGIC = b"zerogen\0"
HEADER = struct.Struct("<8sIQQQI")  # magic, format, number; the body's offset, bytes and checksum
CHECKSUM = struct.Struct("<I")  # of the header
LENGTH = struct.Struct("<Q")  # of the JSON that a body begins with
BODY_BYTES = 1 << 16  # spare room of a body


@dataclass(frozen=True)
class Manifest:
    """A generation found on disk: its number, the places of its values, and the caller's blob."""

    number: int
    facts: Mapping[str, Any]  # "layout", "values": by name, as `TwoPlaces.described`, "bodies": their extents
    blob: bytes


class Generations:
    """The generations in one ByteStore, which has no other user. One thread at a time.

    `layout`: facts, such as shapes and tile size, that must be equal, as JSON, in a process that continues.
    """

    def __init__(self, transfers: Transfers, layout: Mapping[str, Any], *, sync: bool = True) -> None:
        """Reads the manifests of an earlier process. Raises GenerationError for a format of a newer version."""
        store = transfers.store
        if not isinstance(store, NamedByteStore) or not store.name:
            raise GenerationError(
                f"durable= needs files that stay when the process ends, and this {type(store).__name__} has no name; "
                "give nvme= a store that has a name, such as zero_nvme.Slab([path], name=...)"
            )
        self._transfers, self._store, self._sync = transfers, store, sync
        self.layout = json.loads(json.dumps(layout))
        self._values: dict[str, TwoPlaces] = {}
        self.pins = Pins()
        self.number = 0  # the last generation; 0: none
        self.blob: bytes | None = None  # that of the adopted generation; None: no values are an earlier process's
        self._headers = [self._header(place * transfers.alignment) for place in (0, 1)]
        self._bodies: list[Stored | None] = [None, None]
        self.found = self._find() if store.found else []

    # -- reading generations of an earlier process --------------------------------------------------------------

    def _header(self, offset_bytes: int) -> Stored:
        """Claims a header of an earlier process, or allocates it: a process killed early may have left none."""
        nbytes = self._transfers.alignment
        others = GenerationError(
            f"durable= needs a slab of its own, and {self._named()} has other data; give the store another slab"
        )
        if self._store.found:
            try:
                return Stored(self._transfers, self._store.claim(offset_bytes, nbytes))
            except ValueError as error:
                raise others from error
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise
        stored = self._transfers.allocate(nbytes)
        if stored.extent.offset_bytes != offset_bytes:
            raise others
        return stored

    def _find(self) -> list[Manifest]:
        """Returns the generations on disk, the last one first: at most two.

        Raises GenerationError if the last one's header is intact and its body is not. No crash does that: it is damage,
        and the values of the generation before it may be overwritten.
        """
        headers = sorted(filter(None, map(self._read_header, self._headers)), reverse=True)
        found = [self._read_manifest(*header) for header in headers]
        if found and found[0] is None:
            raise GenerationError(
                f"{self._named()} is damaged: the checksum of its last step, generation {headers[0][0]}, is wrong, and "
                f"the run cannot be continued; {DELETE}"
            )
        return [each for each in found if each is not None]

    def _read_header(self, header: Stored) -> tuple[int, int, int, int] | None:
        """Returns (number, body offset, body bytes, body checksum). None: the header is torn, or was never written."""
        text = self._read(header, header.nbytes)
        end = HEADER.size + CHECKSUM.size
        magic, form, *rest = HEADER.unpack(text[: HEADER.size])
        if CHECKSUM.unpack(text[HEADER.size : end])[0] != zlib.crc32(text[: HEADER.size]) or magic != MAGIC:
            return None
        if form > FORMAT:
            raise GenerationError(
                f"{self._named()} was written in format {form}, and this zero-offload reads formats up to {FORMAT}; "
                f"use the version that wrote the slab. Or {DELETE}"
            )
        number, offset, nbytes, checksum = rest
        return number, offset, nbytes, checksum

    def _read_manifest(self, number: int, offset: int, nbytes: int, checksum: int) -> Manifest | None:
        """Returns None if the checksum differs: the body is damaged, or is that of generation `number` + 2."""
        try:
            body = self._claim(offset, nbytes)
        except Exception:  # the files were cut
            return None
        text = self._read(body, nbytes)
        body.free()
        if zlib.crc32(text) != checksum:
            return None
        (length,) = LENGTH.unpack(text[: LENGTH.size])
        facts = json.loads(text[LENGTH.size : LENGTH.size + length])
        return Manifest(number, facts, text[LENGTH.size + length :])

    def close(self) -> None:
        """Frees the extents that were claimed to read the manifests."""
        for header in self._headers:
            header.free()

    def found_layout(self) -> Mapping[str, Any] | None:
        """Returns the layout of the last generation on disk, or None."""
        return self.found[0].facts["layout"] if self.found else None

    def adopt(self, number: int, *, any_layout: bool = False) -> None:
        """Continues from generation `number`. Call it before any allocation.

        any_layout: the caller commits nothing. 0: from none; the generations on disk are dropped. Raises
        GenerationError, and changes nothing, if the generation is not on disk or has another layout.
        """
        if number == 0:
            self._forget_after(0)
            return
        manifest = next((each for each in self.found if each.number == number), None)
        if manifest is None:
            numbers = ", ".join(str(each.number) for each in self.found) or "none"
            raise GenerationError(
                f"{self._named()} lacks generation {number}, which is the last in another rank's slab (this slab has: "
                f"{numbers}). So the slabs are not from the same run; on every rank {DELETE}"
            )
        if not any_layout:
            self._check_layout(manifest)
        if manifest.facts["boot"] not in (None, _boot()):
            raise GenerationError(
                f'{self._named()} was written with durable="process", which syncs no disk (durable=True does), and the '
                f"machine has restarted since, so values of generation {number} may be lost; {DELETE}"
            )
        self._forget_after(number)
        self._bodies = [None if each is None else self._claim(*each) for each in manifest.facts["bodies"]]
        for name, (nbytes, first, second, now) in manifest.facts["values"].items():
            self._values[name] = TwoPlaces((self._claim(first, nbytes), self._claim(second, nbytes)), nbytes, self.pins)
            self._values[name].now = self._values[name].committed = now
        self.blob, self.number = manifest.blob, number

    def _forget_after(self, number: int) -> None:
        """Erases the headers of later generations, because their values will be overwritten."""
        for header in self._headers:
            there = self._read_header(header)
            if there is not None and there[0] > number:
                self._write(header, b"")
                self._synced()

    def _check_layout(self, manifest: Manifest) -> None:
        there = manifest.facts["layout"]
        differing = [key for key in {**there, **self.layout} if there.get(key) != self.layout.get(key)]
        if differing:
            told = "; ".join(
                f"{key}: {_short(there.get(key))}, now {_short(self.layout.get(key))}"
                for key in differing
                if key != "units"
            )
            told = told or "names or shapes of its units"
            raise GenerationError(
                f"{self._named()} holds a run with another model or other settings ({told}). To continue that run, "
                "use its model and settings. Or write a checkpoint of that run with zero_offload.write_checkpoint, and "
                "load that. To start a new run, give the slab another name, or delete it with slab.remove()"
            )

    # -- values -------------------------------------------------------------------------------------------------

    def own(self, name: str, nbytes: int, source: Callable[[], Tensor] | None = None) -> TwoPlaces:
        """Returns a value's two places: those of the adopted generation, else new ones."""
        if self.blob is None:
            places = self._transfers.allocate(nbytes), self._transfers.allocate(nbytes)
            self._values[name] = TwoPlaces(places, nbytes, self.pins)
        value = self._values[name]
        assert value.nbytes == nbytes, f"{name} has {nbytes} bytes, and the generation {value.nbytes}"
        value.source, value.changed = source, source is not None and self.blob is None
        return value

    def load_sources(self) -> None:
        """Reads the values that are copied at each commit from the adopted generation into their memory."""
        self._in_turns(value.read(value.source(), name) for name, value in self._copied())

    def make_room(self, blob_bytes: int) -> None:
        """Allocates the room of both manifests, for a blob of about this size, so that commits need not allocate."""
        values = {name: value.described() for name, value in self._values.items()}
        for place in (0, 1):
            self._room_for(place, lambda: self._body(values, bytes(blob_bytes)))

    # -- a commit -----------------------------------------------------------------------------------------------

    def commit(self, blob: bytes) -> None:
        """Makes the values written until now the next generation; see [Note: a commit].

        Raises the error of a failed write or sync. Then the last generation is unchanged.
        """
        self._complete()
        number = self.number + 1
        place = number % 2
        values = {name: value.described() for name, value in self._values.items()}
        extent = self._room_for(place, lambda: self._body(values, blob))
        body = self._body(values, blob)
        self._write(extent, body)
        self._synced()
        header = HEADER.pack(MAGIC, FORMAT, number, extent.extent.offset_bytes, len(body), zlib.crc32(body))
        self._write(self._headers[place], header + CHECKSUM.pack(zlib.crc32(header)))
        self._synced()
        for value in self._values.values():
            value.commit()
        self.number = number

    def _complete(self) -> None:
        """Writes the changed values that are copied at commits, and waits for all writes."""
        self._in_turns(value.write(value.source(), name) for name, value in self._copied() if value.changed)
        for value in self._values.values():
            value.drain()
            value.changed = False

    def _body(self, values: Mapping[str, Sequence[int]], blob: bytes) -> bytes:
        bodies = [None if each is None else [each.extent.offset_bytes, each.extent.nbytes] for each in self._bodies]
        boot = None if self._sync else _boot()
        text = json.dumps({"layout": self.layout, "values": values, "bodies": bodies, "boot": boot}).encode()
        return LENGTH.pack(len(text)) + text + blob

    def _room_for(self, place: int, body: Callable[[], bytes]) -> Stored:
        """Returns the extent of this place's body, and allocates a larger one if the body does not fit."""
        room, wanted = self._bodies[place], len(body()) + BODY_BYTES  # room for the numbers of a new extent
        if room is None or room.nbytes < wanted:
            if room is not None:
                room.free()
            self._bodies[place] = None  # also where there is no more room
            self._bodies[place] = room = self._transfers.allocate(2 * wanted)
        return room

    # -- a copy -------------------------------------------------------------------------------------------------

    def pin(self) -> None:
        """Keeps every value as it is now until `read_pinned` or `give_up`; see [Note: a copy] of `ab_places`."""
        self._complete()
        self.pins.put(self._values.values())

    def read_pinned(self, name: str, buffer: Tensor) -> None:
        """Reads a pinned value into `buffer`, and unpins it. Any thread. Raises GenerationError if it is not pinned any
        more, as when the store is closed."""
        value = self._values[name]
        place = self.pins.place(value)
        if place is not None:
            self._in_turns([value.places[place].read(buffer, name)])
        if place is None or self.pins.place(value) is None:  # or while it was read
            raise GenerationError(
                f"the store was closed before value {name!r} was copied, so the checkpoint is incomplete; call "
                "wait() on the result of save() before you close the store. Or call optimizer.close(), which waits"
            )
        self.pins.give_up([value])

    def give_up(self, names: Iterable[str]) -> None:
        """Unpins values that a copy does not need."""
        self.pins.give_up([self._values[name] for name in names if name in self._values])

    def _copied(self) -> Iterable[tuple[str, Any]]:
        return ((name, value) for name, value in self._values.items() if value.source is not None)

    # -- bytes --------------------------------------------------------------------------------------------------

    def _in_turns(self, transfers: Iterable[Transfer]) -> None:
        """Submits all of `transfers`, then waits for them."""
        self._transfers.in_flight.wait(list(transfers))

    def _synced(self) -> None:
        try:
            if self._sync:
                self._store.sync()
        except OSError as error:
            raise SwapError(f"a step could not be written to disk: {error}; {START_AGAIN}") from error

    def _claim(self, offset_bytes: int, nbytes: int) -> Stored:
        return Stored(self._transfers, self._store.claim(offset_bytes, nbytes))

    def _read(self, stored: Stored, nbytes: int) -> bytes:
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        self._in_turns([stored.read(buffer, "a manifest")])
        return bytes(buffer.numpy().tobytes()) if nbytes else b""

    def _write(self, stored: Stored, text: bytes) -> None:
        nbytes = min(stored.nbytes, round_up(max(len(text), 1), self._transfers.alignment))  # else it is read first
        buffer = torch.zeros(nbytes, dtype=torch.uint8, device="cpu")
        if text:
            buffer[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self._in_turns([stored.write(buffer, "a manifest")])

    def _named(self) -> str:
        return f"slab {self._store.name!r}"


def _boot() -> str:
    """Returns the id of the machine's current boot. Without syncs, a generation may be lost at the next one."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _short(value: Any) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
