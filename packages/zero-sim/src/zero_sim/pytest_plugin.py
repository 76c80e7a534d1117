"""Fails tests in which a race occurs: those that use the fixture `no_races`, or all of them with `--no-races`.

Load it with `-p zero_sim.pytest_plugin`. A test in which races are expected is marked `@pytest.mark.races_expected`.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator

import pytest

from . import races
from .build import native

_WATCHED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("zero-sim")
    group.addoption("--no-races", action="store_true", help="let every test fail in which a race occurs")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "races_expected: the test may have races, also where all tests must not")


def pytest_sessionstart(session: pytest.Session) -> None:
    native.install_fault_handler()  # again: pytest's faulthandler has put itself in front of it


@pytest.fixture
def no_races(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails the test if a race occurs in it. Earlier work has ended by then, and its races are forgotten."""
    with races.detecting():
        races.synchronize()
        races.take_races()
        request.node.stash[_WATCHED] = True
        yield


@pytest.fixture(autouse=True)
def _no_races_anywhere(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--no-races") and request.node.get_closest_marker("races_expected") is None:
        request.getfixturevalue("no_races")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Looks for races at the end of the test itself, so that it fails rather than its teardown."""
    watched = item.stash.get(_WATCHED, False)
    try:
        result = yield
        if watched:
            races.synchronize()
    except BaseException:
        if watched and (found := races.take_races()):
            item.add_report_section("call", "races", races.report(found))
        raise
    if watched and (found := races.take_races()):
        pytest.fail(races.report(found), pytrace=False)
    return result
