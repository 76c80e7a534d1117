"""The one fixture: every backend that this machine has, and the reason why not."""

import functools
import tempfile

import pytest

import zero_nvme
from zero_nvme.io.io_queue import attempt

# Each backend with O_DIRECT and through the page cache, which is all that aiofiles can do.
VARIANTS = [
    (name, direct) for name in zero_nvme.BACKENDS for direct in (True, False) if name != "aiofiles" or not direct
]


@functools.cache
def why_not(backend: str, direct: bool) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        return attempt([folder], zero_nvme.Options(backend=backend, direct=direct))


@pytest.fixture(params=VARIANTS, ids=lambda variant: f"{variant[0]}-{'direct' if variant[1] else 'cached'}")
def variant(request) -> dict[str, object]:
    """`backend` and `direct` for Slab and File."""
    backend, direct = request.param
    failure = why_not(backend, direct)
    if failure is not None:
        pytest.skip(f"{backend} does not work here: {failure}")
    return {"backend": backend, "direct": direct}
