"""Bytes of a device pass through pinned memory, and a copy and the keeper's transfer of another piece go on together.

Fails if a copy waits on the host, if a buffer is used again too early, or if each piece ends before the next begins.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.device.zero_core import runs
from zero_core import saved_bytes
from zero_core.device import queued
from zero_core.saved_bytes import HostMemory, SavedBytes


class Recording(HostMemory):
    """Says how many pieces were begun before each transfer."""

    def __init__(self) -> None:
        self.copies = 0
        self.begun: list[int] = []
        self.pinned: list[bool] = []

    def queued(self, device: torch.device) -> Any:
        self.copies += 1
        return queued(device)

    def read(self, extent: Tensor, buffer: Tensor, offset: int = 0) -> Any:
        self.pinned.append(buffer.is_pinned())
        return super().read(extent, buffer, offset)

    def write(self, extent: Tensor, buffer: Tensor, offset: int = 0) -> Any:
        self.begun.append(self.copies)
        self.pinned.append(buffer.is_pinned())
        return super().write(extent, buffer, offset)


def test_a_piece_is_written_while_later_ones_are_copied(device, needs_device, monkeypatch: pytest.MonkeyPatch) -> None:
    needs_device("pinned memory")
    monkeypatch.setattr(saved_bytes, "PART_BYTES", 1 << 12)
    values = [torch.randn(5000, device=device), torch.arange(33, device=device), torch.ones(9)]
    expected = [value.clone() for value in values]
    keeper, kept = Recording(), SavedBytes()
    monkeypatch.setattr(saved_bytes, "queued", keeper.queued)
    with runs.NormMayWait(device).refusing():
        kept.put(keeper, values)
        for value in values:
            value.zero_()
        kept.take(values)
    assert all(map(torch.equal, values, expected))
    assert keeper.begun[:3] == [3, 4, 5] and keeper.pinned.count(False) == 2  # the tensor in host memory, twice
    kept.free()
