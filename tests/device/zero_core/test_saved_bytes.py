"""Bytes of a device pass through pinned memory, and the keeper moves several pieces while another one is copied.

Fails if a buffer is used again too early, or if each piece ends before the next begins.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit.zero_core.test_saved_bytes import Late
from zero_core.util import freed_memory
from zero_core.util.freed_memory import SavedBytes


class Recording(Late):
    """Says of each transfer whether its buffer is pinned."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: list[bool] = []

    def read(self, extent: Tensor, buffer: Tensor, offset: int = 0) -> Any:
        self.pinned.append(buffer.is_pinned())
        return super().read(extent, buffer, offset)

    def write(self, extent: Tensor, buffer: Tensor, offset: int = 0) -> Any:
        self.pinned.append(buffer.is_pinned())
        return super().write(extent, buffer, offset)


@pytest.mark.promise("device-sleep")
def test_pieces_are_moved_while_another_one_is_copied(device, needs_device, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_device("pinned memory")
    monkeypatch.setattr(freed_memory, "PART_BYTES", 1 << 12)
    values = [torch.randn(5000, device=device), torch.arange(33, device=device), torch.ones(9)]
    expected = [value.clone() for value in values]
    keeper, kept = Recording(), SavedBytes()
    kept.put(keeper, values)
    for value in values:
        value.zero_()
    kept.take(values)
    assert all(map(torch.equal, values, expected))
    assert keeper.most == freed_memory.PARTS and not keeper.under_way
    assert keeper.pinned.count(False) == 2  # the tensor in host memory, twice
    kept.free()
