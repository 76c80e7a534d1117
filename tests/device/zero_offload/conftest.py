"""Tiles of a rehearsal: 2^14 elements instead of 2^20, so that small blocks are of several."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from tests.chunks import small_chunks


@pytest.fixture(scope="session", autouse=True)
def small_tiles(device):
    with small_chunks() if device.type in ("cpu", "sim") else nullcontext():
        yield
