"""Shard arithmetic: every element of every parameter is held exactly once, at aligned places."""

from __future__ import annotations

import itertools

import pytest
import torch

from zero_core.layout import UnitLayout, boxes


def layout(shards: int, itemsize: int = 4) -> UnitLayout:
    return UnitLayout.build(
        "u", [("a", (3, 5)), ("empty", (0, 4)), ("b", (100,)), ("c", ())], itemsize=itemsize, shard_count=shards
    )


@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_shards_cover_every_slot_once(shards, itemsize):
    u = layout(shards, itemsize)
    quantum = 128 // itemsize
    assert u.numel % (quantum * shards) == 0
    assert all(s.offset % quantum == 0 for s in u.slots)
    seen = {s.name: [] for s in u.slots}
    for rank in range(shards):
        start, stop = u.shard_range(rank)
        assert stop - start == u.shard_numel
        for piece in u.pieces(rank):
            assert start + piece.shard_start == piece.slot.offset + piece.slot_start
            assert piece.shard_stop <= u.shard_numel
            seen[piece.slot.name] += range(piece.slot_start, piece.slot_stop)
    assert seen == {s.name: list(range(s.numel)) for s in u.slots}


def test_slots_do_not_depend_on_the_number_of_shards():
    assert layout(1).slots == layout(5).slots


@pytest.mark.parametrize("shape", [(7,), (3, 4), (2, 3, 4), (2, 2, 3, 2), (1, 5), (5, 1), ()])
def test_boxes_rebuild_any_range(shape):
    total = torch.Size(shape).numel()
    values = torch.arange(total).reshape(shape)
    for start, stop in itertools.combinations_with_replacement(range(total + 1), 2):
        found = boxes(shape, start, stop)
        assert len(found) <= max(1, 2 * len(shape) - 1)
        parts = []
        for box in found:
            part = values[tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))].reshape(-1)
            assert int(part[0]) == box.start
            assert part.numel() == box.numel
            parts.append(part)
        rebuilt = torch.cat(parts) if parts else torch.arange(0)
        assert rebuilt.tolist() == list(range(start, stop))


def test_a_rank_outside_the_shards_is_refused():
    with pytest.raises(ValueError, match="rank 2 of 2 shards of unit u"):
        layout(2).shard_range(2)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_an_uncut_slot_and_the_one_behind_it_begin_at_pages(itemsize):
    """Fails if two tiles would share a block of a disk."""
    parameters = [("norm", (5,)), ("matrix", (7, 9)), ("bias", (3,)), ("other", (2, 2)), ("last", (6, 6))]
    unit = UnitLayout.build("u", parameters, itemsize=itemsize, shard_count=1, uncut={"matrix", "last"})
    page = 4096 // itemsize
    assert [slot.offset for slot in unit.slots] == [0, page, 2 * page, 2 * page + 128 // itemsize, 3 * page]
    assert [slot.uncut for slot in unit.slots] == [False, True, False, False, True]
