"""The training thread waits for the device once a step, for the norm. torch itself raises at any other wait."""

import pytest

from tests.device.zero_offload import runs

PLACEMENTS = {name: (runs.BELOW | runs.MIXED)[name] for name in ("host", "nvme", "classic", "half", "device")}
PLACEMENTS["shared"] = "host"  # and the device updates half of the tiles


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("activations", ["keep", "recompute", "host"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_nothing_but_the_norm_waits(device, needs_device, placement, activations, accumulate):
    tiers = {"update_share": 0.5 * (placement == "shared")}
    with runs.discrete(device):
        sized = runs.sized(device, (512, 6, 64))
        run = runs.Run(device, PLACEMENTS[placement], sized, activations=activations, tiers=tiers)
        try:
            for number in range(2):  # memory is found
                run.step(number, accumulate)
            with run.observer.refusing():
                for number in range(2):
                    run.step(number, accumulate)
        finally:
            run.close()
    assert run.observer.norms == 4
    needs_device("a synchronisation that raises")
