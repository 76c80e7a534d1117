"""Records of the seam between the core and its stores."""

import pytest

from zero_core.store import Segment


@pytest.mark.promise("whole-is-one-tile")
@pytest.mark.parametrize(
    "shape, held, expected",
    [
        ((6, 4, 5), 120, (6, 4, 5)),
        ((6, 4, 5), 40, (2, 4, 5)),
        ((8,), 3, (3,)),
        ((), 1, ()),
        ((0, 3), 0, (0, 3)),
        ((3, 0), 0, (3, 0)),
        (None, 7, (7,)),
    ],
)
def test_an_uncut_segment_has_the_shape_of_the_rows_that_it_holds(
    shape: tuple[int, ...] | None, held: int, expected: tuple[int, ...]
) -> None:
    assert Segment(128, 128 + held, 0, "experts", shape, uncut=True).uncut_shape == expected
