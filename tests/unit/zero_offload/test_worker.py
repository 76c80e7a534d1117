"""The thread in the background. Fails if it computes with another number of threads than the one that asks it."""

import ctypes
import re
from pathlib import Path

import pytest
import torch

from zero_offload import Timeline
from zero_offload.monitor import Monitor, Worker


def openmp_threads() -> int:
    """How many threads OpenMP gives to what this thread computes, whether torch has told it or not."""
    mapped = re.findall(r"/\S*lib(?:gomp|iomp5|omp)[-.]\S*", Path("/proc/self/maps").read_text())
    if not mapped:
        pytest.skip("torch has no OpenMP here")
    mapped.sort(key=lambda path: "/torch" not in path)  # other packages bring libraries of their own
    return ctypes.CDLL(mapped[0]).omp_get_max_threads()


@pytest.mark.promise("update-threads")
def test_it_computes_with_the_threads_of_whoever_asks() -> None:
    before, found = torch.get_num_threads(), list[int]()
    monitor = Monitor(Timeline())
    worker = Worker("a worker", monitor, lambda item: found.append(openmp_threads()))
    try:
        for count in (3, 1, 2):
            torch.set_num_threads(count)
            worker.put(None)
            with monitor.condition:
                monitor.condition.wait_for(worker.idle, timeout=60)
    finally:
        torch.set_num_threads(before)
        worker.close()
    assert found == [3, 1, 2]
