"""Which visits compare the values of a unit before and after: what they find is `test_writes`'s."""

from __future__ import annotations

import torch

from zero_core.runtime.watch import Watch


def test_the_first_second_fourth_and_so_on_of_a_kind_are_compared():
    flat, compared = torch.zeros(8), []
    watch = Watch(flat, [flat.data], [flat.data])
    for visit in range(1, 1025):
        watch.begin("forward", compares=True)
        compared += [visit] if watch.unseen_write() is not None else []
    assert compared == [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    for kind, compares in ((None, True), ("another", False)):
        watch.begin(kind, compares=compares)
        assert watch.unseen_write() is None
