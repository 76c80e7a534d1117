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


@pytest.mark.promise("experts-groups")
@pytest.mark.parametrize(("name", "implementation", "groups"), COVER, ids=[name for name, *_ in COVER])
def test_losses_and_gradients_are_those_of_the_stock_model(name, implementation, groups):
    ((_, found),) = architectures((name,))
    assert not isinstance(found, str), found
    of_loss, of_gradients, stacks = compare(found, implementation, groups)
    assert stacks and of_loss < TOLERANCE and of_gradients < TOLERANCE


@pytest.mark.promise("experts-recomputed")
@pytest.mark.parametrize("name", ["mixtral.", "gpt_oss.", "aria.", "deepseek_v3."])
def test_blocks_that_recompute_have_the_stock_gradients_and_run_past_experts_where_the_planner_says_so(name):
    """After the experts of the last two, values are saved for backward; after those of the first two, none."""
    ((_, found),) = architectures((name,))
    assert not isinstance(found, str), found
    of_loss, of_gradients, stacks = compare(found, "eager", 3, again=True)
    assert stacks and of_loss < TOLERANCE and of_gradients < TOLERANCE
