"""The tier of a discrete device, simulated: whole units have DeviceStore's bits, the others the host's.

Gradients depend on their own unit's parameters and nothing is clipped, so that one unit's tier does not reach another's
bits through the norm.
"""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from zero_core.optim.device_store import DeviceStore
from zero_offload import PlacementError, TorchStep, plan_store

from .harness import NUMELS, TILE, Driver, make, make_specs, same
from .simulated import simulated_device

pytestmark = pytest.mark.usefixtures("small_chunks")


def train(driver: Driver, accumulate: int = 1, steps: int = 3) -> dict[tuple[int, str], torch.Tensor]:
    """Logical values and parameters by unit after a few steps; closes the store."""
    for _ in range(steps):
        driver.step(accumulate)
    found = {}
    for i in driver.units:
        for name in driver.store.state_names():
            found[i, name] = driver.store.read_state(i, name, 0, driver.numels[i])
        found[i, "parameter"] = driver.store.parameters(i).float()
        driver.store.release(i)
    driver.store.close()
    return found


def unclipped(placement: Any, layout: str = "split", dtype: torch.dtype = torch.bfloat16, **arguments: Any) -> Driver:
    made = make(placement, driver={"max_norm": math.inf, "dtype": dtype}, step=TorchStep(layout), **arguments)
    assert made.store is not None
    return made


def device_store(dtype: torch.dtype = torch.bfloat16) -> Driver:
    return Driver(DeviceStore(), dtype=dtype, max_norm=math.inf)  # type: ignore[arg-type]


def of_all(**shares: float) -> dict[str, Any]:
    return {kind: dict(shares) for kind in ("parameters", "gradients", "optimizer")}


def whole_numels(driver: Driver) -> list[int]:
    return [unit.spec.numel * unit.whole for unit in driver.store.describe().units]


@pytest.mark.promise("device-updates")
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(
    "placement",
    [
        "device",
        of_all(device=0.5, host=0.5),
        of_all(device=0.3, host=0.3, nvme=0.4),
        of_all(device=0.4, host=0.6) | {"parameters": {"device": 0.8, "nvme": 0.2}},
    ],
    ids=str,
)
def test_whole_units_are_device_stores_and_the_rest_the_hosts(placement: Any, accumulate: int) -> None:
    host, device = train(unclipped("host"), accumulate), train(device_store(), accumulate)
    with simulated_device(seed=accumulate):
        driver = unclipped(placement, slots=3)
        whole = whole_numels(driver)
        assert 0 < sum(whole) <= sum(NUMELS)
        found = train(driver, accumulate)
    for (i, name), values in found.items():
        frozen = i in driver.frozen
        if name in host or not frozen or name == "parameter":
            assert torch.equal(values, (device if whole[i] else host)[i, name]), (i, name)


@pytest.mark.promise("device-parameters-stay")
@pytest.mark.parametrize("layout", ["split", "fp32"])
@pytest.mark.parametrize("below", ["host", "nvme"])
@pytest.mark.parametrize("share", [1.0, 0.6])
def test_parameters_may_live_on_the_device_while_the_host_updates_them(layout: str, below: str, share: float) -> None:
    expected = train(unclipped("host", layout), 2)
    parameters = {"device": share, "host": 0.1, "nvme": 0.3} if share < 1 else "device"
    with simulated_device():
        driver = unclipped({"parameters": parameters, "gradients": below, "optimizer": below}, layout, slots=3)
        assert sum(whole_numels(driver)) == 0
        found = train(driver, 2)
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize("layout", ["split", "fp32"])
def test_a_segment_that_is_skipped_keeps_its_values(layout: str) -> None:
    """The tile's mirror holds another tile's values where the update does not write."""

    def run(placement: Any) -> list[torch.Tensor]:
        driver = make(placement, step=TorchStep(layout))
        driver.step()
        driver.forward_backward()
        driver.store.update(driver.groups(), 1.0, driver.units, [[0, 2], [2, 0], [0, 0], [0, 2]])
        values = driver.everything()
        driver.store.close()
        return values

    expected = run("host")
    with simulated_device():
        assert same(run({"parameters": "device", "gradients": "host", "optimizer": "host"}), expected)


@pytest.mark.promise("device-fractions-refused")
@pytest.mark.parametrize(
    ("placement", "message"),
    [
        (
            {"parameters": "device", "gradients": "host", "optimizer": {"device": 0.5, "host": 0.5}},
            r'same share of "device" \(0.5\)',
        ),
        (
            {"parameters": "host", "gradients": "device", "optimizer": "device"},
            r'parameters at least 1 of "device"',
        ),
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
    specs = [replace(spec, trained=i > 1) for i, spec in enumerate(make_specs(torch.bfloat16, frozen=(0, 1)))]
    shares = of_all(device=0.5, host=0.5)
    plan = plan_store(specs, step, **shares, tile_numel=TILE, landing_dtype=torch.bfloat16)
    assert [unit.whole for unit in plan.units] == [False, False, True, False]
    assert [unit.parameter_tiers[0] for unit in plan.units] == ["device", "host", "device", "host"]


def test_a_write_does_not_change_what_is_still_to_be_copied() -> None:
    with simulated_device():
        driver = make("device")
        out = torch.empty(NUMELS[0], dtype=torch.bfloat16)
        arrival = driver.store.swap_in(0, out)
        assert arrival.copied is not None
        driver.store.write_state(0, "master", 0, torch.zeros(NUMELS[0]))
        arrival.wait()
        assert torch.equal(out, driver.initial[0].bfloat16())
        driver.store.close()
