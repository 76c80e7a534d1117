"""Two ranks on one machine with states on NVMe, against nothing offloaded, the disk's rate for their bytes, and FSDP2.

    torchrun --nproc-per-node 2 -m tests.benchmarks.ranks_on_nvme DIRECTORY [--pairs 12] [--steps 2] [--micro-batch 4]

Stage 3 over gloo, one core a rank, clipped. The sides take turns: "none" keeps everything in the rank's memory (torch's
fused AdamW), "host" has our kernels in host memory, "nvme" has its states on the disk, each rank in a slab of its own,
and "parameters-nvme" its parameters too; "fsdp2-host", if named, is FSDP2 in memory. The first rank prints JSON: of
each side the median seconds of a step, what a step read, wrote and waited for on each rank, and the ratio to the larger
of "none" and of all bytes at the rate of fio, which reads and writes at once before, in the middle and after; the
geometric mean over rounds with its 95 % interval.
"""

import argparse
import json
import os
import statistics
import tempfile
from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist

from tests.benchmarks.compare import disk_rate
from tests.benchmarks.intervals import mean_ratio
from tests.benchmarks.step_worker import FSDP2, STATS, fsdp2, ours, peak_rss_bytes, turn

SIDES = ("none", "host", "nvme", "parameters-nvme")


def everywhere(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def measure(given: argparse.Namespace, folder: str, stack: ExitStack) -> dict[str, Any]:
    arguments = {"dtype": "bfloat16", "micro_batch": given.micro_batch, "folder": folder} | given.options
    sides = {name: (fsdp2 if name == FSDP2 else ours)({"name": name, **arguments}, stack) for name in given.sides}
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    told: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in sides}
    rates: list[float] = []
    for number in range(given.pairs + 1):  # the first round is for the caches
        if number in (0, (given.pairs + 1) // 2, given.pairs) and dist.get_rank() == 0:
            rates.append(disk_rate(folder))
        for name in list(sides)[:: -1 if number % 2 else 1]:
            dist.barrier()
            answers = everywhere(turn(sides[name], given.steps))
            if number:
                seconds[name].append(max(answer["seconds"] for answer in answers))
                told[name].append(answers)
    if dist.get_rank():
        return {}
    found: dict[str, Any] = {"disk_rates": rates, "peak_rss_bytes": peak_rss_bytes(os.getpid())}
    losses = [[answer["losses"] for answers in told[name] for answer in answers] for name in sides]
    found["equal_losses"] = all(each == losses[-1] for each in losses[1:])  # "none" has torch's own AdamW
    for name in sides:
        kept = [key for key in STATS if key in told[name][0][0]]
        ranks = [
            {key: statistics.median(answers[r][key] for answers in told[name]) for key in kept}
            for r in range(dist.get_world_size())
        ]
        nbytes = sum(rank.get(f"nvme_{way}_bytes", 0) for rank in ranks for way in ("read", "write"))
        bound = [max(each, nbytes / max(rates)) for each in seconds["none"]] if "none" in sides else seconds[name]
        found[name] = {
            "seconds": statistics.median(seconds[name]), "disk_seconds": nbytes / max(rates),
            "ranks": ranks, "to_bound": mean_ratio(seconds[name], bound),
        }  # fmt: skip
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--micro-batch", type=int, default=4)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=[*SIDES, FSDP2])
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of step_worker.py, as JSON")
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=given.directory))
        found = measure(given, folder, stack)
    if found:
        print(json.dumps(found, indent=1), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
