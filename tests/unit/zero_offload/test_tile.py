"""What an update is told of the parts of segments that lie in a tile."""

import pytest
import torch

from zero_core.store import GroupStep, Segment, ShardSpec, stretches
from zero_offload.layout.tile import cut, segment_steps


@pytest.mark.promise("segments")
def test_a_part_of_a_segment_says_which_elements_of_its_parameter_it_has() -> None:
    segments = (Segment(0, 96, 0, "a", (300,), 204), Segment(128, 428, 0, "b", (30, 10)))
    spec = ShardSpec("unit", 512, torch.float32, segments)
    found = [s for tile in cut(0, spec, 256) for s in segment_steps(tile, segments, (1, 1), [GroupStep({})])]
    assert [(s.start, s.stop, s.shape, s.offset) for s in found] == [
        (0, 96, (300,), 204),
        (128, 256, (30, 10), 0),
        (0, 172, (30, 10), 128),
    ]


@pytest.mark.promise("whole-is-one-tile")
def test_an_uncut_parameter_is_one_tile_with_its_padding_and_the_rest_is_cut_from_there() -> None:
    """Fails if a matrix is cut, or shares a tile, or a tile elsewhere has another size than it is asked for."""
    segments = (
        Segment(0, 300, 0, "vectors", (300,)),
        Segment(1024, 2000, 1, "matrix", (61, 16), uncut=True),
        Segment(2048, 2100, 1, "small", (4, 13), uncut=True),
        Segment(3072, 3700, None, "frozen", (628,)),
    )
    spec = ShardSpec("unit", 3712, torch.float32, segments)
    ends = [(0, 1024, None), (1024, 2048, segments[1]), (2048, 3072, segments[2]), (3072, 3712, None)]
    assert list(stretches(spec)) == ends
    tiles = cut(0, spec, 256)
    assert [(tile.start, tile.stop) for tile in tiles if tile.uncut is None] == [
        *((start, start + 256) for start in range(0, 1024, 256)),
        *((3072, 3328), (3328, 3584), (3584, 3712)),
    ]
    assert [(t.start, t.stop, t.uncut) for t in tiles if t.uncut is not None] == ends[1:3]
    assert [tile.trainable for tile in tiles] == [True, True, False, False, True, True, False, False, False]
    assert [tile.index for tile in tiles] == list(range(len(tiles)))
    assert list(stretches(ShardSpec("unit", 512, torch.float32, segments[:1]))) == [(0, 512, None)]
    assert stretches(ShardSpec("unit", 0, torch.float32, ())) == ()
