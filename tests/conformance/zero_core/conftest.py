"""Groups of one rank too, which the pool of one rank that other tests use is not."""

import pytest

from zero_core.testing import RankPool


@pytest.fixture(scope="module")
def group_of(ranks):
    """`group_of(n)`: n ranks in a process group."""
    alone = RankPool(1, start_method=ranks(2).start_method)
    yield lambda size: alone if size == 1 else ranks(size)
    alone.close()
