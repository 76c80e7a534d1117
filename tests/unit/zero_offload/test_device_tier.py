"""The tier of a discrete device, simulated: parameters stay there while the host updates them; shares count units."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from zero_offload import PlacementError, TorchStep, plan_store

from .harness import TILE, make, make_specs, same
from .simulated import simulated_device

pytestmark = pytest.mark.usefixtures("small_chunks")


def of_all(**shares: float) -> dict[str, Any]:
    return {kind: dict(shares) for kind in ("parameters", "gradients", "optimizer")}


def run(placement: Any, layout: str, *, skips: bool = False, **arguments: Any) -> list[torch.Tensor]:
    """Every value after steps that the host made. skips: the last of them leaves segments out."""
    driver = make(placement, step=TorchStep(layout), **arguments)
    assert not any(unit.whole for unit in driver.store.describe().units)
    for _ in range(2):
        driver.step(2)
    if skips:
        driver.forward_backward()
        driver.store.update(driver.groups(), 1.0, driver.units, [[0, 2], [2, 0], [0, 0], [0, 2]])
    values = driver.everything()
    driver.store.close()
    return [*values, torch.tensor(driver.losses), torch.tensor(driver.norms)]


@pytest.mark.promise("device-parameters-stay")
@pytest.mark.parametrize("layout", ["split", "fp32"])
@pytest.mark.parametrize("below", ["host", "nvme"])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_parameters_may_live_on_the_device_while_the_host_updates_them(layout: str, below: str, share: float) -> None:
    parameters = {"device": share, "host": 0.1, "nvme": 0.3} if share < 1 else "device"
    expected = run("host", layout)
    with simulated_device():
        found = run({"parameters": parameters, "gradients": below, "optimizer": below}, layout, slots=3)
    assert same(found, expected)


@pytest.mark.parametrize("layout", ["split", "fp32"])
def test_a_segment_that_is_skipped_keeps_its_values(layout: str) -> None:
    """The tile's mirror holds another tile's values where the update does not write."""
    expected = run("host", layout, skips=True)
    with simulated_device():
        found = run({"parameters": "device", "gradients": "host", "optimizer": "host"}, layout, skips=True)
    assert same(found, expected)


@pytest.mark.promise("device-fractions-refused")
@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            {"parameters": "device", "gradients": "host", "optimizer": {"device": 0.5, "host": 0.5}},
            r"set gradients={'device': 0.5, 'host': 0.5}",
        ),
        ({"parameters": "host", "gradients": "device", "optimizer": "device"}, "set parameters='device'"),
    ],
)
def test_shares_that_cannot_be_updated_anywhere_are_refused(placement: Any, message: str) -> None:
    with simulated_device(), pytest.raises(PlacementError, match=message):
        make(placement)
    make(placement).store.close()  # on the CPU the device tier is host memory, and any share will do


@pytest.mark.promise("device-fractions")
def test_a_share_of_a_discrete_device_counts_whole_units() -> None:
    """A unit is there if its middle is within the share, and the tiles of the others begin on the tier behind it."""
    step = TorchStep()
    step.bind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))

    def tiers(device: float, **others: float) -> list[str]:
        shares = of_all(device=device, **others)
        specs = make_specs(torch.bfloat16, (2 * TILE, 2 * TILE))
        plan = plan_store(specs, step, **shares, tile_numel=TILE, landing_dtype=torch.bfloat16)
        found = plan_store(specs, step, **shares, tile_numel=TILE)
        assert [tier for unit in found.units for tier in unit.state_tiers].count("device") == round(4 * device)
        return [str(tier) for unit in plan.units for tier in unit.state_tiers]

    assert tiers(0.25, host=0.75) == ["host"] * 4
    assert tiers(0.5, host=0.5) == tiers(0.3, host=0.7) == ["device"] * 2 + ["host"] * 2
    assert tiers(0.75, nvme=0.25) == ["device"] * 2 + ["nvme"] * 2
    assert tiers(0.3, host=0.4, nvme=0.3) == ["device"] * 2 + ["host", "nvme"]
    assert tiers(0.2, host=0.1, nvme=0.7) == ["host"] + ["nvme"] * 3


@pytest.mark.promise("device-fractions")
def test_a_unit_with_states_on_the_device_has_its_parameters_there() -> None:
    """Half of all elements ends in the frozen units, before half of the trained ones begins."""
    step = TorchStep()
    step.bind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    made = make_specs(torch.bfloat16, (5 * TILE, *[2 * TILE] * 3), frozen=(0, 1))
    specs = [replace(spec, trained=i > 1) for i, spec in enumerate(made)]
    shares = of_all(device=0.5, host=0.5)
    plan = plan_store(specs, step, **shares, tile_numel=TILE, landing_dtype=torch.bfloat16)
    assert [unit.whole for unit in plan.units] == [False, False, True, False]
    assert [unit.parameter_tiers[0] for unit in plan.units] == ["device", "host", "device", "host"]
