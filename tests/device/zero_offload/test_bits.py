"""One device, the same bits: over host, nvme, any mix of them, overlapped or not, whatever is asked for ahead.

Fails if a copy is read before it arrived, or its memory used for something else before it was made: then a loss, a norm
or a master differs.
"""

from typing import Any

import pytest
import torch

from tests.device.zero_core.runs import differing
from tests.device.zero_offload import runs

GPU = (1024, 6, 64)  # 8.4 M elements a block, nine tiles; in a rehearsal three
LARGE_INPUTS = (64, 6, 512)  # in a rehearsal; smaller ones are not set aside


@pytest.fixture(scope="module")
def expected(device):
    """`expected(accumulate, sized)`: everything on the host, nothing overlapped."""
    made = {}

    def of(*case: Any) -> list[torch.Tensor]:
        if case not in made:
            accumulate, sized = case
            options = {"tiers": {"overlap": False}, "prefetch_bytes": 0}
            made[case] = runs.history(device, "host", sized, accumulate, **options)
        return made[case]

    return of


@pytest.mark.promise("device-memory-order")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("placement", runs.BELOW)
def test_over_tiers(device, expected, placement, accumulate):
    sized = runs.sized(device, GPU)
    found = runs.history(device, runs.BELOW[placement], sized, accumulate)
    assert not differing(found, expected(accumulate, sized))


def exact(parameters: Any) -> torch.optim.Optimizer:
    """Learning rate and momentum are powers of two: torch's kernels and the store's reference round alike."""
    return torch.optim.SGD(parameters, lr=2**-6, momentum=0.5)


@pytest.fixture(scope="module")
def exactly(device):
    """`exactly(placement, dtype)`: a history without clipping, as the norm's parts are added where their tiles are."""
    made: dict[Any, list[torch.Tensor]] = {}

    def of(placement: str | None, dtype: torch.dtype | None) -> list[torch.Tensor]:
        if (placement, dtype) not in made:
            options = {"max_grad_norm": None, "build": exact, "accumulate": 2, "param_dtype": dtype}
            placed = (runs.BELOW | runs.MIXED).get(placement)
            made[placement, dtype] = runs.history(device, placed, runs.sized(device, GPU), **options)
        return made[placement, dtype]

    return of


@pytest.mark.promise("device-bits", "device-placements", "device-updates")
@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(None, marks=pytest.mark.device_full)], ids=str)
@pytest.mark.parametrize("placement", [None, *list(runs.BELOW)[1:], *runs.MIXED])
def test_every_placement_has_the_bits_of_host_memory(exactly, placement, dtype):
    """Also those that update tiles on the device, and a run without a store."""
    assert not differing(exactly(placement, dtype), exactly("host", dtype))


@pytest.mark.promise("default-device")
@pytest.mark.parametrize("placement", [None, "host", "half"])
def test_with_the_device_as_torchs_default_the_bits_are_the_same(device, exactly, placement):
    options = {"max_grad_norm": None, "build": exact, "accumulate": 2}
    with torch.device(device):
        found = runs.history(device, (runs.BELOW | runs.MIXED).get(placement), runs.sized(device, GPU), **options)
    assert not differing(found, exactly(placement, torch.bfloat16))


@pytest.mark.parametrize(
    "options",
    [{"prefetch_bytes": 1 << 30}, {"resident_bytes": 1 << 30}, {"prefetch_bytes": 0, "resident_bytes": 20 << 20}],
    ids=str,
)
def test_whatever_is_asked_for_ahead_or_stays(device, expected, options):
    sized = runs.sized(device, GPU)
    for placement in ("host", "parameters on nvme"):
        found = runs.history(device, runs.BELOW[placement], sized, **options)
        assert not differing(found, expected(1, sized)), placement


@pytest.mark.parametrize("policy", ["recompute", "host", "nvme"])
def test_whatever_becomes_of_activations(device, expected, policy):
    """A block recomputed has the bits of one that was kept: the same kernels on the same values."""
    sized = runs.sized(device, GPU, LARGE_INPUTS)
    found = runs.history(device, "host", sized, activations=policy)
    assert not differing(found, expected(1, sized))


def test_updates_in_backward(device):
    plain = {"max_grad_norm": None}
    first = runs.history(device, "host", runs.sized(device, GPU), **plain)
    for placement in ("host", "nvme", runs.classic("host")):
        found = runs.history(device, placement, runs.sized(device, GPU), update_in_backward=True, **plain)
        masters = slice(2 * runs.STEPS, None)  # evaluations before the update differ: it has begun in backward
        assert not differing(found[masters], first[masters])
