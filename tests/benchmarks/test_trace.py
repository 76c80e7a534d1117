"""Overlap out of a trace made by hand. Fails if a copy counts twice, or one that nothing hides counts as hidden."""

import gzip
import json

import pytest

from tests.benchmarks import trace

MB = 1 << 20


def event(name, start, duration, category="kernel", nbytes=0):
    return {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {"bytes": nbytes}}


def copy(direction, start, duration, nbytes=50 * MB):
    return event(f"Memcpy {direction} (Pinned -> Device)", start, duration, "gpu_memcpy", nbytes)


EVENTS = [
    event("gemm", 1000, 400),
    event("norm", 1300, 200),  # on another stream, in part at the same time
    event("gemm", 2000, 500),
    copy("HtoD", 900, 200),  # 1000-1100 of it beside a kernel
    copy("HtoD", 1100, 100),  # all of it
    copy("DtoH", 1600, 300),  # none
    copy("DtoH", 1800, 400),  # 2000-2200; 1800-1900 is in two copies
    copy("HtoD", 2600, 10, nbytes=8),  # a scalar
    event("Memset (Device)", 2400, 100, "gpu_memset"),
    event("cudaLaunchKernel", 0, 5000, "cuda_runtime"),
    {"ph": "M", "name": "process_name", "args": {"name": "python"}},
    {"ph": "i", "cat": "kernel", "name": "mark", "ts": 1},
]


def test_the_fractions_are_those_of_the_time_in_which_something_is_copied(tmp_path):
    path = tmp_path / "step.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": EVENTS}).encode()))
    found = trace.overlap(trace.lanes(trace.read(path)))
    copies = {"swap_in": (300e-6, 200 / 300), "swap_out": (600e-6, 200 / 600)}
    for lane, (seconds, beside) in copies.items():
        wanted = {"seconds": seconds, "gbps": 2 * 50 * MB / seconds / 1e9, "beside_kernels": beside}
        assert found[lane] == pytest.approx(wanted)
    assert found["window_seconds"] == pytest.approx(1600e-6)  # 900 to 2500
    assert found["kernel_seconds"] == pytest.approx(1000e-6)
    assert found["idle_seconds"] == pytest.approx(600e-6)


def test_a_trace_without_a_device_has_nothing_to_say():
    found = trace.overlap(trace.lanes([event("aten::mm", 0, 10, "cpu_op")]))
    assert found == {"window_seconds": 0.0, "kernel_seconds": 0.0, "idle_seconds": 0.0}
