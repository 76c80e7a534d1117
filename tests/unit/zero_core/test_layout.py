"""Shard arithmetic: every element of every parameter is held exactly once, at aligned places."""

import itertools

import pytest
import torch

from tests import kit
from tests.integration.zero_core import toys
from zero_core.checkpoint.plan import tile_boxes
from zero_core.layout import UnitLayout, boxes, owners
from zero_core.optim.device_store import DeviceStore
from zero_core.store import Segment


@pytest.mark.promise("uneven-sizes")
@pytest.mark.parametrize("shards", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_shards_cover_every_slot_once(shards, itemsize):
    parameters = [("a", (3, 5)), ("empty", (0, 4)), ("b", (100,)), ("c", ())]
    u = UnitLayout.build("u", parameters, itemsize=itemsize, shard_count=shards)
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
        for tile in (1, 3, 20):
            tiles = list(tile_boxes(shape, start, stop, tile))
            assert all(0 < box.numel <= tile for box in tiles)
            cut = [values[tuple(slice(o, o + s) for o, s in zip(b.offsets, b.sizes, strict=True))] for b in tiles]
            assert [box.start for box in tiles] == [int(part.flatten()[0]) for part in cut]
            assert [int(value) for part in cut for value in part.flatten()] == list(range(start, stop))


@pytest.mark.promise("whole-is-one-tile")
@pytest.mark.parametrize("itemsize", [2, 4])
def test_an_uncut_slot_and_the_one_behind_it_begin_at_pages(itemsize):
    """Fails if two tiles would share a block of a disk."""
    parameters = [("norm", (5,)), ("matrix", (7, 9)), ("bias", (3,)), ("other", (2, 2)), ("last", (6, 6))]
    unit = UnitLayout.build("u", parameters, itemsize=itemsize, shard_count=1, uncut={"matrix", "last"})
    page = 4096 // itemsize
    assert [slot.offset for slot in unit.slots] == [0, page, 2 * page, 2 * page + 128 // itemsize, 3 * page]
    assert [slot.uncut for slot in unit.slots] == [False, True, False, False, True]


KINDS = [
    [("norm", (64,)), ("a", (64, 64)), ("bias", (64,)), ("b", (64, 192)), ("c", (7, 9))],
    [("embedding", (500, 64)), ("matrix", (64, 64))],
    [("embedding", (70, 64)), ("matrix", (64, 64)), ("other", (3, 3))],
    [("matrix", (64, 64))],
    [("embedding", (500, 64)), ("norm", (64,))],
]
UNCUT = {"a", "b", "c", "matrix", "other"}


def owned_layouts(units, shards, itemsize=4):
    """The layouts of units of (name, shape), of which those that UNCUT names are needed whole."""
    sizes = ([(torch.Size(shape).numel(), name in UNCUT) for name, shape in unit] for unit in units)
    return [
        UnitLayout.build(f"u{i}", unit, itemsize=itemsize, shard_count=shards, uncut=UNCUT, owners=owned)
        for i, (unit, owned) in enumerate(zip(units, owners(sizes, shards), strict=True))
    ]


@pytest.mark.promise("owners-balance")
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("shards", [2, 3, 4, 7, 64])
def test_owners_have_whole_slots_and_every_element_is_held_once(shards, itemsize):
    page = 4096 // itemsize
    for unit, found in zip(KINDS, owned_layouts(KINDS, shards, itemsize), strict=True):
        assert found.numel % (shards * 128 // itemsize) == 0, "a machine's ranks could not cut it evenly"
        seen = {name: [] for name, _ in unit}
        ranges = [found.shard_range(rank) for rank in range(shards)]
        edges = sorted(ranges)
        assert edges[0][0] == 0 and edges[-1][1] == found.numel
        assert all(before[1] == after[0] for before, after in itertools.pairwise(edges)), "gaps, or twice"
        for rank, (start, stop) in enumerate(ranges):
            assert stop - start == found.numel_of(rank) > 0
            for piece in found.pieces(rank):
                assert start + piece.shard_start == piece.slot.offset + piece.slot_start
                assert not piece.slot.uncut or (piece.numel == piece.slot.numel and piece.shard_start % page == 0)
                seen[piece.slot.name] += range(piece.slot_start, piece.slot_stop)
            starts = [piece.shard_start for piece in found.pieces(rank)]
            assert starts == sorted(starts)
        held = {name: sorted(elements) for name, elements in seen.items()}
        assert held == {name: list(range(torch.Size(shape).numel())) for name, shape in unit}
        assert [slot.name for slot in found.slots] == [name for name, _ in unit], "slots have the parameters' numbers"


@pytest.mark.parametrize("shards", [1, 2, 5])
def test_edges_leave_no_padding_out(shards):
    """Fails if a gradient's padding kept what the memory held before."""
    for found in owned_layouts(KINDS, shards):
        covered = [False] * found.numel
        for slot, edge in zip(found.slots, found.edges(), strict=True):
            assert not any(covered[slot.offset : edge])
            covered[slot.offset : edge] = [True] * (edge - slot.offset)
        assert all(covered)


@pytest.mark.promise("owners-balance")
def test_a_unit_without_uncut_slots_and_one_shard_are_as_they_were():
    assert owned_layouts(KINDS, 3)[4] == UnitLayout.build("u4", KINDS[4], itemsize=4, shard_count=3)
    assert owned_layouts(KINDS, 1)[0] == UnitLayout.build("u0", KINDS[0], itemsize=4, shard_count=1, uncut=UNCUT)


@pytest.mark.promise("owners-balance")
def test_what_may_be_cut_is_cut_evenly_where_there_is_more_of_it():
    found = owned_layouts([[("embedding", (5000, 64)), ("matrix", (64, 64))]], 4)[0]
    assert max(found.numels) - min(found.numels) <= 2 * 1024


LLAMA = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336)]


@pytest.mark.promise("owners-balance")
@pytest.mark.parametrize("shards", [2, 4, 8, 16, 64])
def test_the_longest_rank_of_32_blocks_is_within_a_tenth_of_the_mean(shards):
    """Llama 8 B: 32 blocks of seven matrices and two norms."""
    block = [(torch.Size(shape).numel(), True) for shape in LLAMA] + [(4096, False)] * 2
    shapes = [(f"m{k}", shape) for k, shape in enumerate(LLAMA)] + [("n0", (4096,)), ("n1", (4096,))]
    loads = [0] * shards
    for owned in owners([block] * 32, shards):
        uncut = {name for name, shape in shapes if len(shape) == 2}
        layout = UnitLayout.build("b", shapes, itemsize=2, shard_count=shards, uncut=uncut, owners=owned)
        loads = [load + numel for load, numel in zip(loads, layout.numels, strict=True)]
    longest = max(loads) * shards / sum(loads)
    assert longest <= 1.1, longest


@pytest.mark.promise("whole-is-one-tile")
def test_an_uncut_segment_has_the_shape_of_the_rows_that_it_holds() -> None:
    rows = (((6, 4, 5), 120, (6, 4, 5)), ((6, 4, 5), 40, (2, 4, 5)), ((8,), 3, (3,)), ((), 1, ()), (None, 7, (7,)))
    for shape, held, expected in (*rows, ((0, 3), 0, (0, 3)), ((3, 0), 0, (3, 0))):
        assert Segment(128, 128 + held, 0, "experts", shape, uncut=True).uncut_shape == expected


@pytest.mark.promise("segments")
@kit.on_ranks(1, 2)
def test_a_segment_says_which_elements_of_which_shape_it_has(size) -> None:
    """Every segment of a rank is read where its parameter has it."""
    dense, _, _, optimizer = kit.pair(toys.Stack, toys.adamw, store=(store := DeviceStore()))
    whole = dict(dense.named_parameters())
    specs = [shard.spec for shard in store._shards]
    for i, spec in enumerate(specs):
        master = store.read_state(i, "master", 0, spec.numel)
        for segment in spec.segments:
            parameter, stop = whole[segment.name], segment.offset + segment.stop - segment.start
            assert segment.shape == parameter.shape
            assert torch.equal(master[segment.start : segment.stop], parameter.flatten()[segment.offset : stop])
            for box in boxes(segment.shape, segment.offset, stop):
                where = tuple(slice(o, o + n) for o, n in zip(box.offsets, box.sizes, strict=True))
                first = segment.start + box.start - segment.offset
                assert torch.equal(master[first : first + box.numel].view(box.sizes), parameter[where])
    within = sum(segment.offset > 0 for spec in specs for segment in spec.segments)
    assert (within > 0) == (size > 1 and kit.world()[0] > 0)
    optimizer.close()
