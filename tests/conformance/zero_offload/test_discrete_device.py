"""TieredStore with a discrete device, simulated, against zero-core's suite: in every tier again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.conformance.zero_offload.test_shard_store import TestHost, TestHostBf16
from tests.unit.zero_offload.simulated import simulated_device

__all__: list[str] = []  # the imported classes are bases here; pytest collects them where they are defined
KINDS = ("parameters", "gradients", "optimizer")


class Apart:
    @pytest.fixture(autouse=True)
    def _discrete(self) -> Iterator[None]:
        with simulated_device(seed=3):
            yield


class TestApartHost(Apart, TestHost):
    pass


class TestApartHostBf16(Apart, TestHostBf16):
    pass


class TestApartNvmeBf16(Apart, TestHostBf16):
    placement = "nvme"


class TestApartClassic(Apart, TestHostBf16):
    placement: Any = {"parameters": "device", "gradients": "nvme", "optimizer": "host"}


class TestApartDevice(Apart, TestHost):
    """Updated by torch's own optimizer: exactly that of whole tensors."""

    parameter_dtypes = (torch.float32, torch.bfloat16)
    exact = True
    placement = "device"


class TestApartHalf(Apart, TestHostBf16):
    placement = dict.fromkeys(KINDS, {"device": 0.5, "host": 0.5})


del TestHost, TestHostBf16
