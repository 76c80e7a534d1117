"""The device that tests of this folder run on: an accelerator, a simulated one, or the CPU to rehearse the same code.

pytest tests/device                       the accelerator that torch sees; skips every test, visibly, where it sees none
pytest tests/device --device cuda:1       that one
pytest tests/device --device sim          zero-sim's: every test runs under its race detector, in every rank
pytest tests/device --device cpu          runs what does not need a discrete device
"""

import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

SHARE, GOLDEN = 1 / 3, 0.618034  # multiples of the golden ratio keep no step with any parameter
HERE = Path(__file__).parent


def pytest_addoption(parser):
    parser.addoption("--device", help="what tests/device run on: cuda, cuda:1, sim, cpu; default: what torch sees")


def pytest_configure(config):
    if _name(config).partition(":")[0] != "sim":
        return
    from tests.device import simulation

    if not simulation.missing:
        simulation.begin()
        config.pluginmanager.import_plugin("zero_sim.pytest_plugin")


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config, items):
    """Marks the cases that CI leaves out: of each test the first is kept, and a third, spread over its parameters.

    A test that hangs beside a device does so in C++, where no signal reaches Python: a thread ends the process.
    """
    cases: Counter[tuple[Path, str]] = Counter()
    for item in (item for item in items if item.path.is_relative_to(HERE)):
        test = item.path, item.originalname
        if cases[test] * GOLDEN % 1 >= SHARE:
            item.add_marker(pytest.mark.device_full)
        cases[test] += 1
        if _name(config) not in ("", "cpu"):
            item.add_marker(pytest.mark.timeout(300, method="thread"))


def _name(config) -> str:
    """What --device says, or torch's accelerator; empty where there is none."""
    # The option is unknown where this folder was reached from above: `pytest tests`.
    if asked := config.getoption("--device", default=None):
        return asked
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return found.type if found is not None else ""


def _device(config) -> torch.device:
    """With an index, but for the CPU. Skips where it is missing."""
    name = _name(config)
    if not name:
        pytest.skip(f"no accelerator: torch {torch.__version__} sees none (--device sim simulates one)")
    if name.startswith("sim"):
        from tests.device import simulation

        if simulation.missing:
            pytest.skip(simulation.missing)
    wanted = torch.device(name)
    if wanted.type == "cpu":
        return wanted
    module = torch.get_device_module(wanted)
    found = module.device_count() if module.is_available() else 0
    if (wanted.index or 0) >= found:
        pytest.skip(f"no {name}: torch {torch.__version__} sees {found} (--device sim simulates some)")
    return torch.device(wanted.type, wanted.index or 0)


@pytest.fixture(scope="session")
def device(pytestconfig) -> Iterator[torch.device]:
    """Where the test runs."""
    wanted = _device(pytestconfig)
    threads = torch.get_num_threads()
    if wanted.type in ("cpu", "sim"):
        torch.set_num_threads(1)  # tiny tensors: on a machine with other work, threads wait for each other
    if wanted.type != "cpu":
        torch.get_device_module(wanted).set_device(wanted)
    yield wanted
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def races_fail_the_test(pytestconfig, request) -> None:
    """On the simulated device a race fails the test in which it occurs, unless it is marked `races_expected`."""
    if not _name(pytestconfig).startswith("sim"):
        return
    from tests.device import simulation

    if simulation.missing:
        return
    if found := simulation.take_races():
        pytest.fail("races in a fixture of this module, or after the end of a test:\n" + "\n".join(map(str, found)))
    if request.node.get_closest_marker("races_expected") is None:
        request.getfixturevalue("no_races")


@pytest.fixture(scope="session")
def device_ranks(pytestconfig, ranks):
    """A pool of ranks, each with a device of its own: all that there are, two of the simulated. Skips under two.

    Rehearsed on the CPU: two ranks and gloo.
    """
    yield from _pool(_device(pytestconfig), ranks, 2)


@pytest.fixture(scope="module")
def four_device_ranks(pytestconfig, ranks):
    """Likewise four or more, for two machines of several ranks."""
    yield from _pool(_device(pytestconfig), ranks, 4)


def _pool(device, ranks, least):
    if device.type == "cpu":
        yield ranks(least)
        return
    from zero_core.testing import RankPool

    if device.type == "sim":
        from tests.device.simulation import CheckedRanks

        os.environ["ZERO_SIM_DEVICES"] = str(least)  # read by the ranks when they start; this process has read its own
        pool: Any = CheckedRanks(RankPool(least, device="sim", imports=("tests.device.simulation",)))
    else:
        found = torch.get_device_module(device).device_count()
        if found < least or found % (least // 2):
            pytest.skip(f"ranks with a device each need {least}, found {found}")
        pool = RankPool(found, device=device.type)
    yield pool
    pool.close()
    os.environ.pop("ZERO_SIM_DEVICES", None)


@pytest.fixture
def needs_device(device) -> Callable[[str], None]:
    """Call it before what the CPU cannot show, after everything that it can run: the rest skips there."""

    def stop_here(what: str) -> None:
        if device.type == "cpu":
            pytest.skip(f"rehearsed on {device}; {what} is a device's to show")

    return stop_here
