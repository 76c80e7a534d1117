"""The tier of a discrete device, simulated: whole units have DeviceStore's bits, the others the host's.

Gradients depend on their own unit's parameters and nothing is clipped, so that one unit's tier does not reach another's
bits through the norm.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from zero_core.optim.device_store import DeviceStore
from zero_offload import PlacementError, TorchStep, plan_store

from .harness import NUMELS, TILE, Driver, make, make_specs, same
from .simulated import simulated_device

pytestmark = pytest.mark.usefixtures("small_chunks")


@dataclass
class Unclipped(Driver):
    max_norm: float = math.inf


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


def test_the_next_tile_comes_down_while_one_is_updated() -> None:
    placement = {"parameters": "device", "gradients": "host", "optimizer": "host"}
    with simulated_device() as streams:
        driver = make(placement, driver={"numels": (4 * TILE,), "frozen": ()})
        driver.forward()
        driver.backward()
        driver.store.gradient_norm_squared()
        order: list[str] = []
        copy, update = streams[0].copy, driver.store.step.update

        def noted_copy(lane: Any, *arguments: Any) -> Any:
            order.append({"swap_in": "up", "swap_out": "down"}[lane])
            return copy(lane, *arguments)

        def noted_update(*arguments: Any) -> None:
            order.append("update")
            update(*arguments)

        streams[0].copy, driver.store.step.update = noted_copy, noted_update  # type: ignore[method-assign]
        driver.update()
        driver.store.wait()
        assert order.count("down") == order.count("update") == order.count("up") == 4
        assert order[:3] == ["down", "down", "update"]
        driver.store.close()


def test_a_parameter_comes_down_after_it_went_home() -> None:
    """The tile updated last is read first: its way home may still be ahead of it."""
    placement = {"parameters": "device", "gradients": "host", "optimizer": "host"}
    found = []
    for where in ("host", placement):
        with simulated_device():
            driver = unclipped(where)
            driver.step()
            driver.store.wait()
            found.append(driver.store.read_state(3, "master", 0, NUMELS[3]))
            driver.store.close()
    assert torch.equal(*found)


def test_fp32_parameters_on_the_device_are_their_own_masters() -> None:
    expected = train(unclipped("host", dtype=torch.float32))
    with simulated_device():
        placement = {"parameters": "device", "gradients": "host", "optimizer": "nvme"}
        found = train(unclipped(placement, dtype=torch.float32, slots=3))
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("layout", "tiles"), [("fp32", 2), ("split", 5)])
def test_a_parameter_comes_down_only_where_its_old_value_matters(layout: str, tiles: int) -> None:
    """With a master of its own: where the update leaves elements alone, here the padding of each unit's last tile."""
    placement = {"parameters": "device", "gradients": "host", "optimizer": "host"}
    numels = (2 * TILE, 3 * TILE)
    with simulated_device():
        driver = make(placement, step=TorchStep(layout), driver={"numels": numels, "frozen": ()})
        setup = driver.store.stats()["link_down_bytes"]
        driver.step()
        driver.store.wait()
        assert driver.store.stats()["link_down_bytes"] - setup == 2 * sum(numels) + 2 * TILE * tiles
        driver.store.close()


@pytest.mark.parametrize("layout", ["split", "fp32"])
def test_a_segment_that_is_skipped_keeps_its_values(layout: str) -> None:
    """The tile's mirror holds another tile's values where the update does not write."""

    def run(placement: Any) -> list[torch.Tensor]:
        driver = make(placement, step=TorchStep(layout))
        driver.step()
        driver.forward()
        driver.backward()
        driver.store.update(driver.groups(), 1.0, driver.units, [[0, 2], [2, 0], [0, 0], [0, 2]])
        values = driver.everything()
        driver.store.close()
        return values

    expected = run("host")
    with simulated_device():
        assert same(run({"parameters": "device", "gradients": "host", "optimizer": "host"}), expected)


@pytest.mark.parametrize("i", [0, 1])
def test_values_are_read_and_written_on_either_side(i: int) -> None:
    with simulated_device():
        driver = make(of_all(device=0.5, host=0.5))
        assert [numel > 0 for numel in whole_numels(driver)] == [True, False, False, False]
        boundary = TILE - 100
        for name in reversed(driver.store.state_names()):
            values = torch.arange(1000.0).remainder(97)  # exact in bf16
            driver.store.write_state(i, name, boundary - 300, values)
            assert torch.equal(driver.store.read_state(i, name, boundary - 300, boundary + 700), values)
            assert torch.equal(driver.store.read_state(i, name, boundary + 1, boundary + 2), values[301:302])
            assert torch.equal(driver.store.read_state(i, name, boundary - 2, boundary - 1), values[298:299])
        assert torch.equal(driver.store.parameters(i)[boundary - 300 : boundary + 700].float(), values)
        driver.store.release(i)
        driver.store.close()


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


def test_a_gradient_is_dropped_on_both_sides_and_the_norm_is_of_both() -> None:
    def run(placement: Any) -> tuple[float, float]:
        driver = make(placement)
        driver.forward()
        driver.backward()
        before = float(driver.store.gradient_norm_squared())
        for i in (0, 1):
            driver.store.discard_gradient(i, TILE - 100, TILE + 100)
        after = float(driver.store.gradient_norm_squared())
        driver.store.discard_gradients()
        assert float(driver.store.gradient_norm_squared()) == 0.0
        driver.store.close()
        return before, after

    expected = run("host")
    with simulated_device():
        found = run(of_all(device=0.5, host=0.5))
    assert found == pytest.approx(expected, rel=1e-9)
    assert expected[1] < expected[0]


def test_what_is_held_is_what_was_planned() -> None:
    classic = {"parameters": "device", "gradients": "host", "optimizer": "host"}
    with simulated_device():
        for placement in ("device", of_all(device=0.5, host=0.5), classic):
            driver = make(placement)
            plan, stats = driver.store.describe(), driver.store.stats()
            assert stats["host_bytes"] == plan.arena_bytes
            kinds = ("parameters", "gradients", "optimizer", "buffers")
            there = (unit.spec.numel for unit in plan.units if unit.whole or unit.home)
            assert plan.bytes_of("device", "parameters") == 2 * sum(there)
            whole = sum(whole_numels(driver))
            assert plan.bytes_of("device", "optimizer") == 12 * whole  # master and two moments
            held = sum(plan.bytes_of("host", kind) for kind in kinds)
            assert held <= plan.arena_bytes < held + (1 << 20)
            driver.store.close()


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


def test_a_frozen_unit_on_the_device_has_no_master() -> None:
    step = TorchStep()
    step.bind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    plan = plan_store(
        make_specs(torch.bfloat16, frozen=(0, 1)),
        step,
        parameters="device",
        gradients="device",
        optimizer="device",
        tile_numel=TILE,
        landing_dtype=torch.bfloat16,
    )
    assert [unit.whole for unit in plan.units] == [False, False, True, True]
    assert plan.bytes_of("device", "optimizer") == 12 * (NUMELS[2] + NUMELS[3])


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


def test_a_unit_with_states_on_the_device_has_its_parameters_there() -> None:
    """Half of all elements ends in the frozen units, before half of the trained ones begins."""
    step = TorchStep()
    step.bind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    specs = [replace(spec, trained=i > 1) for i, spec in enumerate(make_specs(torch.bfloat16, frozen=(0, 1)))]
    shares = of_all(device=0.5, host=0.5)
    plan = plan_store(specs, step, **shares, tile_numel=TILE, landing_dtype=torch.bfloat16)
    assert [unit.whole for unit in plan.units] == [False, False, True, False]
    assert [unit.parameter_tiers[0] for unit in plan.units] == ["device", "host", "device", "host"]
