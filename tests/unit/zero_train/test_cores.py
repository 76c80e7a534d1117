"""Cores claimed for a GPU that is only named: who is bound where, and that all of it is undone.

Fails if the launching thread may sit on a core of the update's, or if a run leaves its process bound.
"""

import os
from types import SimpleNamespace

import pytest
import torch

import zero_train.run.cpu_affinity
from zero_core.errors import CollectiveError
from zero_optim_cpu import cores
from zero_train.run.ranks import Ranks, device_type
from zero_train.settings import compose as config


class OnGpu(Ranks):
    """One of `local_world_size` ranks, each of which says the same of its GPU."""

    @property
    def device(self):
        return torch.device("cuda", self.local_rank)

    def gather(self, text):
        return [text] * self.world_size


@pytest.fixture
def gpu(monkeypatch):
    """torch tells where the GPU is; this machine's own /sys says the rest. Two CPUs at least, of which one is asked."""
    where = SimpleNamespace(pci_domain_id=0, pci_bus_id=1, pci_device_id=0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: where)
    asked = []
    real = cores.beside_gpus
    monkeypatch.setattr(cores, "beside_gpus", lambda *seats: asked.append(seats) or real(*seats))
    return asked


def composed(*overrides):
    return config.compose(["recipe=tiny", "offload=host", "run.dir=runs/x", *overrides])


def test_the_launching_thread_is_kept_off_the_updates_cores_and_freed_again(gpu):
    before, count = os.sched_getaffinity(0), torch.get_num_threads()
    with zero_train.run.cpu_affinity.claimed(composed(), OnGpu()) as found:
        assert os.sched_getaffinity(0) == set(found.rest)
        assert torch.get_num_threads() == found.rest_cores
        assert len(before) == 1 or not set(found.pool) & set(found.rest)
    assert (os.sched_getaffinity(0), torch.get_num_threads()) == (before, count)


def test_the_ranks_of_this_host_are_those_that_divide(gpu):
    with zero_train.run.cpu_affinity.claimed(composed(), OnGpu(rank=5, world_size=8, local_rank=1, local_world_size=4)):
        pass
    seats, local_rank = gpu[0]
    assert (len(seats), local_rank) == (4, 1)
    assert set(seats[0].allowed) == os.sched_getaffinity(0)


@pytest.mark.parametrize(
    ("ranks", "override"), [(Ranks(), "run.steps=5"), (OnGpu(), "offload=none"), (OnGpu(), "optim.threads=2")]
)
def test_otherwise_nothing_is_bound(gpu, monkeypatch, ranks, override):
    before = os.sched_getaffinity(0)
    with zero_train.run.cpu_affinity.claimed(composed(override), ranks) as found:
        assert found is None
        assert os.sched_getaffinity(0) == before
    assert not gpu


@pytest.fixture
def accelerator(monkeypatch):
    """torch's accelerator, as these tests describe it."""

    def seen(kind, **module):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: kind is not None)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda *_: torch.device(kind))
        found = SimpleNamespace(is_available=lambda: True, **module)
        monkeypatch.setattr(torch, "get_device_module", lambda device: found)

    return seen


def test_torchs_accelerator_is_taken_and_the_cpu_where_there_is_none(accelerator):
    accelerator("xpu", Stream=object)
    assert Ranks(local_rank=2).device == torch.device("xpu", 2)
    assert device_type("cpu") == "cpu"
    accelerator(None)
    assert Ranks(local_rank=2).device == torch.device("cpu")


@pytest.mark.promise("device-chosen")
def test_two_kinds_are_taken_only_where_they_are_asked_for(accelerator):
    accelerator("mps")  # without streams
    assert device_type(None) == "cpu"
    accelerator("xpu", Stream=object, simulated=True)
    assert device_type(None) == "cpu" and device_type("xpu") == "xpu"


def test_a_device_that_torch_does_not_see_is_not_taken():
    assert device_type("no-such-device") == device_type(None)


@pytest.mark.promise("machines-exit")
@pytest.mark.parametrize("call", ["mean", "most", "gather"])
def test_a_rank_that_does_not_reach_the_others_raises_an_error_of_ours(monkeypatch, call):
    """Fails if gloo's own RuntimeError escapes, which ends a run with a traceback."""

    def fails(*given, **named):
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr("torch.distributed.all_gather_object", fails)
    with pytest.raises(CollectiveError, match="rank 1 of 2 did not reach the others: Connection closed by peer"):
        getattr(Ranks(1, 2, device_type="cpu"), call)(0)
