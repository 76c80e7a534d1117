"""TieredStore on several ranks, each with a device of its own: the same bits over every placement, whatever is asked.

Fails if a collective begins before a copy into its memory has ended, or if a gradient leaves the device before it is
reduced.
"""

from typing import Any

import pytest
import torch

from tests.device.zero_core.runs import device_of_rank, differing
from tests.device.zero_offload import runs

PLACEMENTS = ["nvme", "halves", "parameters on nvme", "classic", "classic nvme", "parameters in part", *runs.MIXED]
OPTIONS: dict[str, dict[str, Any]] = {
    "stage 3": {},
    "stage 2": {"stage": 2},
    "stage 1": {"stage": 1},
    "nothing ahead": {"prefetch_bytes": 0},
    "all ahead": {"prefetch_bytes": 1 << 30},
    "all resident": {"resident_bytes": 1 << 30},
    "fp32": {"param_dtype": None},
    "reduced in fp32": {"reduce_dtype": torch.float32},
    "activations on host": {"activations": "host"},
    "two micro-batches": {"accumulate": 2},
    "updates in backward": {"update_in_backward": True, "max_grad_norm": None},
}


def bits(kind: str, placement: str, options: dict[str, Any]) -> list[int]:
    """Where this rank's run has other bits than with all on the host and nothing overlapped. Where the device updates
    some tiles, than without overlap."""
    device = device_of_rank(kind)
    sized = runs.sized(device, (512, 8, 64), (64, 6, 512) if "activations" in options else (64, 6, 64))
    plain = placement if placement in runs.MIXED else "host"
    with runs.small_tiles(device):
        first, found = (
            runs.history(device, (runs.BELOW | runs.MIXED)[place], sized, tiers=tiers, **options)
            for place, tiers in ((plain, {"overlap": False}), (placement, {}))
        )
    return differing(found, first)


@pytest.mark.promise("device-bits", "device-ranks")
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("option", OPTIONS)
def test_the_bits_of_host_memory(device, device_ranks, needs_device, option, placement):
    needs_device("a device for each rank")
    assert device_ranks.run(bits, device.type, placement, OPTIONS[option]) == [[]] * device_ranks.size
