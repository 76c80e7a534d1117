"""Lends units and takes gradients where the compute device is the CPU: in host memory, without a copy.

Not here: a discrete device (in device_path.py), and waits for updates and errors of the background (in
tiered_store.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from ..core import Arrival, DeviceStore, GroupStep
from ..streams import Mark, Streams
from ..tiles.device_tier import Homes
from ..tiles.gradients import GradientStore
from ..tiles.parameters import ParameterStore
from ..tiles.store_context import Shared


class HostPath:
    """The way of one attached store's values to the CPU, and back. `lent`: by unit, what release() has not ended."""

    streams: Streams | None = None

    def __init__(self, shared: Shared, homes: Homes | None = None) -> None:
        self._units, self._monitor = shared.plan.units, shared.monitor
        self.host, self.gradients = ParameterStore(shared, homes), GradientStore(shared)
        self.lent: dict[int, Tensor] = {}

    def lay_out(self, take: Callable[[int], Tensor], optimizer: torch.optim.Optimizer) -> None:
        """Calls `take(i)` for every unit, in order. It lays out a unit in host memory, and returns the master."""
        for i in range(len(self._units)):
            take(i)

    # -- parameters ---------------------------------------------------------------------------------------------

    def prefetch(self, i: int) -> None:
        self.host.prefetch(i)

    def parameters(self, i: int) -> Tensor:
        self.lent[i] = lent = self._lend(i)
        return lent

    def _lend(self, i: int) -> Tensor:
        return self.host.acquire(i)

    def release(self, i: int) -> None:
        self.host.release(i)
        self.lent.pop(i, None)

    def swap_in(self, i: int, out: Tensor) -> Arrival:
        raise AssertionError("swap_in without swaps_in")

    def poll(self) -> None:
        """Begins copies that wait for an update or a read. Any thread."""

    def in_use(self) -> Collection[int]:
        """Units that are lent, or on their way."""
        return self.lent.keys()

    @property
    def device_bytes(self) -> int:
        """Bytes of a discrete device for buffers and lent parameters, beside those of the placement."""
        return 0

    def whole(self, i: int) -> DeviceStore | None:
        """The store of unit i's values if all of them are on a discrete device, else None."""
        return None

    def follow_copies(self, i: int) -> None:
        """Orders changes of unit i after copies of its parameters."""

    # -- gradients ----------------------------------------------------------------------------------------------

    def gradient_buffer(self, i: int) -> Tensor | None:
        self._monitor.wait_for_unit(i, self._units[i].spec.name)
        return self.gradients.lend(i)

    def accept(self, i: int, gradient: Tensor) -> None:
        with self._monitor.span("norm", self._units[i].spec.name):
            self.gradients.accept(i, gradient)

    def landed(self) -> None:
        """Waits until every accepted gradient is on the host."""

    def discard(self) -> None:
        """Forgets every gradient that is on a discrete device."""

    def norm_squared(self) -> Tensor:
        """() float64 on the compute device."""
        return torch.tensor(self.gradients.norm_squared(), dtype=torch.float64)

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        """Queues the updates of units that are whole on a discrete device. As ShardStore.update."""

    def options_there(self, groups: Sequence[GroupStep]) -> Mark | None:
        """The mark after which option tensors on a discrete device have their values; None: there are none."""
        return None

    # -- memory, the end ----------------------------------------------------------------------------------------

    def values(self) -> list[Tensor]:
        """Every tensor of a discrete device whose values are nowhere else, in a fixed order."""
        return []

    def let_go(self, arena: Tensor | None) -> None:
        """Frees a discrete device's memory. Every lane is empty. arena: its bytes, if it has memory."""

    def take_back(self, arena: Tensor) -> None:
        """The inverse of `let_go`; the values are undefined."""

    def restored(self) -> None:
        """Called when the tensors of `values` are filled again."""

    def drain(self) -> None:
        """Returns when every lane is empty."""

    def end_thread(self) -> None:
        """Ends the thread that adds gradients, which may wait for slots of the update thread's."""

    def close(self) -> None:
        """Waits until the lanes are empty. The host memory may be freed after this."""
        self.lent.clear()
