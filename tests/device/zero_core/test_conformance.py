"""DeviceStore, a store that copies from pinned memory, and torch's collectives keep their promises on any device."""

import pytest
import torch

from tests.device.zero_core import runs
from zero_core.comm import TorchCollectives
from zero_core.optim.device_store import DeviceStore
from zero_core.testing import CollectivesSuite, ShardStoreSuite


class OnDevice(ShardStoreSuite):
    @pytest.fixture(autouse=True)
    def _on_device(self, device):
        self.device = device


class TestDeviceStore(OnDevice):
    def make_store(self):
        return DeviceStore()


class TestDeviceStoreFused(OnDevice):
    def make_store(self):
        return DeviceStore()

    def make_optimizer(self, groups):
        return torch.optim.AdamW(groups, lr=1e-2, fused=True)


class TestStoreThatSwapsIn(OnDevice):
    def make_store(self):
        return runs.swapping(self.device, late_cycles=2_000_000)


class TestTorchCollectives(CollectivesSuite):
    collectives = TorchCollectives

    @pytest.fixture(autouse=True)
    def _on_devices(self, device, device_ranks):
        self.device_type, self.ranks = device.type, (device_ranks.size,)
        self.pool = lambda size: device_ranks
