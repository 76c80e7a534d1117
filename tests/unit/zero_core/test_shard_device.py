"""Where `shard` computes: where it is told, else where the parameters are; and over what the ranks there meet."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zero_core
from zero_core.api.assemble import compute_device, move_buffers
from zero_core.device import Side, backend_in, backend_of

META = torch.device("meta")


def test_parameters_say_where_unless_it_is_said():
    model = nn.Linear(3, 3)
    assert compute_device(model, None, None) == torch.device("cpu")
    assert compute_device(model, "meta", None) == META
    with zero_core.deferred_init():
        deferred = nn.Linear(3, 3)
    assert compute_device(deferred, None, None) == torch.device("cpu")
    assert compute_device(deferred, None, SimpleNamespace(device_type="meta")) == META
    assert compute_device(deferred, META, SimpleNamespace(device_type="cpu")) == META


@pytest.mark.promise("no-cuda")
def test_a_gpu_without_a_number_is_the_current_one_and_one_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    with zero_core.deferred_init():
        deferred = nn.Linear(3, 3)
    assert compute_device(deferred, "cuda", None) == torch.device("cuda", 3)
    assert compute_device(deferred, None, SimpleNamespace(device_type="cuda")) == torch.device("cuda", 3)
    assert compute_device(deferred, "cuda:1", None) == torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(zero_core.ZeroError, match="device=cuda:1: torch sees no cuda here; pass device='cpu'"):
        compute_device(nn.Linear(3, 3), "cuda:1", None)


def test_two_devices_are_refused():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1]._parameters["weight"] = SimpleNamespace(device=torch.device("cuda", 0), is_meta=False)
    with pytest.raises(zero_core.ZeroError, match="parameters on .*cpu.*cuda:0.*: move the model to one device"):
        compute_device(SimpleNamespace(parameters=model._modules["1"]._parameters.values), None, None)


def test_buffers_go_along():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 3))
    model[1].register_buffer("table", torch.ones(3), persistent=False)
    move_buffers(model, META)
    assert {b.device for b in model.buffers()} == {META} and {p.device.type for p in model.parameters()} == {"cpu"}
    assert "table" not in model.state_dict() and len(list(model.buffers())) == 4


@pytest.mark.promise("device-backend")
def test_the_backend_follows_the_device_and_a_group_that_cannot_average_on_it_is_refused():
    assert backend_of("cpu") == "gloo"
    assert backend_of("cuda") == "cpu:gloo,cuda:nccl"
    assert backend_of("xpu") == "cpu:gloo,xpu:xccl"
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert backend_in(dist.group.WORLD, torch.device("cpu")) == "gloo"
        with pytest.raises(
            zero_core.ZeroError, match=r"on cuda:1, .* uses gloo, .*init_process_group\(\"cpu:gloo,cuda:nccl"
        ):
            backend_in(dist.group.WORLD, torch.device("cuda", 1))
    finally:
        dist.destroy_process_group()


@pytest.mark.promise("device-streams", "device-memory-order")
def test_what_is_queued_on_several_streams_has_one_order():
    """Fails if a hook does not wait for what another hook queued elsewhere, or a gather ahead for its memory."""
    waits, now = [], ["a"]
    streams = {
        name: SimpleNamespace(wait_stream=lambda other, name=name: waits.append((name, other.name)), name=name)
        for name in ("a", "b", "side")
    }
    module = SimpleNamespace(
        current_stream=lambda device: streams[now[0]], Stream=lambda device: streams["side"], stream=nullcontext
    )
    side = Side(torch.device("cpu"), module)
    for now[0] in "aabba":
        side.go_on()
    assert waits == [("b", "a"), ("a", "b")]
    with side.after_current() as current:
        assert current is streams["side"] and waits[-1] == ("side", "a")
