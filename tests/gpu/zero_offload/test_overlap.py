"""Copies run beside kernels in both directions, as torch's profiler saw them on the device."""

from __future__ import annotations

import pytest

from tests.gpu.zero_core import traces
from tests.gpu.zero_offload import runs


@pytest.mark.parametrize("activations", ["recompute", "host"])
@pytest.mark.parametrize("placement", ["host", "classic"])
def test_units_come_and_gradients_go_beside_kernels(device, only_cuda, record_property, placement, activations):
    with runs.apart(device):
        sized = runs.sized(device, (2048, 12, 16384))  # kernels of a block take longer than its parameters
        run = runs.Run(device, runs.BELOW[placement], sized, activations=activations)
        run.step()
        trace = traces.traced(device, lambda: [run.step(number) for number in (1, 2)])
        run.close()
    assert trace
    only_cuda("a trace of the device")
    for direction in ("memcpy htod", "memcpy dtoh"):
        copies, kernels = traces.split(trace, direction)
        assert copies and kernels
        fraction = traces.hidden(copies, kernels)
        record_property(f"{direction} hidden", round(fraction, 3))
        assert fraction >= 0.5, direction
