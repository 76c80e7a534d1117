"""`probe`: the shape of what it measures. No figure is asserted but that there is one."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from zero_offload import Hardware, MemoryByteStore, OffloadError, TorchStep, plan, probe, probing, probing_device

MEASURED = ("host_gib", "tflops", "update_gbps", "nvme_read_gbps", "nvme_write_gbps", "nvme_mixed_gbps")


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(probing, "BLOCK_BYTES", 1 << 16)
    monkeypatch.setattr(probing, "BLOCKS", 4)
    monkeypatch.setattr(probing, "UPDATE_NUMEL", 1 << 12)
    monkeypatch.setattr(probing, "UPDATE_TILES", 2)


class PathStore(MemoryByteStore):
    def __init__(self, paths):
        super().__init__()
        self.paths = paths


def test_everything_asked_for_is_measured(small, tmp_path):
    found = probe(nvme=PathStore([tmp_path]), step=TorchStep(), hidden_size=64, tokens=32, name="here")
    assert all(getattr(found, name) > 0 for name in MEASURED)
    assert found.name == "here" and found.shares_host
    assert found.nvme_gib > 0 and found.nvme_paths == 1
    assert Hardware.from_dict(found.to_dict()) == found


def test_what_is_not_asked_for_stays_unknown(small):
    found = probe(hidden_size=64, tokens=32)
    assert found.update_gbps is None and found.nvme_read_gbps is None
    assert found.tflops > 0


def test_a_plan_on_a_probed_machine_has_a_time(small, tmp_path):
    found = probe(nvme=PathStore([tmp_path]), step=TorchStep(), hidden_size=64, tokens=32)
    planned = plan([1 << 16] * 2, found, optimizer="nvme", tokens=1024)
    assert planned.step_seconds > planned.prediction.compute_seconds > 0


def test_extents_are_given_back(small):
    given, taken = [], []

    class Counting(MemoryByteStore):
        def allocate(self, nbytes):
            given.append(super().allocate(nbytes))
            return given[-1]

        def free(self, extent):
            taken.append(extent)
            super().free(extent)

    probe(nvme=Counting(), hidden_size=64, tokens=32)
    assert given and given == taken


class Cuda:
    """Stand-ins for the calls of a device's module that the probe makes: tensors stay on the CPU."""

    def __init__(self, monkeypatch, status=0):
        self.streams, self.used, self.synchronised, self.registered = [], [], 0, {}
        self.status = status
        runtime = SimpleNamespace(cudaHostRegister=self.register, cudaHostUnregister=self.unregister)
        monkeypatch.setattr(torch.cpu, "mem_get_info", lambda _: (60 << 30, 64 << 30), raising=False)
        monkeypatch.setattr(torch.cpu, "Stream", self.stream)
        monkeypatch.setattr(torch.cpu, "stream", self.using)
        monkeypatch.setattr(torch.cpu, "device", lambda _: contextlib.nullcontext(), raising=False)
        monkeypatch.setattr(torch.cpu, "synchronize", self.synchronise)
        monkeypatch.setattr(torch.cpu, "cudart", lambda: runtime, raising=False)
        monkeypatch.setattr(probing_device, "COPY_BYTES", 1 << 16)
        monkeypatch.setattr(probing_device, "WARM_SECONDS", 0.0)

    def register(self, address, nbytes, flags):
        assert flags == 0
        self.registered[address] = nbytes
        return self.status

    def unregister(self, address):
        del self.registered[address]
        return 0

    def stream(self, device):
        self.streams.append(object())
        return self.streams[-1]

    @contextlib.contextmanager
    def using(self, stream):
        assert self.registered, "a copy of memory that is not registered is not asynchronous"
        self.used.append(stream)
        yield

    def synchronise(self, device):
        self.synchronised += 1


def test_the_link_is_measured_each_way_and_both_at_once_from_registered_memory(monkeypatch):
    cuda = Cuda(monkeypatch)
    found = probing_device.device_figures(torch.device("cpu"))
    assert found["device_gib"] == 64 and found["device_reserved_gib"] == 4
    assert all(found[name] > 0 for name in ("link_gbps", "link_out_gbps", "link_mixed_gbps", "device_gbps"))
    assert len(cuda.streams) == 2 and not cuda.registered
    rounds = probing_device.ROUNDS + 1  # one to warm up
    both = cuda.used[-2 * rounds :]
    assert both == cuda.streams * rounds  # at once: a lane each, before the host waits
    assert cuda.synchronised == 4 * rounds + 1  # once a round, and before the memory goes


def test_memory_that_cannot_be_registered_is_an_error_with_a_way_out(monkeypatch):
    Cuda(monkeypatch, status=2)
    with pytest.raises(OffloadError, match="failed with status 2 of the cpu runtime; all of it must fit in memory"):
        probing_device.device_figures(torch.device("cpu"))


def test_beside_a_gpu_the_nodes_update_is_that_of_all_its_ranks(small, monkeypatch):
    monkeypatch.setattr(probing, "device_figures", lambda _: {"device_gib": 80.0, "link_gbps": 50.126})
    monkeypatch.setattr(probing, "compute_tflops", lambda *_: 400.0)
    monkeypatch.setattr(probing, "SERVER_TILES", 2)
    monkeypatch.setattr(probing, "update_gbps", lambda step, dtype, count: 50.0 * count)
    found = probe(step=TorchStep(), device="cuda:0", ranks_per_node=4)
    assert (found.device, found.device_gib, found.link_gbps) == ("cuda", 80, 50.1)
    assert found.update_gbps == 400 and found.rank_rate("update_gbps") == 100e9
