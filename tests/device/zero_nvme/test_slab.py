"""TieredStore over files and native updates beside a device: the same bits as in memory, and no access out of order.

The race detector knows of the requests and of the tiles by tests/device/device_annotations.py. Fails if memory that a
file is read into, or that an update writes, is copied to the device before that has ended, or the other way round.
"""

import os
from typing import Any

import pytest

from tests.device.zero_core.runs import differing
from tests.device.zero_offload import runs

zero_nvme = pytest.importorskip("zero_nvme")
zero_optim_cpu = pytest.importorskip("zero_optim_cpu")

GPU = (512, 8, 64)


@pytest.fixture(scope="module", autouse=True)
def small_tiles(device):
    with runs.small_tiles(device):
        yield


def history(device: Any, placement: Any, nvme: Any, step: Any, **options: Any) -> list[Any]:
    tiers = {"nvme": nvme, "step": step}
    return runs.history(device, placement, runs.sized(device, GPU, (64, 6, 512)), tiers=tiers, **options)


@pytest.fixture(scope="module")
def expected(device):
    """Everything on the host, one thread, one tile after another."""
    return history(device, "host", runs.MemoryByteStore(), zero_optim_cpu.CpuStep(threads=1))


@pytest.mark.promise("device-native")
@pytest.mark.parametrize("in_a_row", [False, True], ids=["one tile at a time", "tiles in a row"])
@pytest.mark.parametrize("placement", ["host", "nvme", "halves", "classic nvme"])
def test_files_and_native_updates_have_the_bits_of_host_memory(device, expected, tmp_path, placement, in_a_row):
    cores = sorted(os.sched_getaffinity(0))[:1] if in_a_row else None
    step = zero_optim_cpu.CpuStep(threads=1, cores=cores)
    assert step.in_a_row == in_a_row
    with zero_nvme.Slab(tmp_path, allow_memory=True, threads=2) as slab:
        assert not differing(history(device, runs.BELOW[placement], slab, step), expected)


@pytest.mark.parametrize("policy", ["host", "nvme"])
def test_activations_on_files(device, expected, tmp_path, policy):
    with zero_nvme.Slab(tmp_path, allow_memory=True, threads=2) as slab:
        found = history(device, "nvme", slab, zero_optim_cpu.CpuStep(threads=1), activations=policy)
    assert not differing(found, expected)
