"""Copies run beside kernels in both directions, as torch's profiler saw them on the device."""

import pytest

from tests.device.zero_core import traces
from tests.device.zero_offload import runs


@pytest.mark.parametrize("activations", ["recompute", "host"])
@pytest.mark.parametrize("placement", ["host", "classic"])
def test_units_come_and_gradients_go_beside_kernels(device, needs_hardware, record_property, placement, activations):
    """The update's time is taken out: the reference step on the CPU takes far longer than a forward on a GPU.

    What lives on the device comes up while it is updated, beside nothing here.
    """
    with runs.discrete(device):
        sized = runs.sized(device, (2048, 12, 16384))  # kernels of a block take longer than its parameters
        run = runs.Run(device, runs.BELOW[placement], sized, activations=activations)
        run.step()
        run.store.wait()

        def two_steps() -> None:
            for number in (1, 2):
                run.step(number)
                run.store.wait()

        trace = traces.traced(device, two_steps)
        run.close()
    assert trace
    needs_hardware("a trace of the device")
    for direction in ("memcpy dtoh",) if placement == "classic" else ("memcpy htod", "memcpy dtoh"):
        copies, kernels = traces.split(trace, direction)
        assert copies and kernels
        fraction = traces.hidden(copies, kernels)
        record_property(f"{direction} hidden", round(fraction, 3))
        assert fraction >= 0.5, direction
