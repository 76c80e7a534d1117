"""`probe`: the shape of what it measures. No figure is asserted but that there is one."""

import pytest

from zero_offload import Hardware, MemoryByteStore, TorchStep, plan, probe, probing

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
