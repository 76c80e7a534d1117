"""Options of this package's tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all-exactness", action="store_true", help="every combination of the exactness matrix")
