"""The learning rate's schedule."""

import pytest

from zero_train.run import loop
from zero_train.schema import OptimConfig


def test_the_rate_warms_up_then_falls_along_a_cosine():
    optim = OptimConfig(kind="adamw", lr=1.0, warmup_steps=10, final_fraction=0.1)
    rates = [loop.learning_rate(optim, number, 110) for number in range(1, 111)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)  # half way: the mean of 1 and 0.1
    assert rates[109] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in zip(rates[9:], rates[10:], strict=False))


def test_a_final_fraction_of_one_is_constant_and_no_warm_up_is_allowed():
    optim = OptimConfig(kind="adamw", lr=0.5, warmup_steps=0, final_fraction=1.0)
    assert {loop.learning_rate(optim, number, 5) for number in range(1, 6)} == {0.5}


@pytest.mark.promise("rates")
def test_a_rate_of_zero_has_a_schedule():
    optim = OptimConfig(kind="adamw", lr=0.0, warmup_steps=2)
    assert [loop.learning_rate(optim, number, 5) for number in (1, 2, 5)] == [0, 0, 0]
    assert [loop.share(optim, number, 5) for number in (1, 2, 5)] == [0.5, 1, pytest.approx(0.1)]
