"""Every ByteStore of this package against the shipped suite."""

import pytest

from zero_offload import MemoryByteStore
from zero_offload.protocols import ByteStore
from zero_offload.testing import ByteStoreSuite, FaultyByteStore

pytestmark = pytest.mark.promise("suites")


class TestMemory(ByteStoreSuite):
    def make_store(self) -> ByteStore:
        return MemoryByteStore()


class TestMemoryAtOnce(ByteStoreSuite):
    def make_store(self) -> ByteStore:
        return MemoryByteStore(asynchronous=False)


class TestFaultyWithoutFaults(ByteStoreSuite):
    def make_store(self) -> ByteStore:
        return FaultyByteStore(MemoryByteStore())
