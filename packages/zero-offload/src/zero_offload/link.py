"""The way between host memory and a compute device apart from it: units up, gradients down, both beside the compute.

Owns the wiring of the two and what `parameters` lends. On the CPU there is no link.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from .arena import Block
from .downloads import Downloads
from .footprint import StorePlan
from .gradients import GradientStore
from .monitor import Monitor
from .parameters import ParameterStore
from .pipeline import Pipeline
from .streams import Streams
from .uploads import Arrival, Uploads

__all__ = ["Link"]


class Link:
    """One store's copies. The update thread begins those of the units that it is done with."""

    def __init__(
        self,
        streams: Streams,
        plan: StorePlan,
        parameters: ParameterStore,
        gradients: GradientStore,
        pipeline: Pipeline,
        monitor: Monitor,
        staging: Sequence[Block],
    ) -> None:
        self._streams = streams
        self._units = [unit.spec for unit in plan.units]
        self.up = Uploads(streams, parameters, monitor, pipeline.behind, [spec.name for spec in self._units])
        self.down = Downloads(streams, gradients, plan, monitor, staging)
        self._copies: dict[int, Tensor] = {}
        pipeline.unit_done = self.up.poll

    @property
    def device_bytes(self) -> int:
        """What it holds on the device now."""
        return self.down.device_bytes + sum(copy.nbytes for copy in self._copies.values())

    def swap_in(self, i: int, out: Tensor) -> Arrival:
        return self.up.begin(i, out)

    def parameters(self, i: int) -> Tensor:
        """Unit i in memory of its own until release(i)."""
        if i not in self._copies:
            copy = self._streams.empty(self._units[i].numel, self._units[i].dtype)
            self.swap_in(i, copy).wait()
            self._copies[i] = copy
        return self._copies[i]

    def release(self, i: int) -> None:
        self._copies.pop(i, None)

    def close(self) -> None:
        """End the thread, then wait for what the lanes hold. The host memory may go after this."""
        self.down.close()
        self._streams.close()
        self._copies.clear()
