"""DeviceStore keeps the promises of ShardStore."""

from __future__ import annotations

import pytest
import torch

from zero_core.device_store import DeviceStore
from zero_core.errors import UnsupportedOptimizerError
from zero_core.store import ShardStore, StoreContext
from zero_core.testing import ShardStoreSuite


class TestDeviceStore(ShardStoreSuite):
    def make_store(self):
        return DeviceStore()


class TestDeviceStoreWithMomentum(ShardStoreSuite):
    def make_store(self):
        return DeviceStore()

    def make_optimizer(self, groups):
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)


class TestDeviceStoreFused(ShardStoreSuite):
    def make_store(self):
        return DeviceStore()

    def make_optimizer(self, groups):
        return torch.optim.AdamW(groups, lr=1e-2, fused=True, amsgrad=True)


def test_it_satisfies_the_protocol():
    assert isinstance(DeviceStore(), ShardStore)


def test_optimizers_that_need_whole_tensors_are_refused_by_name():
    optimizer = torch.optim.LBFGS([torch.nn.Parameter(torch.zeros(3))])
    with pytest.raises(UnsupportedOptimizerError, match="LBFGS is not elementwise"):
        DeviceStore().attach([], optimizer, lambda i: torch.zeros(1), context=StoreContext(torch.device("cpu")))
