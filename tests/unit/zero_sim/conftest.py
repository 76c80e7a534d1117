"""Skips this folder, with the reason, where zero-sim cannot be built; otherwise every test begins and ends in order."""

from collections.abc import Iterator

import pytest

try:
    import zero_sim
except ImportError as error:
    reason = str(error)
else:
    reason = ""


@pytest.fixture(autouse=True)
def in_order() -> Iterator[None]:
    """Looks for races, and leaves idle devices with the options that they had. The next test begins without reports."""
    if reason:
        pytest.skip(reason)
    before = zero_sim.build.native.options()
    with zero_sim.races.detecting():
        zero_sim.races.synchronize()
        zero_sim.take_races()
        yield
        zero_sim.races.synchronize()
        zero_sim.take_races()
    zero_sim.build.native.set_options(before)
