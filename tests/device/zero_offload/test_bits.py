"""One device, the same bits: over host, nvme, any mix of them, overlapped or not, whatever is asked for ahead.

Fails if a copy is read before it arrived, or its memory used for something else before it was made: then a loss, a norm
or a master differs.
"""

from __future__ import annotations

import pytest
import torch

from tests.device.zero_core.runs import differing
from tests.device.zero_offload import runs

GPU = (1024, 6, 64)  # 8.4 M elements a block, nine tiles; in a rehearsal three


@pytest.fixture(scope="module")
def expected(device):
    made = {}

    def of(accumulate: int) -> list[torch.Tensor]:
        if accumulate not in made:
            store = runs.tiered("host", overlap=False)
            made[accumulate] = runs.history(device, store, runs.sized(device, GPU), accumulate, prefetch_bytes=0)
        return made[accumulate]

    return of


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("placement", runs.BELOW)
def test_over_tiers(device, expected, placement, accumulate):
    found = runs.history(device, runs.BELOW[placement], runs.sized(device, GPU), accumulate)
    assert not differing(found, expected(accumulate))


@pytest.mark.parametrize(
    "options",
    [{"prefetch_bytes": 1 << 30}, {"resident_bytes": 1 << 30}, {"prefetch_bytes": 0, "resident_bytes": 20 << 20}],
    ids=str,
)
def test_whatever_is_asked_for_ahead_or_stays(device, expected, options):
    for placement in ("host", "parameters on nvme"):
        found = runs.history(device, runs.BELOW[placement], runs.sized(device, GPU), **options)
        assert not differing(found, expected(1)), placement


@pytest.mark.parametrize("policy", ["recompute", "host", "nvme"])
def test_whatever_becomes_of_activations(device, expected, policy):
    """A block recomputed has the bits of one that was kept: the same kernels on the same values."""
    found = runs.history(device, "host", runs.sized(device, GPU), activations=policy)
    assert not differing(found, expected(1))


@pytest.mark.parametrize("placement", runs.MIXED)
def test_mixed_with_the_device_twice(device, placement):
    first, second = (runs.history(device, runs.MIXED[placement], runs.sized(device, GPU), 2) for _ in range(2))
    assert not differing(first, second)


def test_updates_in_backward(device):
    plain = {"max_grad_norm": None}
    first = runs.history(device, "host", runs.sized(device, GPU), **plain)
    for placement in ("host", "nvme"):
        found = runs.history(device, placement, runs.sized(device, GPU), update_in_backward=True, **plain)
        masters = len(found) // 2  # the evaluations before the update differ: it has begun in backward
        assert not differing(found[-masters:], first[-masters:])
