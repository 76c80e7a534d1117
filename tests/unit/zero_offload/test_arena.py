"""Arena: alignment, exact size, storages of their own, life of the views."""

import weakref

import pytest
import torch

from zero_offload.errors import BudgetError, ClosedError
from zero_offload.memory.arena import HUGE_PAGE_BYTES, PAGE_BYTES, Arena


def test_begins_at_a_huge_page_and_blocks_at_pages() -> None:
    arena = Arena(5 * PAGE_BYTES)
    blocks = [arena.take(nbytes) for nbytes in (1, PAGE_BYTES, PAGE_BYTES + 1)]
    addresses = [block.raw(0, 1).data_ptr() for block in blocks]
    assert addresses[0] % HUGE_PAGE_BYTES == 0
    assert [address - addresses[0] for address in addresses] == [0, PAGE_BYTES, 2 * PAGE_BYTES]
    with pytest.raises(AssertionError, match="wanted"):
        arena.take(2 * PAGE_BYTES)
    arena.take(PAGE_BYTES)


def test_a_view_outlives_the_arena() -> None:
    arena = Arena(PAGE_BYTES)
    view = arena.take(PAGE_BYTES).view(torch.float32, 4)
    view.fill_(3.0)
    arena.close()
    arena.close()
    assert view.tolist() == [3.0] * 4
    with pytest.raises(ClosedError, match="because it was closed; make a new store"):
        arena.take(1)


@pytest.mark.promise("small-budget")
def test_more_than_can_be_mapped_is_refused() -> None:
    with pytest.raises(BudgetError, match="cannot be mapped"):
        Arena(1 << 60)


def test_memory_given_back_is_gone_and_blocks_have_other_memory_later() -> None:
    """Fails if the arena, or a block, keeps the mapping; or if who kept a view sees what is written later."""
    arena = Arena(3 * PAGE_BYTES)
    blocks = [arena.take(PAGE_BYTES) for _ in range(3)]
    kept = blocks[1].view(torch.float32, 4).fill_(1.0)
    mapping = weakref.ref(arena.memory)
    arena.give_back()
    arena.give_back()
    with pytest.raises(ClosedError, match="if the store sleeps, call its wake"):
        blocks[0].raw(0, 1)
    assert mapping() is not None and not arena.has_memory
    arena.take_back()
    arena.take_back()
    blocks[1].view(torch.float32, 4).fill_(2.0)
    assert kept.tolist() == [1.0] * 4
    del kept
    assert mapping() is None
    addresses = [block.raw(0, 1).data_ptr() for block in blocks]
    assert addresses[0] % HUGE_PAGE_BYTES == 0
    assert [address - addresses[0] for address in addresses] == [0, PAGE_BYTES, 2 * PAGE_BYTES]
