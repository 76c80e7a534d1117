"""The rate's schedule, steps of run.epochs, evaluations after each pass, and what validation losses say."""

from types import SimpleNamespace

import pytest
import torch

from zero_train.errors import ConfigError
from zero_train.run import loop
from zero_train.run.loop import evaluates, passes_over, settle_steps
from zero_train.run.ranks import Ranks
from zero_train.schema import OptimConfig
from zero_train.settings import checks, compose
from zero_train.tune import validation


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


def test_the_rate_warms_up_then_falls_along_a_cosine():
    optim = OptimConfig(kind="adamw", lr=1.0, warmup_steps=10, final_fraction=0.1)
    rates = [loop.learning_rate(optim, number, 110) for number in range(1, 111)]
    assert rates[:10] == pytest.approx([n / 10 for n in range(1, 11)])
    assert rates[59] == pytest.approx(0.55)  # half way: the mean of 1 and 0.1
    assert rates[109] == pytest.approx(0.1)
    assert all(later < earlier for earlier, later in zip(rates[9:], rates[10:], strict=False))


@pytest.mark.promise("rates")
def test_a_rate_of_zero_has_a_schedule_and_a_final_fraction_of_one_is_constant():
    constant = OptimConfig(kind="adamw", lr=0.5, warmup_steps=0, final_fraction=1.0)
    assert {loop.learning_rate(constant, number, 5) for number in range(1, 6)} == {0.5}
    optim = OptimConfig(kind="adamw", lr=0.0, warmup_steps=2)
    assert [loop.learning_rate(optim, number, 5) for number in (1, 2, 5)] == [0, 0, 0]
    assert [loop.share(optim, number, 5) for number in (1, 2, 5)] == [0.5, 1, pytest.approx(0.1)]


def history(*losses):
    return [{"step": 5 * at, "eval_loss": loss} for at, loss in enumerate(losses)] + [{"step": 1, "loss": 0.0}]


@pytest.mark.promise("validation-best")
@pytest.mark.parametrize(
    ("words", "losses", "wanted"),
    [
        ([], [0.5], (0, 0, False)),  # before the first step
        ([], [0.5, 3.0, 2.0, 2.5], (10, 1, False)),
        (["run.patience=2"], [9, 3.0, 2.0, 2.5, 2.0], (10, 2, True)),
        (["run.patience=2"], [9, 3.0, float("nan"), float("nan")], (5, 2, True)),
    ],
)
def test_the_best_loss_and_the_end_follow_from_the_losses(words, losses, wanted):
    found = validation.verdict(compose.compose(["task=sft", *words]).run, history(*losses))
    assert (found.step, found.waited, found.stops) == wanted


@pytest.mark.promise("validation-best")
@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_every_row_is_computed_once_in_batches_that_are_alike_on_every_rank(ranks):
    found = [validation.batches_of(11, 3, rank, ranks) for rank in range(ranks)]
    assert len({len(batches) for batches in found}) == 1
    for batches in zip(*found, strict=True):
        assert len({max(len(batch), 1) for batch in batches}) == 1  # one row stands in for none
    assert sorted(row for batches in found for batch in batches for row in batch) == list(range(11))


@pytest.mark.promise("held-out-empty")
def test_held_out_rows_without_a_token_that_counts_are_told():
    trainer = SimpleNamespace(
        model=torch.nn.Identity(),
        _prepare_inputs=lambda given: given,
        compute_loss=lambda model, inputs, return_outputs: torch.tensor(float("nan")),
    )
    rows = [{"labels": torch.full((4,), -100)}] * 3
    with pytest.raises(
        ConfigError, match="none of the 3 validation rows .* data.sequence_length tokens; raise that length"
    ):
        validation.mean_loss(trainer, rows, lambda found: found[0], [[0, 1], [2]], Ranks(), lambda: 0)
