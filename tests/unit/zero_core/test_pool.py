"""Which buffer of a pool serves a request, and what is counted. Fails if a buffer is lent twice or counted wrongly."""

from __future__ import annotations

import pytest
import torch

from zero_core.pool import Pool, Shelf


def test_a_request_takes_the_smallest_buffer_that_is_not_much_larger():
    pool = Pool(torch.device("cpu"))
    small, large = pool.take(100, torch.float32), pool.take(1000, torch.float32)
    where = small.data_ptr(), large.data_ptr()
    pool.give(small)
    pool.give(large)
    again = pool.take(160, torch.bfloat16)  # 320 bytes, of 400
    assert again.data_ptr() == where[0] and again.dtype is torch.bfloat16 and again.shape == (160,)
    other = pool.take(100, torch.float32)  # the free buffer has ten times as much
    assert other.data_ptr() not in where
    assert (pool.nbytes, pool.peak_nbytes, pool.lent) == (4800, 4800, 2)
    pool.drop(other)
    pool.clear()
    assert (pool.nbytes, pool.peak_nbytes, pool.lent) == (400, 4800, 1)


def test_after_an_interrupt_nothing_is_lent_and_the_peak_stays():
    pool = Pool(torch.device("cpu"))
    lost = pool.take(10, torch.float32)
    pool.begin_anew()
    assert (pool.nbytes, pool.peak_nbytes, pool.lent) == (0, 40, 0)
    assert pool.take(10, torch.float32).data_ptr() != lost.data_ptr()


def test_memory_that_there_is_not_is_not_counted():
    def refuse(nbytes: int) -> None:
        raise MemoryError

    shelf = Shelf(refuse)
    with pytest.raises(MemoryError):
        shelf.take(10)
    assert shelf.nbytes == shelf.peak_nbytes == 0
