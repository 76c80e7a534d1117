"""Whole models with stacked experts in groups: a cover of the kinds of stacks. `nox -s experts` runs all of them."""

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zero_offload")

from tests.experts import TOLERANCE, architectures, compare

COVER = [
    ("mixtral.", "eager", 3),  # an auxiliary loss
    ("qwen3_moe.", "batched_mm", 8),
    ("gpt_oss.", "grouped_mm", 3),  # transposed, interleaved, biases
    ("aria.", "batched_mm", 3),  # transposed, not interleaved
    ("nemotron_h.", "grouped_mm", 2),  # no gate
    ("muse_spark.", "grouped_mm", 3),  # a norm after each expert, shared
    ("deepseek_v3.", "grouped_mm", 8),  # shared experts, a bias of the router that a loop outside may update
    ("zaya.", "eager", 3),  # one expert a token
]


RECOMPUTED = ("mixtral.", "gpt_oss.", "aria.", "deepseek_v3.")  # the last two save values after their experts
CASES = [*((*each, False) for each in COVER), *((name, "eager", 3, True) for name in RECOMPUTED)]


@pytest.mark.promise("experts-groups", "experts-recomputed")
@pytest.mark.parametrize(("name", "implementation", "groups", "again"), CASES, ids=str)
def test_losses_and_gradients_are_those_of_the_stock_model(name, implementation, groups, again):
    """again: blocks recompute, and run past experts where the planner says so."""
    ((_, found),) = architectures((name,))
    assert not isinstance(found, str), found
    of_loss, of_gradients, stacks = compare(found, implementation, groups, again=again)
    assert stacks and of_loss < TOLERANCE and of_gradients < TOLERANCE
