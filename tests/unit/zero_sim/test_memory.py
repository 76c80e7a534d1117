"""Device memory and host memory that copies may use: what is given out when, and what the figures say."""

import functools
import math
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim")

MIB = 1 << 20


@pytest.fixture(autouse=True)
def empty():
    torch.sim.empty_cache()
    torch.sim.reset_peak_memory_stats()
    yield
    torch.sim.set_per_process_memory_fraction(1.0)


def bytes_on_device(n: int) -> torch.Tensor:
    return torch.empty(n, dtype=torch.uint8, device="sim")


def alone(test: Callable[[], None]) -> Callable[[], None]:
    """The test in a process of its own, for figures of all memory: earlier tests may have left some in use."""

    @functools.wraps(test)
    def run() -> None:
        program = f"import {__name__} as tests; tests.{test.__name__}.__wrapped__()"
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr

    return run


def test_new_memory_is_poisoned():
    assert all(math.isnan(v) for v in torch.empty(100, device="sim").tolist())
    x = torch.ones(100, device="sim")
    address = x.data_ptr()
    del x
    y = torch.empty(100, device="sim")
    assert y.data_ptr() == address and all(math.isnan(v) for v in y.tolist())


def test_freed_memory_is_poisoned_in_strict_mode_and_that_is_a_write():
    zero_sim.configure(strict=True)
    x, side = torch.ones(100, device="sim"), torch.sim.Stream()
    side.wait_stream(torch.sim.current_stream())
    storage, pinned = x.untyped_storage(), torch.zeros(100, pin_memory=True)
    torch.sim._sleep(2000 * 20_000)
    del x, storage
    assert zero_sim.take_races() == [] and pinned.sum() == 0


def test_a_block_freed_on_its_stream_is_given_out_to_that_stream_at_once_and_to_no_other():
    side = torch.sim.Stream()
    x = bytes_on_device(1000)
    address = x.data_ptr()
    torch.sim._sleep(2000 * 20_000)
    del x
    with torch.sim.stream(side):
        other = bytes_on_device(1000)
    assert other.data_ptr() != address
    assert bytes_on_device(1000).data_ptr() == address


def test_a_recorded_block_leaves_after_the_other_streams_work():
    side = torch.sim.Stream()
    x = bytes_on_device(1000)
    address = x.data_ptr()
    zero_sim.build.native.spin(zero_sim.build.native.stream_index(side), 500_000)  # longer than the next lines
    x.record_stream(side)
    del x
    held = bytes_on_device(1000)
    assert held.data_ptr() != address
    side.synchronize()
    assert bytes_on_device(1000).data_ptr() == address


@alone
def test_a_limit_is_kept_and_cached_memory_given_back_before_it_is_an_error():
    torch.sim.set_per_process_memory_fraction(100 * MIB / torch.sim.mem_get_info()[1])
    cached = bytes_on_device(60 * MIB)
    del cached
    x = bytes_on_device(80 * MIB)
    assert torch.sim.memory_reserved() == 80 * MIB
    with pytest.raises(torch.OutOfMemoryError) as error:
        bytes_on_device(30 * MIB)
    text = str(error.value)
    assert "sim out of memory. Tried to allocate 30.00 MiB. Device sim:0 has a total capacity of" in text
    assert "This process may use 100.00 MiB of it." in text and "80.00 MiB is allocated by PyTorch" in text
    del x
    assert bytes_on_device(90 * MIB).numel() == 90 * MIB


@alone
def test_queued_work_keeps_nothing_alive():
    x = bytes_on_device(30 * MIB)
    torch.sim._sleep(2000 * 20_000)
    x.add_(1)
    del x
    assert torch.sim.memory_allocated() == 0


def test_pinned_memory_is_given_out_again_after_its_copies():
    x = torch.ones(5000, device="sim")
    pinned = torch.empty(5000, pin_memory=True)
    address = pinned.data_ptr()
    torch.sim._sleep(2000 * 50_000)
    pinned.copy_(x, non_blocking=True)
    del pinned
    held = torch.empty(5000, pin_memory=True)
    assert held.data_ptr() != address
    torch.sim.synchronize()
    again = torch.empty(5000, pin_memory=True)
    assert again.data_ptr() == address and again.isnan().all()
    assert zero_sim.take_races() == []


def test_unregistering_under_a_copy_is_a_race():
    runtime, x, device = torch.sim.cudart(), torch.zeros(1000), torch.empty(1000, device="sim")
    runtime.cudaHostRegister(x.data_ptr(), 4000, 0)
    device.copy_(x, non_blocking=True)
    runtime.cudaHostUnregister(x.data_ptr())
    (race,) = zero_sim.take_races()
    assert race.now.what == "memory unregistered" and "registered host memory" in race.memory
    torch.sim.synchronize()
