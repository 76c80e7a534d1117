"""Over what the ranks of a device meet: torch's own default for it, and a refusal where a group cannot serve it."""

import pytest
import torch
import torch.distributed as dist

from zero_core import ZeroError
from zero_core.device import backend_in, backend_of

pytestmark = pytest.mark.promise("device-backend")


def test_the_backend_follows_the_device():
    assert backend_of("cpu") == "gloo"
    assert backend_of("cuda") == "cpu:gloo,cuda:nccl"
    assert backend_of("xpu") == "cpu:gloo,xpu:xccl"


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_a_group_that_cannot_average_on_the_device_is_refused_with_the_call_that_can(group):
    assert backend_in(group, torch.device("cpu")) == "gloo"
    with pytest.raises(ZeroError, match=r"on cuda:1, .* by gloo, .*init_process_group\(\"cpu:gloo,cuda:nccl\"\)"):
        backend_in(group, torch.device("cuda", 1))
