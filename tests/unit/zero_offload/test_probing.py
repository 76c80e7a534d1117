"""`probe`: the shape of what it measures. No figure is asserted but that there is one."""

from collections import Counter

import pytest
import torch

from zero_offload import Hardware, MemoryByteStore, TorchStep, probe
from zero_offload.planning import probing
from zero_offload.planning.hardware import GIB

from .simulated import SimulatedStreams

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
        self.paths, self.moved = paths, Counter()

    def read(self, *arguments):
        self.moved["read"] += 1
        return super().read(*arguments)

    def write(self, *arguments):
        self.moved["write"] += 1
        return super().write(*arguments)


def test_everything_asked_for_is_measured(small, tmp_path):
    store = PathStore([tmp_path])
    found = probe(nvme=store, step=TorchStep(), hidden_size=64, tokens=32, name="here")
    assert all(getattr(found, name) > 0 for name in MEASURED if name != "tflops") and found.tflops["bf16"] > 0
    assert found.name == "here" and found.shares_host
    assert found.nvme_gib > 0 and found.nvme_paths == 1
    timed = probing.ROUNDS * (4 + 2)  # blocks one way, and half of them while the others go the other way
    assert store.moved == {"read": timed, "write": 2 * 4 + timed}
    assert Hardware.from_dict(found.to_dict()) == found


@pytest.mark.promise("compute-by-format")
def test_a_block_takes_6_flop_for_each_of_its_parameters_and_tokens(monkeypatch):
    monkeypatch.setattr(probing, "least_seconds", lambda work, rounds: 1e-6)
    found = probing.compute_tflops(torch.device("cpu"), torch.float32, 64, 32)
    assert found == pytest.approx(6 * (10 * 64 * 64) * 32 / 1e6, rel=1e-2)


@pytest.mark.promise("compute-by-format")
def test_compute_is_timed_in_each_dtype_that_a_run_may_use(small, monkeypatch):
    rates = {torch.float32: 0.6, torch.bfloat16: 9.0}
    monkeypatch.setattr(probing, "compute_tflops", lambda device, dtype, *_: rates[dtype])
    found = probe(hidden_size=64, tokens=32, parameter_dtype=torch.bfloat16, dtypes=(torch.float32, torch.bfloat16))
    assert found.tflops == {"fp32": 0.6, "bf16": 9.0}


def test_the_link_is_measured_each_way_and_both_at_once_from_registered_memory(monkeypatch):
    monkeypatch.setattr(probing, "COPY_BYTES", 1 << 16)
    monkeypatch.setattr(probing, "WARM_SECONDS", 0.0)
    streams = SimulatedStreams(torch.empty(0, dtype=torch.uint8))
    copied = []
    copy = streams.copy

    def noted(lane, *rest):
        copied.append(lane)
        return copy(lane, *rest)  # asserts that a copy out goes to memory that was registered

    streams.copy = noted
    found = probing.rates(torch.device("cpu"), streams)
    assert all(found[name] > 0 for name in ("link_gbps", "link_out_gbps", "link_mixed_gbps", "device_gbps"))
    rounds = probing.DEVICE_ROUNDS + 1  # one to warm up
    assert copied == ["swap_in"] * rounds + ["swap_out"] * rounds + ["swap_in", "swap_out"] * rounds
    assert [memory.nbytes for memory in streams.registered] == [0]  # what was measured with is given back


class Accelerator:
    """A device of 80 GiB: 3 GiB belong to others or to the context, 8 to this process."""

    def memory_reserved(self, _):
        return 8 * GIB

    def mem_get_info(self, _):
        return (80 - 3 - 8) * GIB, 80 * GIB


@pytest.mark.promise("device-room")
@pytest.mark.parametrize(
    ("settings", "expandable"),
    [
        ({}, False),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:128, expandable_segments : true"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_what_is_reserved_is_measured_and_fragments_depend_on_the_allocator(monkeypatch, settings, expandable):
    for name in probing.ALLOCATOR_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch, "get_device_module", lambda _: Accelerator())
    monkeypatch.setattr(probing, "_workspace_bytes", lambda *_: GIB // 16)
    found = dict(probing.device_reserves(torch.device("cuda", 0), torch.bfloat16))
    fragments = found.pop("fragments" if expandable else "fragments without expandable_segments")
    assert fragments == (4 if expandable else 8)
    assert found == {"context": 3, "workspaces": 1 / 16, "libraries later": 0.5}
