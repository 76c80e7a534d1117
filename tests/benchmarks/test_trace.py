"""Overlap out of a trace made by hand. Fails if a copy counts twice, or one that nothing hides counts as hidden."""

import gzip
import json

import pytest

from tests.benchmarks import trace

MB = 1 << 20


def event(name, start, duration, category="kernel", nbytes=None):
    made = {"ph": "X", "cat": category, "name": name, "ts": start, "dur": duration, "args": {}}
    if nbytes is not None:
        made["args"]["bytes"] = nbytes
    return made


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


def test_the_fractions_are_those_of_the_time_in_which_something_is_copied():
    found = trace.overlap(trace.lanes(EVENTS))
    assert found["swap_in"]["seconds"] == pytest.approx(300e-6)
    assert found["swap_in"]["beside_kernels"] == pytest.approx(200 / 300)
    assert found["swap_in"]["gbps"] == pytest.approx(2 * 50 * MB / 300e-6 / 1e9)
    assert found["swap_out"]["seconds"] == pytest.approx(600e-6)
    assert found["swap_out"]["beside_kernels"] == pytest.approx(200 / 600)


def test_idle_is_the_window_without_a_kernel():
    found = trace.overlap(trace.lanes(EVENTS))
    assert found["window_seconds"] == pytest.approx(1600e-6)  # 900 to 2500
    assert found["kernel_seconds"] == pytest.approx(1000e-6)
    assert found["idle_seconds"] == pytest.approx(600e-6)


def test_a_trace_without_a_device_has_nothing_to_say():
    found = trace.overlap(trace.lanes([event("aten::mm", 0, 10, "cpu_op")]))
    assert found == {"window_seconds": 0.0, "kernel_seconds": 0.0, "idle_seconds": 0.0}


@pytest.mark.parametrize("name", ["step.json", "step.json.gz"])
def test_files_are_read_compressed_or_not_and_drawn(tmp_path, name):
    path, text = tmp_path / name, json.dumps({"traceEvents": EVENTS})
    path.write_bytes(gzip.compress(text.encode()) if name.endswith("gz") else text.encode())
    found = trace.lanes(trace.read(path))
    assert found == trace.lanes(EVENTS)
    for picture in ("step.png", "step.svg"):
        trace.draw(found, tmp_path / picture, "one step")
        assert (tmp_path / picture).stat().st_size > 1000
