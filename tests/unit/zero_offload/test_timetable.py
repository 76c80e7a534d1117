"""Units in time, by hand. Fails if a unit starts before its copy, or a gradient lands where one is still on its way."""

from dataclasses import replace

import pytest

from zero_offload.planning.timetable import UnitWork, backward_seconds, forward_seconds

UNIT = UnitWork(forward=4, backward=8, update=3, upload=1, upload_again=1, download=2, add=1, nbytes=10)


def test_compute_hides_what_is_shorter_but_for_the_first_update_and_copy():
    assert forward_seconds([UNIT] * 5, 10, updated=True) == 3 + 1 + 5 * 4
    assert forward_seconds([UNIT] * 5, 10, updated=False) == 1 + 5 * 4


def test_a_longer_update_leaves_the_last_copy_and_the_last_compute():
    slow = replace(UNIT, update=6)
    assert forward_seconds([slow] * 5, 10, updated=True) == 5 * 6 + 1 + 4


def test_a_unit_without_compute_delays_the_next():
    embedding = UnitWork(update=5, upload=2, nbytes=10)
    assert forward_seconds([embedding, UNIT], 10, updated=True) == 5 + 3 + 1 + 4


def test_copies_go_as_far_ahead_as_the_bytes_allow():
    """The first computes long, the others not at all: what was copied meanwhile need not be waited for."""
    units = [replace(UNIT, forward=100), *[replace(UNIT, forward=0, upload=10)] * 4]
    assert [forward_seconds(units, ahead, updated=False) for ahead in (0, 10, 20, 30, 40)] == [131, 131, 121, 111, 101]


def test_a_backward_ends_with_a_gradient_that_nothing_hides():
    assert backward_seconds([UNIT] * 5, 10) == (1 + 5 * 8, 2 + 1)


@pytest.mark.parametrize(("download", "seconds"), [(8, 41), (10, 47)])
def test_two_landing_buffers_are_waited_for(download, seconds):
    """Unit k starts when the gradient two before it is gone."""
    done, tail = backward_seconds([replace(UNIT, download=download)] * 5, 10)
    assert done + tail == 1 + 8 + 5 * download + 1
    assert done == seconds


def test_the_host_may_be_behind_with_its_sums():
    done, tail = backward_seconds([replace(UNIT, add=20)] * 3, 10)
    assert (done, tail) == (1 + 3 * 8, 1 + 8 + 2 + 3 * 20 - 25)


def test_nothing_takes_no_time():
    assert forward_seconds([], 0, updated=True) == 0
    assert backward_seconds([], 0) == (0, 0)
