"""DeepSpeed's aio as a peer, in a process of its own: one JSON order a line on stdin, one JSON answer a line on stdout.

    {"name": FILE, "kind": "read", "nbytes": N, "request_bytes": R, "block_bytes": B, "depth": D, "threads": T,
     "overlap": true}

Answers {"seconds": S, "cpu_seconds": C} for one pass over the file with all requests submitted at once. A process of
its own, because its buffers only lie on huge pages if the allocator is told so before the process starts, and so that
its threads and its compiler are nobody else's. The first answer is {"ready": VERSION}, or {"missing": REASON}.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time

ENVIRONMENT = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "DS_ACCELERATOR": "cpu",
    "DS_SKIP_CUDA_CHECK": "1",
}


class DeepSpeed:
    """The worker, from the side of the benchmark. `reason` is empty if it works. A context manager."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, os.path.abspath(__file__)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **ENVIRONMENT},
        )
        answer = self._answer()
        self.version = answer.get("ready", "")
        self.reason = "" if self.version else answer.get("missing", "its process died while it was built")

    def run(self, **order: object) -> tuple[float, float]:
        """(seconds, CPU seconds) of one pass. Raises RuntimeError if it did not move every byte."""
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        answer = self._answer()
        if "seconds" not in answer:
            raise RuntimeError(f"DeepSpeed failed on {order}: {answer}")
        return answer["seconds"], answer["cpu_seconds"]

    def _answer(self) -> dict:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)
        return {}

    def __enter__(self) -> DeepSpeed:
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=60)


def serve() -> None:
    try:
        import deepspeed
        import torch
        from deepspeed.ops.op_builder import AsyncIOBuilder

        aio = AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # not installed, or it does not compile here: both are reasons
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({"ready": deepspeed.__version__}), flush=True)
    buffers: dict[int, torch.Tensor] = {}
    for line in sys.stdin:
        order = json.loads(line)
        handle = aio.aio_handle(order["block_bytes"], order["depth"], False, order["overlap"], order["threads"])
        size = order["request_bytes"]
        if size not in buffers:
            buffers[size] = handle.new_cpu_locked_tensor(size, torch.empty(0, dtype=torch.uint8))
            buffers[size].random_(256)
        start, cpu = time.perf_counter(), time.process_time()
        move = handle.async_pwrite if order["kind"] == "write" else handle.async_pread
        offsets = range(0, order["nbytes"], size)
        failed = sum(move(buffers[size], order["name"], offset) != 0 for offset in offsets)
        completed = handle.wait()
        answer = {"seconds": time.perf_counter() - start, "cpu_seconds": time.process_time() - cpu}
        if failed or completed != len(offsets):
            answer = {"failed": failed, "completed": completed, "wanted": len(offsets)}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    serve()
