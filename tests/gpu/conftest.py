"""The device that tests of this folder run on: a GPU, or the CPU to rehearse the same code where there is none.

pytest tests/gpu                  skips every test, visibly, without a GPU
pytest tests/gpu --device cpu     runs what does not need one
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cuda", help="what tests/gpu run on: cuda (default), cuda:1, or cpu")


def _wanted(config) -> torch.device:
    # The option is unknown where this folder was reached from above: `pytest tests`.
    return torch.device(config.getoption("--device", default="cuda"))


def pytest_collection_modifyitems(config, items):
    """On a GPU a test that hangs does so in C++, where no signal reaches Python: a thread ends the process, loudly."""
    if _missing(_wanted(config)) is None and _wanted(config).type == "cuda":
        for item in items:
            if item.path.is_relative_to(Path(__file__).parent):
                item.add_marker(pytest.mark.timeout(300, method="thread"))


def _missing(wanted: torch.device) -> str | None:
    """Why there is no such device; None where there is."""
    if wanted.type == "cpu":
        return None
    if torch.version.cuda is None:
        return f"no GPU: torch {torch.__version__} is built without CUDA (--device cpu rehearses)"
    found = torch.cuda.device_count()
    if (wanted.index or 0) >= found:
        return f"no GPU {wanted.index or 0}: torch {torch.__version__} sees {found} (--device cpu rehearses)"
    return None


@pytest.fixture(scope="session")
def device(pytestconfig) -> Iterator[torch.device]:
    """Where the test runs, with an index on CUDA. Skips where it is missing."""
    wanted = _wanted(pytestconfig)
    reason = _missing(wanted)
    if reason is not None:
        pytest.skip(reason)
    if wanted.type == "cuda":
        wanted = torch.device("cuda", wanted.index or 0)
        torch.cuda.set_device(wanted)
        yield wanted
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: on a machine with other work, threads wait for each other
    yield wanted
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def device_ranks(pytestconfig, ranks):
    """A pool of ranks, each with a GPU of its own and NCCL between them: all GPUs there are. Skips under two.

    Rehearsed on the CPU: two ranks and gloo.
    """
    if _wanted(pytestconfig).type == "cpu":
        yield ranks(2)
        return
    found = torch.cuda.device_count()
    if found < 2:
        pytest.skip(f"ranks with a GPU each need two GPUs, found {found}")
    from zero_core.testing import RankPool

    pool = RankPool(found, device="cuda")
    yield pool
    pool.close()


@pytest.fixture
def only_cuda(device):
    """Call it before what the CPU cannot show, after everything that it can run: the rest skips there."""

    def stop_here(what: str) -> None:
        if device.type != "cuda":
            pytest.skip(f"rehearsed on {device}; {what} is CUDA's to show")

    return stop_here
