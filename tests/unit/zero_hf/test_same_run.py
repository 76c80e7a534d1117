"""What makes two runs of a Trainer one: how data are compared."""

import numpy as np
import torch

from zero_hf.trainer.run_identity import digest as digest_of


class Thing:
    """Of no data set, and its text has an address."""


def test_rows_are_told_apart_by_their_values_and_not_by_addresses():
    def digest(*rows):
        return digest_of(list(rows))

    assert digest({"a": Thing(), "b": {"x", "y"}}) == digest({"a": Thing(), "b": {"y", "x"}})
    assert digest(np.array([Thing(), 1], dtype=object)) == digest(np.array([Thing(), 1], dtype=object))
    assert digest({"a": torch.ones(2, dtype=torch.bfloat16)}) != digest({"a": torch.zeros(2, dtype=torch.bfloat16)})
    assert digest([1, [2.5]]) != digest([1, [2]]) and digest(1) != digest(1, 1)
    assert digest_of(iter([])) == "list_iterator"
