"""One device, the same bits: over every residency, and whether the store lends or copies late.

Fails if anything is read before the stream that writes it, or after its memory went to something else: views that
autograd saved of storages that were freed in between would show in a loss.
"""

import pytest
import torch

from tests.device.zero_core import runs
from zero_core.precision import round_to, sum_of_squares, widen_scaled

RESIDENCIES = [
    {"stage": 0},
    {"stage": 3, "prefetch_bytes": 0},
    {"stage": 3, "prefetch_bytes": 1 << 30},
    {"stage": 3, "resident_bytes": 4000},
    {"stage": 3, "resident_bytes": 1 << 30},
]
BF16 = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


@pytest.mark.parametrize("options", [{}, BF16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("make", [runs.plain, runs.checkpointed, runs.reentrant])
def test_the_same_bits_whatever_stays_in_memory_and_however_late_it_comes(device, make, options):
    """Lent copies begin a millisecond or so after they were asked for: whoever does not wait computes with NaN."""
    first = runs.history(make, device, **options)
    for residency in RESIDENCIES:
        assert not runs.differing(runs.history(make, device, **residency, **options), first), residency
        store = runs.swapping(device, late_cycles=2_000_000)
        assert not runs.differing(runs.history(make, device, store=store, **residency, **options), first), residency
        assert store.counts["begun"] == store.counts["waited"] + store.counts["dropped"]


@pytest.mark.promise("device-passes")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_passes_over_a_gradient_and_a_master_have_the_bits_of_the_cpus(device, dtype):
    """Other code runs on a device, of fewer passes. Only the norm's last bits depend on the order of its sums."""
    gradient = torch.randn(70_001, generator=torch.Generator().manual_seed(0)).to(dtype)
    for scale in (0.3, 1.0, 1e-30):
        wide = widen_scaled(gradient.to(device), scale, torch.empty(len(gradient), device=device))
        assert torch.equal(wide.cpu(), gradient.float() * scale)
        rounded, expected = torch.empty_like(gradient, device=device), torch.empty_like(gradient)
        round_to(wide, rounded)
        round_to(wide.cpu(), expected)
        assert torch.equal(rounded.cpu(), expected)
    assert float(sum_of_squares(gradient.to(device))) == pytest.approx(float(sum_of_squares(gradient)), rel=1e-13)
    gradient[-1] = float("nan")
    assert sum_of_squares(gradient.to(device)).isnan()
