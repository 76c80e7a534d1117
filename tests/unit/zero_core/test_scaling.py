"""The loss scale: its own rule, and DeepSpeed's, which has hysteresis and a minimum."""

import random

import pytest

from zero_core import LossScale
from zero_core.errors import GradientError


class Counted:
    """DeepSpeed's rule as it is documented, counted in steps since the last overflow: the slow twin."""

    def __init__(self, value: float, window: int, hysteresis: int, consecutive: bool, minimum: float) -> None:
        self.value, self.window, self.all = value, window, hysteresis
        self.consecutive, self.minimum = consecutive, minimum
        self.left, self.step, self.last = hysteresis, 0, -1

    def update(self, finite: bool) -> None:
        stable = self.step - self.last - 1
        if not finite:
            if self.left == 1:
                if self.value == self.minimum:
                    raise GradientError("at the minimum")
                self.value = max(self.value / 2, self.minimum)
            else:
                self.left -= 1
            self.last = self.step
        else:
            doubles = stable > 0 and stable % self.window == 0
            if doubles or self.consecutive:
                self.left = self.all
            self.value *= 2 if doubles else 1
        self.step += 1


@pytest.mark.promise("loss-scale-deepspeed")
@pytest.mark.parametrize("seed", range(8))
def test_it_follows_deepspeeds_rule_step_for_step(seed):
    draw = random.Random(seed)
    window, hysteresis, consecutive = draw.choice([1, 2, 5]), draw.choice([1, 2, 3]), draw.random() < 0.5
    minimum = draw.choice([1.0, 64.0])
    twin = Counted(2.0**10, window, hysteresis, consecutive, minimum)
    scale = LossScale(
        2.0**10, window=window, first_window=window + 1, hysteresis=hysteresis, consecutive_hysteresis=consecutive,
        minimum=minimum, fails_at_minimum=True,
    )  # fmt: skip
    seen = set()
    for _ in range(300):
        finite = draw.random() < 0.7
        try:
            twin.update(finite)
        except GradientError:
            with pytest.raises(GradientError, match=f"loss_scale={minimum:g}, its minimum"):
                scale.overflowed()
            break
        scale.succeeded() if finite else scale.overflowed()
        assert scale.value == twin.value
        seen.add(scale.value)
    assert len(seen) > 1


def test_hysteresis_goes_on_after_a_checkpoint_and_older_states_load():
    saved = LossScale(16.0, hysteresis=3)
    saved.overflowed()
    again = LossScale(1.0, hysteresis=3)
    again.load_state_dict(saved.state_dict())
    for value in (16.0, 8.0, 4.0):
        again.overflowed()
        assert again.value == value
    old = LossScale(1.0, hysteresis=2)
    old.load_state_dict({"value": 8.0, "finite_steps": 1})
    old.overflowed()
    assert (old.value, old.finite_steps) == (8.0, 0)


@pytest.mark.parametrize("wrong", [{"minimum": 0.0}, {"hysteresis": 0}])
def test_a_minimum_or_hysteresis_that_cannot_be_is_refused(wrong):
    with pytest.raises(ValueError, match="a positive number, and at least 1"):
        LossScale(**wrong)
