"""What an update is told of the parts of segments that lie in a tile."""

from __future__ import annotations

import torch

from zero_core.store import GroupStep, Segment, ShardSpec
from zero_offload.tiles.tile import cut, segment_steps


def test_a_part_of_a_segment_says_which_elements_of_its_parameter_it_has() -> None:
    segments = (Segment(0, 96, 0, "a", (300,), 204), Segment(128, 428, 0, "b", (30, 10)))
    spec = ShardSpec("unit", 512, torch.float32, segments)
    found = [s for tile in cut(0, spec, 256) for s in segment_steps(tile, segments, (1, 1), [GroupStep({})])]
    assert [(s.start, s.stop, s.shape, s.offset) for s in found] == [
        (0, 96, (300,), 204),
        (128, 256, (30, 10), 0),
        (0, 172, (30, 10), 128),
    ]


def test_a_segment_may_be_made_without_its_shape() -> None:
    segments = (Segment(0, 96, 0, "a"),)
    (tile,) = cut(0, ShardSpec("unit", 96, torch.float32, segments), 256)
    (step,) = segment_steps(tile, segments, (1,), [GroupStep({})])
    assert (step.shape, step.offset) == (None, 0)
