"""TieredStore against zero-core's suite for ShardStores, in every tier.

Its arithmetic is TorchStep's: the optimizer's own to a few units in the last place, so a rounded bf16 parameter may
fall on the other side of a tie.
"""

from typing import Any

import pytest
import torch

from tests.unit.zero_offload.simulated import streams
from zero_core.store import ShardStore
from zero_core.testing.conformance import ShardStoreSuite
from zero_offload import MemoryByteStore, TieredStore, TorchStep

pytestmark = pytest.mark.promise("suites")


class TestHost(ShardStoreSuite):
    parameter_dtypes = (torch.float32,)
    exact = False
    tolerance = 1e-5
    placement: Any = "host"
    arguments: dict[str, Any] = {}

    def make_store(self) -> ShardStore:
        kinds = ("parameters", "gradients", "optimizer")
        by_kind = self.placement if isinstance(self.placement, dict) else dict.fromkeys(kinds, self.placement)
        given = {"tile_numel": 1 << 20, "streams": streams(), **self.arguments}
        return TieredStore(**by_kind, nvme=MemoryByteStore(), **given)


class TestHostBf16(TestHost):
    parameter_dtypes = (torch.bfloat16,)
    tolerance = 2**-7


class TestNvme(TestHost):
    placement = "nvme"


class TestNvmeBf16(TestHostBf16):
    placement = "nvme"


class TestMixed(TestHostBf16):
    placement = {"parameters": "host", "gradients": "nvme", "optimizer": {"host": 0.5, "nvme": 0.5}}


class TestWithoutOverlap(TestNvme):
    arguments = {"overlap": False}


class TestFp32Layout(TestHostBf16):
    placement = "nvme"

    def make_store(self) -> ShardStore:
        kinds = ("parameters", "gradients", "optimizer")
        return TieredStore(**dict.fromkeys(kinds, "nvme"), nvme=MemoryByteStore(), step=TorchStep("fp32"))


class TestMomentum(TestNvme):
    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=1e-2, momentum=0.9)
