"""Two machines for tests of this folder, where there can be two; see `two`.

pytest tests/machines       all of them; skips every test, with the reason, where there cannot be two machines
pytest tests                leaves the folder out where there cannot
"""

from pathlib import Path

import pytest

from tests.machines.two import Machines, missing

HERE = Path(__file__).parent


def pytest_ignore_collect(collection_path, config):
    asked = any(Path(word.partition("::")[0]).resolve().is_relative_to(HERE) for word in config.args)
    return True if missing() and not asked else None


@pytest.fixture
def machines(tmp_path):
    """Two machines with a link that has no limit."""
    if reason := missing():
        pytest.skip(f"no two machines: {reason}")
    with Machines(folder=tmp_path / "logs") as made:
        yield made


@pytest.fixture
def far_machines(tmp_path):
    """Two machines with a link of 1 Gbit/s, and a round trip of 4 ms."""
    if reason := missing():
        pytest.skip(f"no two machines: {reason}")
    with Machines(rate=1e9, delay=2000, folder=tmp_path / "logs") as made:
        yield made
