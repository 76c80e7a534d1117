"""Streams and events: work runs later than it is queued, in order, and a process ends well whatever is queued."""

import os
import signal
import subprocess
import sys

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim")


def test_work_runs_later_than_its_launch():
    """Fails if a launch waits for its kernel: eight kernels, each half a second late, are late at the same time."""
    native, x = zero_sim.build.native, torch.zeros(4, device="sim").add_(0)
    torch.sim.synchronize()
    zero_sim.configure(latency_us=500_000)
    before = native.kernels_run()
    for _ in range(8):
        x.add_(1)
    assert native.kernels_run() == before and not torch.sim.current_stream().query()
    assert x.tolist() == [8.0] * 4


def test_a_stream_waits_for_an_event_without_the_host():
    side, event, x = torch.sim.Stream(), torch.sim.Event(), torch.zeros(4, device="sim")
    torch.sim._sleep(2000 * 5000)
    x.fill_(3)
    event.record()
    side.wait_event(event)
    assert not event.query()
    with torch.sim.stream(side):
        y = x + 1
        assert y.tolist() == [4.0] * 4
    assert event.query() and zero_sim.take_races() == []


def test_what_a_kernel_raises_comes_later_and_once():
    x = torch.zeros(3, device="sim")
    indices = torch.tensor([7], device="sim")
    torch.index_select(x, 0, indices)
    said = r"that was queued earlier has failed. aten::index_select, queued at .*test_streams.py:\d+ in .*: .*out of"
    with pytest.raises(RuntimeError, match=said):
        torch.sim.synchronize()
    torch.sim.synchronize()


def test_the_host_that_touches_device_memory_is_told_so():
    program = """
import ctypes, resource, torch, zero_sim
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
x = torch.ones(3, device="sim:1")
ctypes.c_float.from_address(x.data_ptr()).value
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert ended.returncode == -signal.SIGSEGV
    assert ended.stderr.startswith("sim: the host touched device memory of sim:1 at address 0x")
    assert "Copy it to the host first." in ended.stderr
