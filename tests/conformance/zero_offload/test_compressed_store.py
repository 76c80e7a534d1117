"""CompressedByteStore against the shipped suite, and what compression adds: a budget that data may exceed."""

import sys
import threading

import pytest
import torch

from zero_offload import BudgetError, CompressedByteStore
from zero_offload.protocols import ByteStore
from zero_offload.testing import ByteStoreSuite

pytest.importorskip("zstandard")
MIB = 1 << 20


class TestCompressed(ByteStoreSuite):
    def make_store(self) -> ByteStore:
        return CompressedByteStore(threads=3)


def noise(nbytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (nbytes,), dtype=torch.uint8)


@pytest.fixture
def store():
    made = CompressedByteStore(2 / 1024)  # 2 MiB
    yield made
    made.close()


@pytest.mark.promise("compressed-memory")
def test_what_compresses_takes_less_than_its_size_and_is_counted(store: CompressedByteStore) -> None:
    extent = store.allocate(4 * MIB)
    weights = torch.randn(2 * MIB).bfloat16()
    with pytest.raises(BudgetError, match="its 4.0 MiB take more than 2.0 MiB when compressed"):
        store.write(extent, noise(4 * MIB)).wait()
    store.write(extent, torch.zeros(4 * MIB, dtype=torch.uint8)).wait()
    store.write(extent, weights[:MIB], 2 * MIB).wait()
    assert store.allocated_bytes == 4 * MIB
    assert 1 * MIB < store.used_bytes < 2 * MIB * 0.75
    back = torch.empty(MIB, dtype=torch.bfloat16)
    store.read(extent, back, 2 * MIB).wait()
    assert torch.equal(back, weights[:MIB])
    store.free(extent)
    assert store.used_bytes == store.allocated_bytes == 0


@pytest.mark.promise("incompressible")
def test_a_failed_write_leaves_what_was_there_and_other_extents_alone(store: CompressedByteStore) -> None:
    kept, other = noise(MIB), store.allocate(2 * MIB)
    extent = store.allocate(MIB)
    store.write(extent, kept).wait()
    with pytest.raises(BudgetError):
        store.write(other, noise(2 * MIB)).wait()
    back = torch.empty_like(kept)
    store.read(extent, back).wait()
    assert torch.equal(back, kept)


def test_reserving_promises_no_more_than_the_ratio(store: CompressedByteStore) -> None:
    store.reserve(2 * MIB)
    with pytest.raises(BudgetError, match="bytes in all do not fit into .*; raise capacity_gib. Or raise ratio"):
        store.reserve(2 * MIB + 1)
    trusting = CompressedByteStore(2 / 1024, ratio=1.5)
    trusting.reserve(3 * MIB)
    trusting.close()


@pytest.mark.promise("compressed-memory")
def test_writes_of_parts_of_one_chunk_at_a_time_lose_nothing() -> None:
    """Without a lock around the parts of a chunk, the last of two writers would restore what the other replaced."""
    store = CompressedByteStore(threads=4)
    extent = store.allocate(MIB)
    expected = noise(MIB)
    begun = threading.Barrier(4)

    def write(quarter: int) -> None:
        begun.wait()
        tickets = [
            store.write(extent, expected[start : start + 4096], start)
            for start in range(quarter * MIB // 4, (quarter + 1) * MIB // 4, 4096)
        ]
        for ticket in tickets:
            ticket.wait()

    threads = [threading.Thread(target=write, args=(quarter,)) for quarter in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    back = torch.empty_like(expected)
    store.read(extent, back).wait()
    store.close()
    assert torch.equal(back, expected)


@pytest.mark.promise("no-zstandard")
def test_the_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'zero-offload\[compressed\]'"):
        CompressedByteStore()
