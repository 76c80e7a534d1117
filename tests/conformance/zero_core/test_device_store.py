"""DeviceStore keeps the promises of ShardStore."""

import pytest
import torch

from tests.integration.zero_core import swapping
from zero_core.optim.device_store import DeviceStore
from zero_core.testing import ShardStoreSuite

pytestmark = pytest.mark.promise("suites")


class TestDeviceStore(ShardStoreSuite):
    def make_store(self):
        return DeviceStore()


class TestDeviceStoreWithMomentum(TestDeviceStore):
    def make_optimizer(self, groups):
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


class TestDeviceStoreFused(TestDeviceStore):
    def make_optimizer(self, groups):
        return torch.optim.AdamW(groups, lr=1e-2, fused=True, amsgrad=True)


class TestDeviceStoreWithNumbers(TestDeviceStore):
    """NAdam keeps the product of its momenta, a number a parameter, which decides the next step too."""

    def make_optimizer(self, groups):
        return torch.optim.NAdam(groups, lr=1e-2)


class TestStoreThatSwapsIn(ShardStoreSuite):
    """The tests' own: what holds a real one holds it too."""

    def make_store(self):
        return swapping.SwappingStore()
