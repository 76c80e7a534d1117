"""The reference UpdateStep against the shipped suite, in both layouts and for every optimizer that it knows."""

from collections.abc import Sequence

import pytest
import torch

from zero_offload import TorchStep
from zero_offload.protocols import UpdateStep
from zero_offload.testing import UpdateStepSuite

pytestmark = pytest.mark.promise("suites")


class TestSplit(UpdateStepSuite):
    def make_step(self) -> UpdateStep:
        return TorchStep()


class TestFp32(UpdateStepSuite):
    def make_step(self) -> UpdateStep:
        return TorchStep("fp32")


class TestAdam(TestSplit):
    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.Adam(parameters, lr=1e-2, weight_decay=0.1)


class TestMomentum(TestSplit):
    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1)


class TestPlain(TestSplit):
    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1e-2)
