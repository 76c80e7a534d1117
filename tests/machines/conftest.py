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
def machines(request, tmp_path):
    """Two machines with a link that has no limit, or the one that the test's parameter describes."""
    if reason := missing():
        pytest.skip(f"no two machines: {reason}")
    with Machines(**getattr(request, "param", {}), folder=tmp_path / "logs") as made:
        yield made
