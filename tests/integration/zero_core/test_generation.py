"""Ranks generate texts of different lengths: transformers' synced_gpus=True lets all of them run as many forwards.

Fails if what one rank generates depends on the others, or if training afterwards has other bits.
"""

import pytest
import torch

from tests.integration.zero_core.generating import generate_between


@pytest.mark.promise("generation-synced")
@pytest.mark.parametrize(
    ("size", "stage", "options"),
    [
        (2, 0, {}),
        (2, 2, {}),
        (2, 3, {"prefetch_bytes": 0}),
        (3, 3, {"param_dtype": torch.bfloat16}),
        (3, 3, {"prefetch_bytes": 60_000, "resident_bytes": 60_000}),
    ],
)
def test_generation_of_unequal_length_between_steps_is_that_of_the_plain_model(ranks, size, stage, options):
    pytest.importorskip("transformers")
    ranks(size).run(generate_between, stage, options)
