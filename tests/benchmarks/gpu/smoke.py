"""Losses of five steps of the 119.6 M Llama: nothing offloaded, on the host, states on nvme.

Kernels are deterministic here, and attention is written out in torch: the backward of cuDNN's adds in another order
each time, whatever torch is asked for. The host's run is repeated, which shows whether they were.
"""

import os
from contextlib import ExitStack
from typing import Any

from tests.benchmarks.gpu.stage import Piece
from tests.benchmarks.gpu.tables import worker_options

NAMES = ("none", "host", "nvme", "host again")
ROWS, LENGTH = 4, 512
STEPS = 5
NEAR = 1e-2  # of a loss: the device's update rounds in another order than the host's


def run(piece: Piece) -> None:
    options = worker_options(piece) | {"sizes": {}, "length": LENGTH, "micro_batch": ROWS}
    every = os.sched_getaffinity(0)
    for name in NAMES:
        os.sched_setaffinity(0, every)  # the one before bound this process to a part of them
        piece.attempt(name, lambda name=name: steps(options | {"name": name.split()[0]}))
    losses = {name: piece.found[name].get("losses", []) for name in NAMES}
    if piece.failed:
        return
    same = losses["host"] == losses["nvme"]
    near = all(abs(a - b) <= NEAR * abs(b) for a, b in zip(losses["host"], losses["none"], strict=True))
    repeated = losses["host"] == losses["host again"]
    piece.keep(host_equals_nvme=same, host_equals_itself=repeated, host_near_none=near)
    piece.failed += [] if repeated else ["host has different losses when it is repeated: a kernel is not deterministic"]
    piece.failed += [] if same else ["host and nvme have different losses"]
    piece.failed += [] if near else [f"a loss of host is more than {NEAR:.0%} from that of none"]


def steps(options: dict[str, Any]) -> dict[str, Any]:
    import torch

    from tests.benchmarks import step_worker

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with ExitStack() as stack:
        parts = step_worker.ours(options | {"attention": "eager"}, stack)
        losses = [parts["step"]() for _ in range(STEPS)]
        parts.get("wait", lambda: None)()
        return {"losses": [loss.item() for loss in losses]}
