"""Connects a store to a discrete device: units that stay there, copies of other units to it and gradients from it.

Owns the wiring of these. On the CPU there is no link.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..arena import Block
from ..monitor import Monitor
from ..streams import Streams
from ..tiles.device_tier import DeviceTier
from ..tiles.footprint import StorePlan
from ..tiles.gradients import GradientStore
from ..tiles.parameters import ParameterStore
from ..transfers import InFlight
from .downloads import Downloads
from .uploads import Upload, Uploads

__all__ = ["Link"]


class Link:
    """One store's copies. After the update of a unit, the update thread may begin its copy."""

    def __init__(
        self,
        streams: Streams,
        device: DeviceTier,
        plan: StorePlan,
        parameters: ParameterStore,
        gradients: GradientStore,
        monitor: Monitor,
        staging: Sequence[Block],
        in_flight: InFlight,
    ) -> None:
        self.streams, self.device, self._plan = streams, device, plan
        self.up = Uploads(streams, parameters, device, plan, monitor, in_flight)
        self.down = Downloads(streams, gradients, plan, monitor, staging, in_flight)

    def gradient_buffer(self, i: int) -> Tensor | None:
        self.up.poll()
        return (self.device if self._plan.units[i].whole else self.down).lend(i)

    def accept(self, i: int, gradient: Tensor) -> None:
        """Accepts a gradient: a whole unit's stays on the device, any other is copied to the host."""
        (self.device if self._plan.units[i].whole else self.down).accept(i, gradient)

    def discard(self) -> None:
        """Forgets every gradient that is on the device."""
        self.down.forget()
        self.device.discard()

    def swap_in(self, i: int, out: Tensor) -> Upload:
        return self.up.begin(i, out)

    def parameters(self, i: int) -> Tensor:
        """Unit i's parameters in newly allocated device memory."""
        spec = self._plan.units[i].spec
        copy = self.streams.empty(spec.numel, spec.dtype)
        self.swap_in(i, copy).wait()
        return copy

    def let_go(self) -> None:
        """Frees the device's memory. Called while the lanes are empty."""
        self.down.let_go()
        self.device.let_go()

    def take_back(self) -> None:
        """The inverse of `let_go`; the values are undefined."""
        self.down.take_back()
        self.device.take_back()

    def close(self) -> None:
        """Ends the thread, then waits until the lanes are empty. The host memory may be freed after this."""
        self.down.close()
        try:
            self.streams.close()
        finally:
            self.down.drop()
            self.device.close()
