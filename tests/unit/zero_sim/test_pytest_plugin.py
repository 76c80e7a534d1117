"""The fixture `no_races` and the options that give it to every test."""

import pytest

pytest.importorskip("zero_sim")
pytest_plugins = ["pytester"]

PROGRAM = """
import torch

def race():
    x, side = torch.ones(10, device="sim"), torch.sim.Stream()
    with torch.sim.stream(side):
        x.fill_(2)

def test_racy_watched(no_races):
    race()

def test_racy_unwatched():
    race()

def test_fine(no_races):
    torch.ones(10, device="sim").fill_(2)

def test_fails_by_itself(no_races):
    race()
    assert 1 == 2

import pytest
@pytest.mark.races_expected
def test_expected():
    race()
"""


@pytest.mark.parametrize(("options", "passed", "failed"), [((), 3, 2), (("--no-races",), 2, 3)])
def test_a_race_fails_the_tests_that_use_the_fixture_or_by_an_option_all(pytester, options, passed, failed):
    pytester.makepyfile(PROGRAM)
    result = pytester.runpytest_inprocess("-p", "zero_sim.pytest_plugin", "-p", "no:cacheprovider", *options)
    result.assert_outcomes(passed=passed, failed=failed)
    result.stdout.fnmatch_lines(["*1 race was found.*", "*missing  stream * waited for default stream*"])
    result.stdout.fnmatch_lines(["*assert 1 == 2*", "*races*", "*1 race was found.*"])
