"""`torch.sim` is what `torch.cuda` is for code that uses streams, memory and seeds."""

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)


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
