"""Cores claimed for a GPU that is only named: who is bound where, and that all of it is undone.

Fails if the launching thread may sit on a core of the update's, or if a run leaves its process bound.
"""

import os
from types import SimpleNamespace

import pytest
import torch

import zero_train.run.cpu_affinity
from zero_optim_cpu import cores
from zero_train.run import train
from zero_train.run.ranks import Ranks
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


def test_a_dry_run_says_which_cores(gpu, monkeypatch, capsys):
    """The run is one on the CPU; only the cores are claimed as beside a GPU."""
    real = zero_train.run.cpu_affinity.claimed
    monkeypatch.setattr(zero_train.run.cpu_affinity, "claimed", lambda config, _: real(config, OnGpu()))
    before = os.sched_getaffinity(0)
    assert train.run(composed("data=synthetic", "run.dry=true")).exit_code == 0
    said = [line for line in capsys.readouterr().out.splitlines() if line.startswith("update: ")]
    found = cores.beside_gpus([cores.Seat(None, tuple(sorted(before)))], 0)
    assert said == [f"update: {found}"]
