"""The order of the rows of a run: fails if it depends on how many ranks or steps there are, or a share is missed."""

from __future__ import annotations

from fractions import Fraction
from itertools import islice

import pytest
import torch

from zero_train import config, mixture
from zero_train.errors import ConfigError


def test_rows_of_one_place_come_in_the_order_of_accelerate_pass_after_pass():
    found = list(mixture.Order((7,), None, 3, 21))
    wanted = [torch.randperm(7, generator=torch.Generator().manual_seed(3 + turn)).tolist() for turn in range(3)]
    assert found == sum(wanted, [])


def test_parts_without_weights_are_one_set_of_rows():
    assert list(mixture.Order((4, 3), None, 0, 14)) == list(mixture.Order((7,), None, 0, 14))


def test_each_part_has_its_share_of_any_first_rows_and_goes_through_all_of_its_own():
    order = mixture.Order((50, 9, 200), (3.0, 1.0, 0.5), 1, 900)
    rows = list(order)
    first = [0, 50, 59]
    for part, (weight, size) in enumerate(zip((3.0, 1.0, 0.5), (50, 9, 200), strict=True)):
        inside = [first[part] <= row < first[part] + size for row in rows]
        for n in range(1, 901):
            assert abs(sum(inside[:n]) - n * weight / 4.5) < 1
        own = [row - first[part] for row, is_in in zip(rows, inside, strict=True) if is_in]
        for begin in range(0, len(own) - size, size):
            assert sorted(own[begin : begin + size]) == list(range(size))
    assert order.passes(900) == pytest.approx([12, 200 / 9, 0.5])


@pytest.mark.parametrize(
    "weights", [[10, 1, 1, 1], [20, 1, 1, 1, 1], [91] + [1] * 9, [0.1, 0.2, 0.7], [1e9, 1e-3], [1] * 7, [5, 3, 3, 2.5]]
)
def test_a_share_is_within_one_row_whatever_the_weights_are(weights):
    size, taken = 50, [0] * len(weights)
    whole = sum(Fraction(str(weight)) for weight in weights)
    order = mixture.Order((size,) * len(weights), tuple(map(float, weights)), 0, 1000)
    for n, row in enumerate(order, 1):
        taken[row // size] += 1
        assert all(
            abs(rows - n * Fraction(str(weight)) / whole) < 1 for rows, weight in zip(taken, weights, strict=True)
        )


def test_a_longer_run_begins_with_the_rows_of_a_shorter_one():
    longer = mixture.Order((5, 6), (1.0, 2.0), 0, 1000)
    assert list(islice(longer, 40)) == list(mixture.Order((5, 6), (1.0, 2.0), 0, 40)) and len(longer) == 1000


def composed(sources):
    return config.compose(["task=sft", f"data.sources={sources}"]).data


def test_entries_have_a_kind_by_their_ending_and_a_share_of_their_own():
    found = mixture.sources(composed("[{path: a.csv, weight: 2}, {path: b, weight: 1, validation_fraction: 0}]"))
    told = [(key, part.kind, part.path, part.validation_fraction, weight) for key, part, weight in found]
    assert told == [("data.sources[0]", "csv", "a.csv", 0.05, 2.0), ("data.sources[1]", "datasets", "b", 0.0, 1.0)]


@pytest.mark.parametrize(
    ("sources", "said"),
    [
        ("[]", "names nothing to mix"),
        ("[a.jsonl]", "write {path: a.jsonl}"),
        ("[{weight: 1}]", "has no path"),
        ("[{path: a.jsonl, wieght: 1}]", "did you mean 'weight'"),
        ("[{path: a.jsonl, weight: 0}]", "above 0"),
        ("[{path: a.jsonl, weight: x}]", "above 0"),
        ("[{path: a.jsonl, kind: xml}]", "jsonl, parquet, csv, datasets"),
        ("[{path: a.jsonl, validation_fraction: 1}]", "below 1"),
        ("[{path: a.jsonl}, {path: a.jsonl}]", "twice"),
        ("[{path: a.jsonl}, {path: ./b/../a.jsonl}]", "names ./b/../a.jsonl twice"),
        ("[{path: a.jsonl, weight: 1}, {path: b.jsonl}]", "data.sources[1] has no weight"),
    ],
)
def test_an_entry_that_is_none_is_told(sources, said):
    with pytest.raises(ConfigError, match=r"data\.sources") as error:
        mixture.sources(composed(sources))
    assert said in str(error.value)
