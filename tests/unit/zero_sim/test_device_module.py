"""`torch.sim` is what `torch.cuda` is for code that uses streams: names, current devices, streams, memory, seeds."""

from __future__ import annotations

import copy
import io
import threading

import pytest
import torch
import torch.utils.checkpoint

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)

USED = """Stream Event stream device device_of current_stream default_stream set_stream synchronize is_available
is_initialized init device_count current_device set_device get_device_name get_device_capability get_device_properties
can_device_access_peer is_bf16_supported empty_cache ipc_collect mem_get_info memory_allocated max_memory_allocated
memory_reserved max_memory_reserved memory_stats memory_summary reset_peak_memory_stats reset_max_memory_allocated
reset_accumulated_memory_stats set_per_process_memory_fraction OutOfMemoryError cudart _sleep set_sync_debug_mode
get_sync_debug_mode get_rng_state set_rng_state get_rng_state_all set_rng_state_all manual_seed manual_seed_all seed
seed_all initial_seed is_current_stream_capturing StreamContext _lazy_init _is_in_bad_fork""".split()


def test_names_are_those_of_torch_cuda():
    assert [name for name in USED if not hasattr(torch.cuda, name)] == []
    assert [name for name in USED if not hasattr(torch.sim, name)] == []


def test_torch_knows_the_device():
    assert torch.get_device_module("sim") is torch.sim
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == torch.sim.device_count() == 2
    assert torch.sim.is_available() and torch.accelerator.is_available()
    x = torch.ones(2).sim()
    assert x.is_sim and x.device == torch.device("sim:0") and repr(x) == "tensor([1., 1.], device='sim:0')"
    properties = torch.sim.get_device_properties("sim:1")
    assert properties.total_memory == torch.sim.mem_get_info(1)[1] and properties.name.endswith("1")
    with pytest.raises(RuntimeError, match="there is no device sim:9: ZERO_SIM_DEVICES is 2"):
        torch.ones(1, device="sim:9")


def test_the_current_device_is_each_threads_own():
    seen = []
    with torch.sim.device(1):
        assert torch.ones(1, device="sim").device.index == torch.sim.current_device() == 1
        thread = threading.Thread(target=lambda: seen.append(torch.sim.current_device()))
        thread.start()
        thread.join()
        with torch.sim.device_of(torch.ones(1, device="sim:0")):
            assert torch.sim.current_device() == 0
    assert torch.sim.current_device() == 0 and seen == [0]


def test_streams_are_current_inside_their_context_only():
    first, second = torch.sim.Stream(), torch.sim.Stream("sim:1")
    assert first != second and first.device.index == 0 and second.device.index == 1
    with torch.sim.stream(first):
        assert torch.sim.current_stream() == first
        with torch.sim.stream(second):
            assert torch.sim.current_device() == 1 and torch.sim.current_stream() == second
            assert torch.sim.current_stream(0) == first
        assert torch.sim.current_device() == 0 and torch.sim.current_stream() == first
        with torch.sim.stream(None):
            assert torch.sim.current_stream() == first
    assert torch.sim.current_stream() == torch.sim.default_stream() == torch.sim.default_stream("sim:0")
    assert torch.sim.current_stream(1) == torch.sim.default_stream(1)
    assert isinstance(torch.sim.current_stream(), torch.sim.Stream)
    with first:  # torch.Stream's own
        assert torch.sim.current_stream() == first


def test_memory_is_counted_as_cudas():
    torch.sim.empty_cache()
    before = torch.sim.memory_allocated()
    torch.sim.reset_peak_memory_stats()
    x = torch.ones(1000, device="sim")
    assert torch.sim.memory_allocated() - before == 4096  # multiples of 512 bytes
    del x
    assert torch.sim.memory_allocated() == before and torch.sim.max_memory_allocated() == before + 4096
    stats = torch.sim.memory_stats()
    assert stats["allocated_bytes.all.peak"] == before + 4096
    assert stats["reserved_bytes.all.current"] == torch.sim.memory_reserved() >= 4096
    free, total = torch.sim.mem_get_info()
    assert free == total - torch.sim.memory_reserved()
    assert torch.accelerator.memory_allocated() == before
    assert "allocated_bytes.all.peak" in torch.sim.memory_summary()


def test_random_states_are_kept_and_restored():
    state = torch.sim.get_rng_state("sim:1")
    assert state.dtype == torch.uint8 and state.numel() == 16  # as CUDA's
    first = torch.rand(4, device="sim:1")
    torch.sim.set_rng_state(state, "sim:1")
    assert torch.equal(first, torch.rand(4, device="sim:1"))
    everything = torch.sim.get_rng_state_all()
    with torch.random.fork_rng(devices=[0, 1], device_type="sim"):
        torch.sim.manual_seed_all(4)
        assert torch.sim.initial_seed() == 4
        torch.rand(2, device="sim")
    assert all(map(torch.equal, everything, torch.sim.get_rng_state_all()))
    with pytest.raises(RuntimeError, match="16"):
        torch.sim.set_rng_state(torch.zeros(3, dtype=torch.uint8))


def test_recomputation_draws_the_same_numbers():
    x, dropout = torch.ones(64, device="sim", requires_grad=True), torch.nn.Dropout(0.5)
    for reentrant in (True, False):
        x.grad = None
        y = torch.utils.checkpoint.checkpoint(lambda t: dropout(t) * t, x, use_reentrant=reentrant)
        y.sum().backward()
        assert torch.equal(x.grad != 0, y != 0)


def test_tensors_are_saved_loaded_and_copied():
    file = io.BytesIO()
    torch.save({"x": torch.arange(3.0, device="sim:1")}, file)
    for where, device in ((None, "sim:1"), ("cpu", "cpu"), ("sim:0", "sim:0"), ({"sim:1": "sim:0"}, "sim:0")):
        file.seek(0)
        x = torch.load(file, map_location=where)["x"]
        assert str(x.device) == device and x.tolist() == [0.0, 1.0, 2.0]
    x = torch.arange(3.0, device="sim")
    assert copy.deepcopy(x).tolist() == x.tolist() and x.untyped_storage().is_sim
    assert x.cpu().pin_memory().is_pinned() and not x.cpu().is_pinned()
