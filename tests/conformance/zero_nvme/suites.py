"""Tests the rules of a slab and of a named file, for every backend."""

from __future__ import annotations

import asyncio
import concurrent.futures
import errno
import gc
import os
import random
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from zero_nvme import Cancelled, Extent, File, NvmeError, Slab, empty, wait_all, wait_any

PAGE = 4096
BLOCK = 64 << 10  # small blocks, so that small requests are cut


def random_bytes(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def mapped(data: bytes) -> memoryview:
    """The bytes in aligned memory, so that direct I/O takes them as they are."""
    buffer = empty(len(data))
    buffer[:] = data
    return buffer


class Bytes(bytearray):
    """A bytearray that weak references may be made of."""


def written(slab: Slab, data: bytes) -> Extent:
    """An extent that has the data."""
    extent = slab.allocate(len(data))
    slab.write(extent, data).wait()
    return extent


def read(slab: Slab, extent: Extent) -> bytes:
    """The bytes of an extent."""
    back = bytearray(extent.nbytes)
    slab.read(extent, back).wait()
    return bytes(back)


class SlabSuite:
    """Tests the promises of `Slab` on one backend. A subclass gives the fixture `make_slab`."""

    @pytest.fixture
    def make_slab(self) -> Callable[..., Slab]:
        raise NotImplementedError("a subclass gives this fixture")

    @pytest.fixture
    def slab(self, make_slab: Callable[..., Slab]) -> Iterator[Slab]:
        with make_slab(capacity_bytes=4 << 20, block_bytes=BLOCK, inflight_bytes=4 * BLOCK) as slab:
            yield slab

    # -- bytes

    @pytest.mark.parametrize("nbytes", [1, 511, PAGE, PAGE + 1, BLOCK, 3 * BLOCK + 12345, 1 << 20])
    def test_what_was_written_is_read(self, slab: Slab, nbytes: int) -> None:
        data, back = random_bytes(nbytes), bytearray(nbytes)
        assert slab.read(written(slab, data), back).result() == nbytes
        assert bytes(back) == data

    def test_any_range_at_any_address(self, slab: Slab) -> None:
        """Breaks if a bounced edge is cut wrongly, or changes bytes beside the range."""
        generator = random.Random(1)
        size = 3 * BLOCK
        expected = bytearray(random_bytes(size))
        extent = written(slab, bytes(expected))
        memory = empty(size + PAGE)
        for _ in range(60):
            start = generator.choice([0, generator.randrange(size), generator.randrange(0, size, PAGE)])
            stop = generator.choice([size, generator.randrange(start, size + 1), min(size, start + 3)])
            shift = generator.choice([0, start % PAGE, generator.randrange(PAGE)])
            view = memory[shift : shift + stop - start]
            if generator.random() < 0.5:
                view[:] = generator.randbytes(stop - start)
                expected[start:stop] = view
                slab.write(extent, view, start).wait()
            else:
                slab.read(extent, view, start).wait()
                assert view == expected[start:stop], (start, stop, shift)
        assert read(slab, extent) == expected

    def test_neighbouring_unaligned_writes_at_once(self, slab: Slab) -> None:
        """Breaks if two requests that share a page read, change and write it at the same time."""
        step = 1000
        extent = slab.allocate(200 * step)
        pieces = [random_bytes(step, seed) for seed in range(200)]
        wait_all([slab.write(extent, piece, index * step) for index, piece in enumerate(pieces)])
        assert read(slab, extent) == b"".join(pieces)

    def test_aligned_ranges_are_not_copied(self, slab: Slab) -> None:
        extent = slab.allocate(2 * BLOCK)
        buffer = mapped(random_bytes(2 * BLOCK))
        slab.write(extent, buffer).wait()
        slab.read(extent, buffer).wait()
        stats = slab.stats()
        assert stats["read"]["bytes"] == stats["write"]["bytes"] == 2 * BLOCK
        assert stats["read"]["bounced_bytes"] == stats["write"]["bounced_bytes"] == 0

    # -- buffers

    def test_buffer_lives_until_completion_and_no_longer(self, slab: Slab) -> None:
        extent = slab.allocate(BLOCK)
        for _ in range(3):
            source = Bytes(BLOCK)
            gone = weakref.ref(source)
            ticket = slab.write(extent, source)
            del source
            ticket.wait()
            gc.collect()
            assert gone() is None

    # -- tickets

    def test_timeout_leaves_the_request_going(self, slab: Slab) -> None:
        data = random_bytes(1 << 20)
        extent = slab.allocate(len(data))
        tickets = [slab.write(extent, data) for _ in range(20)]
        with suppress(TimeoutError):  # or it was that fast
            tickets[-1].wait(0)
        wait_all(tickets)
        assert read(slab, extent) == data

    def test_wait_any_and_all(self, slab: Slab) -> None:
        extents = [slab.allocate(PAGE) for _ in range(50)]
        pending = [slab.write(extent, random_bytes(PAGE)) for extent in extents]
        everything = list(pending)
        while pending:
            done = wait_any(pending, timeout=60)
            assert done and all(ticket.done() for ticket in done)
            pending = [ticket for ticket in pending if ticket not in done]
        wait_all(everything, timeout=60)
        with pytest.raises(ValueError, match="no tickets"):
            wait_any([])

    def test_ten_thousand_in_flight(self, slab: Slab) -> None:
        pieces = 10_000 if slab.backend != "aiofiles" else 1_000  # two thread switches each
        data = random_bytes(256 * PAGE)
        extent = written(slab, data)
        back = [bytearray(64) for _ in range(pieces)]
        tickets = [slab.read(extent, piece, (index * 64) % len(data)) for index, piece in enumerate(back)]
        wait_all(tickets, timeout=240)
        for index, piece in enumerate(back):
            start = (index * 64) % len(data)
            assert piece == data[start : start + 64]

    def test_back_pressure(self, make_slab: Callable[..., Slab]) -> None:
        """Breaks if a full queue deadlocks: nobody waits for a ticket here, and only two may be incomplete."""
        with make_slab(max_requests=2) as slab:
            extents = [slab.allocate(PAGE) for _ in range(200)]
            tickets = [slab.write(extent, random_bytes(PAGE)) for extent in extents]
            assert sum(not ticket.done() for ticket in tickets) <= 2
            wait_all(tickets)

    def test_await(self, slab: Slab) -> None:
        async def main() -> list[int]:
            extents = [slab.allocate(size) for size in range(1, 20000, 997)]
            written = await asyncio.gather(*(slab.write(e, random_bytes(e.nbytes)) for e in extents))
            back = [bytearray(extent.nbytes) for extent in extents]
            tickets = [slab.read(extent, piece) for extent, piece in zip(extents, back, strict=True)]
            await asyncio.gather(*(asyncio.ensure_future(ticket) for ticket in tickets + tickets))
            assert all(bytes(piece) == random_bytes(len(piece)) for piece in back)
            return written

        for _ in range(2):  # a second loop must not inherit the first one's reader
            assert asyncio.run(main()) == list(range(1, 20000, 997))

    def test_cancelling_a_task_drains_its_request(self, slab: Slab) -> None:
        extent = slab.allocate(4 << 20)
        data = random_bytes(4 << 20)

        async def main() -> bool:
            tickets = [slab.write(extent, data) for _ in range(8)]
            task = asyncio.ensure_future(tickets[-1])
            await asyncio.sleep(0)
            if task.done():
                return False  # this thread was away for longer than all eight took
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert tickets[-1].done()
            return True

        try:
            assert any(asyncio.run(main()) for _ in range(50))
        finally:
            slab.drain()

    def test_cancel(self, slab: Slab) -> None:
        """Breaks if a cancelled request never completes, another one is harmed, or the slab becomes unusable."""
        extent = slab.allocate(1 << 20)
        other = slab.allocate(1 << 20)
        data = random_bytes(1 << 20)
        tickets = [slab.write(extent, data) for _ in range(30)]
        kept = slab.write(other, data)
        for ticket in tickets:
            ticket.cancel()
        for ticket in tickets:
            try:
                ticket.wait()
            except Cancelled as error:
                assert error.errno == errno.ECANCELED
        kept.wait()
        assert not kept.cancel()
        assert read(slab, other) == data
        slab.write(extent, data)
        slab.cancel()
        slab.write(extent, data).wait()

    # -- mistakes

    def test_closed(self, make_slab: Callable[..., Slab]) -> None:
        slab = make_slab()
        extent = slab.allocate(PAGE)
        ticket = slab.write(extent, bytes(PAGE))
        slab.close()
        slab.close()
        assert ticket.done() and ticket.result() == PAGE
        assert slab.stats()["write"]["bytes"] == PAGE
        for use in (lambda: slab.read(extent, bytearray(1)), lambda: slab.allocate(1), lambda: slab.drain()):
            with pytest.raises(ValueError, match="closed"):
                use()

    # -- the rest

    def test_many_threads(self, slab: Slab) -> None:
        def work(seed: int) -> None:
            generator = random.Random(seed)
            for _ in range(15):
                data = generator.randbytes(generator.randrange(1, 3 * BLOCK))
                extent = written(slab, data)
                assert read(slab, extent) == data
                slab.free(extent)

        with concurrent.futures.ThreadPoolExecutor(6) as pool:
            for future in [pool.submit(work, seed) for seed in range(6)]:
                future.result()


class FileSuite:
    """Tests the promises of `File` on one backend. A subclass gives the fixture `open_file`."""

    @pytest.fixture
    def open_file(self) -> Callable[..., File]:
        """Takes the parameters of File, with `backend` filled in."""
        raise NotImplementedError("a subclass gives this fixture")

    def test_size_is_what_was_written(self, open_file: Callable[..., File], tmp_path: Path) -> None:
        """Breaks if the padding of direct I/O stays, or a tail overwrites bytes before it."""
        name = tmp_path / "file"
        data = random_bytes(3 * PAGE + 100)
        with open_file(name, "w") as file:
            for start, stop in [(0, 5000), (5000, 5003), (5003, len(data))]:
                file.write(data[start:stop], start).wait()
            file.sync()
            assert name.stat().st_size == file.size == len(data)
        assert name.read_bytes() == data
        with open_file(name) as file:
            back = bytearray(len(data))
            assert file.read(back).result() == len(data)
            assert bytes(back) == data
            tail = bytearray(7)
            file.read(tail, len(data) - 7).wait()
            assert bytes(tail) == data[-7:]

    def test_truncated_underneath(self, open_file: Callable[..., File], tmp_path: Path) -> None:
        """Breaks if a short read passes for a whole one; the ticket has path, offset, wanted and got."""
        name = tmp_path / "file"
        size = 4 * BLOCK
        name.write_bytes(random_bytes(size))
        with open_file(name, "r+", block_bytes=BLOCK) as file:
            os.truncate(name, BLOCK + 1000)
            back, others = bytearray(size), [bytearray(BLOCK) for _ in range(4)]
            tickets = [file.read(others[0]), file.read(back), *(file.read(other) for other in others[1:])]
            with pytest.raises(NvmeError, match="ends early") as caught:
                tickets[1].wait()
            error = caught.value
            assert error.errno == errno.ENODATA and error.path == str(name)
            assert error.offset is not None and error.offset >= BLOCK
            assert error.wanted is not None and error.got is not None and error.got < error.wanted
            for ticket, other in zip([tickets[0], *tickets[2:]], others, strict=True):
                ticket.wait()  # the others are unharmed
                assert bytes(other) == random_bytes(size)[:BLOCK]
            head = bytearray(BLOCK)
            file.read(head).wait()  # and the file stays usable
            assert bytes(head) == random_bytes(size)[:BLOCK]
            assert file.stats()["read"]["failures"] > 0
