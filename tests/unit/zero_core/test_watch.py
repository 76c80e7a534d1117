"""What a visit wrote: seen by version counters, by other memory, or by a comparison of values in some of the visits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from zero_core.runtime.watch import Watch


@pytest.fixture
def flat() -> Tensor:
    return torch.zeros(8)


@pytest.fixture
def parameters(flat: Tensor) -> list[Tensor]:
    return [flat.data[:4], flat.data[4:]]


@pytest.fixture
def watch(flat: Tensor, parameters: list[Tensor]) -> Watch:
    made = Watch(flat, [flat.data[:4], flat.data[4:]], parameters)
    made.begin("forward", compares=True)
    return made


def test_what_no_visit_wrote_is_not_counted(watch, parameters):
    torch.autograd.graph.increment_version(parameters[0])
    watch.forgive(0)
    assert not watch.was_written()


def test_values_tell_of_a_write_that_no_counter_saw(watch, parameters):
    parameters[0].data.fill_(2)
    assert not watch.was_written() and bool(watch.unseen_write())
    assert watch.unseen_write() is None, "it is told once"


def test_the_first_second_fourth_and_so_on_of_a_kind_are_compared(watch, flat):
    compared = []
    for visit in range(2, 1025):
        watch.begin("forward", compares=True)
        compared += [visit] if watch.unseen_write() is not None else []
    assert compared == [2, 4, 8, 16, 32, 64, 128, 256, 512, 768, 1024]
    for kind, compares in ((None, True), ("another", False)):
        watch.begin(kind, compares=compares)
        assert watch.unseen_write() is None
