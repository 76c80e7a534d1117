"""The change test: a tier that no package has heard of. It takes one class, one subclass of the suite and one argument.

tests/integration/zero_train/test_tiers_agree.py names the same class in a YAML file and trains with it.
"""

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import zero_core
from tests import kit
from zero_offload import ByteStore, Ticket, TieredStore
from zero_offload.testing import ByteStoreSuite


class Drawer:
    """Every byte is kept inverted in one list of bytearrays, and every request is served at once."""

    alignment = 512

    def __init__(self, drawers: int = 1 << 20) -> None:
        self.drawers, self.used = drawers, 0
        self._kept: dict[int, bytearray] = {}
        self._lock = threading.Lock()
        self._next = 0

    def reserve(self, total_bytes: int) -> None:
        if total_bytes > self.drawers * self.alignment:
            raise OSError(f"{total_bytes} bytes wanted, and there are {self.drawers} drawers of {self.alignment}")

    def allocate(self, nbytes: int) -> Any:
        with self._lock:
            extent = SimpleNamespace(offset_bytes=self._next, nbytes=-(-nbytes // self.alignment) * self.alignment)
            self._next += extent.nbytes
            self._kept[extent.offset_bytes] = bytearray(b"\xff" * extent.nbytes)
        return extent

    def free(self, extent: Any) -> None:
        del self._kept[extent.offset_bytes]

    def read(self, extent: Any, buffer: Any, offset: int = 0) -> Ticket:
        kept, target = self._both(extent, buffer, offset)
        target.copy_(kept.bitwise_not())
        return Served()

    def write(self, extent: Any, buffer: Any, offset: int = 0) -> Ticket:
        kept, source = self._both(extent, buffer, offset)
        kept.copy_(source.bitwise_not())
        self.used += source.numel()
        return Served()

    def _both(self, extent: Any, buffer: Any, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
        if not isinstance(buffer, torch.Tensor):
            buffer = torch.frombuffer(buffer, dtype=torch.uint8)
        data = buffer.view(torch.uint8).flatten()
        if offset + data.numel() > extent.nbytes:
            raise ValueError(f"{data.numel()} bytes at {offset} of an extent of {extent.nbytes}")
        kept = torch.frombuffer(self._kept[extent.offset_bytes], dtype=torch.uint8)
        return kept[offset : offset + data.numel()], data

    def close(self) -> None:
        self._kept.clear()


class Served:
    def done(self) -> bool:
        return True

    def wait(self, timeout: float | None = None) -> None:
        return None


class TestDrawer(ByteStoreSuite):
    def make_store(self) -> ByteStore:
        return Drawer()


def trained(placement: Any, **arguments: Any) -> tuple[list[float], list[torch.Tensor]]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.GELU()) for _ in range(3)))
    kinds = dict.fromkeys(("parameters", "gradients", "optimizer"), placement)
    store = TieredStore(**kinds, **arguments)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    optimizer = zero_core.shard(model, plain, units=[torch.nn.Sequential], max_grad_norm=0.1, store=store)
    for _ in range(4):
        losses.append(kit.step(optimizer, model(torch.linspace(-1, 1, 8 * 32).view(8, 32)).square().mean()).item())
    parameters = kit.values(model)
    optimizer.close()
    store.close()
    return losses, parameters


@pytest.mark.promise("other-tiers")
def test_a_model_whose_states_are_all_there_has_the_bits_of_host_memory() -> None:
    drawer = Drawer()
    losses, parameters = trained("drawer", tiers={"drawer": drawer})
    expected, on_host = trained("host")
    assert losses == expected and losses[-1] < losses[0]
    assert all(torch.equal(a, b) for a, b in zip(parameters, on_host, strict=True))
    assert drawer.used > 0 and not drawer._kept  # it was used, and its extents were given back
