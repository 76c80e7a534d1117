"""The package where nothing could be compiled: aiofiles moves the bytes, and says so."""

from tests.integration.zero_nvme.faults import run_python

SCRIPT = """
import asyncio, sys
sys.modules["zero_nvme._native"] = None
import zero_nvme
with zero_nvme.Slab(sys.argv[1], allow_memory=True) as slab:
    print(slab.backend, "|", slab.reason)
    buffer = zero_nvme.empty(3 << 20)
    buffer[:] = bytes(range(256)) * (len(buffer) // 256)
    extent = slab.allocate(len(buffer))
    tickets = [slab.write(extent, buffer)]
    zero_nvme.wait_any(tickets)
    back = zero_nvme.empty(len(buffer))
    async def main():
        return await slab.read(extent, back)
    assert asyncio.run(main()) == len(back) and back == buffer
    slab.write(extent, b"read-only bytes", 7).wait()
    part = bytearray(15)
    slab.read(extent, part, 7).wait()
    assert part == b"read-only bytes"
try:
    zero_nvme.Slab(sys.argv[1], backend="io_uring", allow_memory=True)
except zero_nvme.BackendUnavailable as error:
    print(error)
"""


def test_everything_works_through_aiofiles(tmp_path):
    first, named = run_python(SCRIPT, str(tmp_path)).splitlines()
    assert first == "aiofiles | zero_nvme._native: ENOSYS"
    assert "backend=io_uring does not work" in named
