"""Placement: fractions become a list, and what cannot be is refused by name."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zero_offload.errors import PlacementError
from zero_offload.layout.tile import place, shares
from zero_offload.tier import TIERS


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("disk", "'disk' is not a tier.*nvme"),
        ({"host": 0.5}, "; make the sum 1"),
        ({"host": -0.5, "nvme": 1.5}, 'fraction of "host" is -0.5'),
        ({"host": float("nan"), "nvme": 1}, "nan"),
        ({"host": True}, "True"),
        ({}, "is no tier"),
        (3, "is no tier"),
    ],
)
def test_nonsense_is_refused(value: object, text: str) -> None:
    with pytest.raises(PlacementError, match=text) as caught:
        shares(value, "optimizer")  # type: ignore[arg-type]
    assert str(caught.value).startswith("optimizer")


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=40),
    st.tuples(*[st.floats(0, 1)] * 3).filter(lambda weights: sum(weights) > 0.1),
)
@example([1], (0.4, 0.0, 0.6))
def test_tiers_never_get_faster_and_shares_are_met(sizes: list[int], weights: tuple[float, ...]) -> None:
    fractions = {tier.value: weight / sum(weights) for tier, weight in zip(TIERS, weights, strict=True)}
    tiers = place(fractions, sizes, "x")
    order = list(TIERS)
    positions = [order.index(tier) for tier in tiers]
    assert positions == sorted(positions)
    for k in range(len(TIERS)):
        placed = sum(size for size, position in zip(sizes, positions, strict=True) if position <= k)
        share = sum(fractions[tier.value] for tier in TIERS[: k + 1])
        assert abs(placed - share * sum(sizes)) <= max(sizes) / 2 + 1e-3
