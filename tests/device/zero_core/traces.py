"""What ran beside what, from torch's profiler: intervals on the device by the names of what ran."""

import json
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from tests.benchmarks.trace import common, merged, seconds

Interval = tuple[float, float]


def hidden(of: Iterable[Interval], behind: Iterable[Interval]) -> float:
    """The fraction of the time of `of` in which something of `behind` runs too."""
    ours = merged(of)
    return seconds(common(ours, merged(behind))) / seconds(ours) if ours else 0.0


def traced(device: torch.device, call: Callable[[], Any]) -> list[tuple[str, Interval]]:
    """(name, interval in microseconds) of every kernel and copy on the device while `call` ran.

    Where torch traces no device, of operators. From the exported trace, whose categories tell kernels from the
    annotations that the profiler lays over them.
    """
    own = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}.get(device.type)
    with profile(activities=[ProfilerActivity.CPU, *([own] if own else [])]) as profiler:
        call()
        torch.get_device_module(device).synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = {"kernel", "gpu_memcpy", "gpu_memset"} if own else {"cpu_op"}
    return [
        (event["name"], (event["ts"], event["ts"] + event["dur"]))
        for event in events
        if event.get("ph") == "X" and event.get("cat") in wanted
    ]


def split(trace: list[tuple[str, Interval]], word: str) -> tuple[list[Interval], list[Interval]]:
    """Intervals of what has the word in its name, and of the kernels that compute."""
    moving = ("memcpy", "memset", "nccl")
    ours = [interval for name, interval in trace if word in name.lower()]
    others = [interval for name, interval in trace if not any(each in name.lower() for each in moving)]
    return ours, others
