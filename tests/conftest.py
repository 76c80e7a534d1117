"""Fixtures shared by every package's tests."""

import gc
import multiprocessing
import os
import sys

import pytest

from tests import tiers

# As zero-train does, before torch is imported: threads that wait leave their core to another test's.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def pytest_configure(config):
    for name, meaning in tiers.MARKERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(items):
    tiers.mark(items, tiers.listed())


@pytest.fixture(scope="session")
def ranks():
    """`ranks(n).run(function, *args)`: one in-process rank, or a gloo pool of n kept for the session."""
    testing = pytest.importorskip("zero_core.testing")
    import torch

    # Forked ranks start in no time; but a process that has asked for a GPU may not fork.
    start_method = "spawn" if torch.cuda.is_available() else "forkserver"
    multiprocessing.set_forkserver_preload(["tests.preload"])
    pools = {}

    def pool(size: int):
        if size not in pools:
            pools[size] = testing.LocalRank() if size == 1 else testing.RankPool(size, start_method=start_method)
        return pools[size]

    yield pool
    for made in pools.values():
        made.close()


@pytest.fixture(scope="session")
def interpreter():
    """`interpreter(program)` runs a program in an interpreter of its own; see tests.interpreters."""
    from tests.interpreters import Interpreters

    interpreters = Interpreters()
    yield interpreters.run
    interpreters.close()


@pytest.fixture(autouse=True)
def _no_process_group_stays():
    """A group that a test leaves in this process would be found by the tests after it, which fail in its place."""
    yield
    if (distributed := sys.modules.get("torch.distributed")) is None or not distributed.is_initialized():
        return
    distributed.destroy_process_group()
    pytest.fail("the test left its process group: destroy_process_group() belongs at its end")


@pytest.fixture
def process_group_ends():
    """For tests of what starts a process group of one rank, as `zero_deepspeed.initialize()` does."""
    yield
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def small_chunks():
    """A tile may have `tests.chunks.TILE` elements, 64 times fewer than there are in use."""
    from tests.chunks import small_chunks

    with small_chunks():
        yield


def pytest_collection_finish(session):
    """Tiny tensors are computed by one thread: two wait for each other, and on a machine with other work for long.

    What was imported is taken from the garbage collector, which a test would otherwise wait 0.4 s for, each time.
    """
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    gc.collect()
    gc.freeze()


def pytest_ignore_collect(collection_path, config):
    """zero-sim's tests register a device, which no other test must find: `pytest tests` leaves them out."""
    if collection_path.name == "zero_sim" and not any("zero_sim" in argument for argument in config.args):
        return True
    return None


def pytest_addoption(parser):
    parser.addoption("--all-parity", action="store_true", help="every combination of the parity suite, not the cover")
    parser.addoption("--all-exactness", action="store_true", help="every combination of TieredStore's exactness matrix")
