"""Steps of run.epochs, and evaluations after each pass."""

import pytest

from zero_train.errors import ConfigError
from zero_train.run.loop import evaluates, passes_over, settle_steps
from zero_train.settings import checks, compose


def composed(*words, batch=4):
    found = compose.compose(["task=sft", "model.path=x", *words])
    found.run.global_batch = batch
    return found


@pytest.mark.promise("epochs-mixture")
@pytest.mark.parametrize(
    ("epochs", "rows", "steps"), [("1", 40, 10), ("1", 41, 11), ("0.5", 40, 5), ("3", 3, 3), ("1e-3", 9, 1)]
)
def test_epochs_are_steps(epochs, rows, steps):
    found = composed(f"run.epochs={epochs}")
    settle_steps(found, rows)
    assert (found.run.steps, found.optim.warmup_steps) == (steps, -(-steps // 10))


def test_a_warm_up_that_is_longer_than_the_epochs_is_refused():
    found = composed("run.epochs=1", "optim.warmup_steps=11")
    checks.values(found)  # the data are not read yet
    with pytest.raises(ConfigError, match=r"raise run\.epochs"):
        settle_steps(found, 40)
    settle_steps(found, 44)


def test_an_evaluation_follows_each_pass_and_the_last_step():
    found = composed("run.evaluate_every=epoch", "run.epochs=2.5")
    settle_steps(found, 10)  # passes end within steps 3 and 5
    due = [number for number in range(1, found.run.steps + 1) if evaluates(found.run, number, 10)]
    assert due == [3, 5, 7]


@pytest.mark.parametrize("value", ["epochs", "-1", "1.5", "true", "null"])
def test_other_times_of_evaluation_are_told(value):
    with pytest.raises(ConfigError, match=r"run\.evaluate_every"):
        checks.values(composed(f"run.evaluate_every={value}"))


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        (68, "1.7 passes over"),
        (40, "1 pass over"),
        (2, "0.05 passes over"),
        (40_000, "1,000 passes"),
        (1e-16, "at most 1 of 40 rows"),
    ],
)
def test_passes_are_told(samples, said):
    assert passes_over(samples, 40, "40 rows").startswith(said)
