"""What a history of validation losses says, and which rank computes which rows."""

from types import SimpleNamespace

import pytest
import torch

from zero_train.errors import ConfigError
from zero_train.run.ranks import Ranks
from zero_train.settings import compose
from zero_train.tune import validation


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
    with pytest.raises(ConfigError, match="none of the 3 rows .* raise data.sequence_length"):
        validation.mean_loss(trainer, rows, lambda found: found[0], [[0, 1], [2]], Ranks(), lambda: 0)
