"""Tiles of a rehearsal are small."""

import pytest

from tests.device.zero_offload import runs


@pytest.fixture(scope="session", autouse=True)
def small_tiles(device):
    with runs.small_tiles(device):
        yield
