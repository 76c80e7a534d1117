"""Memory of a device that is nobody's state, by hand. Fails if a unit or a gradient on its way is forgotten."""

import re

import pytest

from zero_offload import Hardware, ModelSizes, plan
from zero_offload.planning.budgets import PlanError
from zero_offload.planning.model_sizes import ParameterSizes, UnitSizes

MI = 1 << 20
HOST = dict.fromkeys(("parameters", "gradients", "optimizer"), "host")


def block(i, numel=4 * MI, largest=3 * MI):
    return UnitSizes(f"layers.{i}", (ParameterSizes("a", largest), ParameterSizes("b", numel - largest)))


@pytest.mark.promise("device-room")
@pytest.mark.parametrize("reserved", [None, 1.5, {"context": 0.5, "fragments": 1.0}])
def test_a_device_that_its_reserve_fills_is_refused_with_the_size_that_would_do(reserved):
    """Also where more memory reserves more."""
    sizes = ModelSizes(tuple(block(i) for i in range(4)))

    def planned(gib):
        return plan(sizes, Hardware(device="cuda", device_gib=gib, device_reserved_gib=reserved, host_gib=8), **HOST)

    with pytest.raises(PlanError, match=r"device_gib=1 leaves nothing beside hardware.device_reserved_gib=") as refused:
        planned(1)
    least = float(re.search(r"([\d.]+) would do", str(refused.value))[1])
    assert planned(least).total("device") <= planned(least).budgets.of("device")
    with pytest.raises(PlanError):
        planned(least - 0.02)
