"""TieredStore keeps the promises of ShardStore on a discrete device, in every tier."""

from typing import Any

import pytest
import torch

from tests.device.zero_offload import runs
from zero_core.store import ShardStore
from zero_core.testing import ShardStoreSuite


class OnDevice(ShardStoreSuite):
    exact = False
    parameter_dtypes = (torch.bfloat16,)
    tolerance = 2**-7
    placement: Any = "host"

    @pytest.fixture(autouse=True)
    def _on_device(self, device):
        self.device = device
        with runs.discrete(device):
            yield

    def make_store(self) -> ShardStore:
        return runs.tiered(self.placement)


class TestHost(OnDevice):
    pass


class TestFp32(OnDevice):
    parameter_dtypes = (torch.float32,)
    tolerance = 1e-5


class TestNvme(OnDevice):
    placement = "nvme"


class TestClassic(OnDevice):
    placement = runs.classic("nvme")


class TestHalf(OnDevice):
    placement = runs.of_all(device=0.5, host=0.5)


class TestDevice(OnDevice):
    """Updated by torch's own optimizer on that device: exactly."""

    parameter_dtypes = (torch.float32, torch.bfloat16)
    exact = True
    placement = "device"
