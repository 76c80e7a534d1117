"""A discrete device: what stays there, and copies of the rest: units to it, gradients from it.

Owns the wiring of these and what `parameters` lends. On the CPU there is no link.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..arena import Block
from ..monitor import Monitor
from ..streams import Streams
from ..tier import Tier
from ..tiles.device_tier import DeviceTier
from ..tiles.footprint import StorePlan
from ..tiles.gradients import GradientStore
from ..tiles.parameters import ParameterStore
from ..transfers import InFlight
from .downloads import Downloads
from .uploads import Upload, Uploads

__all__ = ["Link"]


class Link:
    """One store's copies. The update thread begins those of the units that it is done with."""

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
        self.streams, self.device, self._plan, self._in_flight = streams, device, plan, in_flight
        self.up = Uploads(streams, parameters, device, plan, monitor, in_flight)
        self.down = Downloads(streams, gradients, plan, monitor, staging, in_flight)
        self._copies: dict[int, Tensor] = {}

    @property
    def device_bytes(self) -> int:
        """What passes through the device now, beside what was placed there."""
        return self._plan.bytes_of(Tier.DEVICE, "buffers") + sum(copy.nbytes for copy in self._copies.values())

    @property
    def up_bytes(self) -> int:
        return self._in_flight.moved("swap_in")

    @property
    def down_bytes(self) -> int:
        return self._in_flight.moved("swap_out")

    def gradient_buffer(self, i: int) -> Tensor | None:
        self.up.poll()
        return (self.device if self._plan.units[i].whole else self.down).lend(i)

    def accept(self, i: int, gradient: Tensor) -> None:
        """A whole unit's stays, another's is copied to the host."""
        (self.device if self._plan.units[i].whole else self.down).accept(i, gradient)

    def discard(self) -> None:
        """Forget every gradient that is on the device."""
        self.down.forget()
        self.device.discard()

    def swap_in(self, i: int, out: Tensor) -> Upload:
        return self.up.begin(i, out)

    def parameters(self, i: int) -> Tensor:
        """Unit i in memory of its own until release(i)."""
        if i not in self._copies:
            spec = self._plan.units[i].spec
            copy = self.streams.empty(spec.numel, spec.dtype)
            self.swap_in(i, copy).wait()
            self._copies[i] = copy
        return self._copies[i]

    def release(self, i: int) -> None:
        self._copies.pop(i, None)

    def let_go(self) -> None:
        """Free the device's memory; the lanes are empty."""
        self.down.let_go()
        self.device.let_go()

    def take_back(self) -> None:
        """The inverse, with any values."""
        self.down.take_back()
        self.device.take_back()

    def close(self) -> None:
        """End the thread, then wait for what the lanes hold. The host memory may go after this."""
        self.down.close()
        try:
            self.streams.close()
        finally:
            self._copies.clear()
            self.down.drop()
            self.device.close()
