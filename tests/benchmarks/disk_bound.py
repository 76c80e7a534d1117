"""A step with states on NVMe against what bounds it: the step of nothing offloaded, and its bytes at the disk's rate.

    python -m tests.benchmarks.disk_bound DIRECTORY in-backward [--pairs 15] [--steps 2] [--bytes N] [--before CHECKOUT]

Each side is a process of its own (step_worker.py); in every round each takes one turn. `--before` is another version of
the packages, with its native modules built in place, and one more side. The bound L is the larger of two times: the
step of `--base`, with nothing on NVMe ("host" updates with the same kernels as zero-train's offload=none on a CPU), and
`--bytes` (left out: what the step of the version before, or else this one, reads and writes) at the rate of fio. fio
runs before, in the middle and after: a job that reads and one that writes at once, each its own file in blocks of 16
MiB on huge pages; its best run counts. What is printed is JSON, with the ratio of the step to the larger one: the
geometric mean over pairs and its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import tempfile
from typing import Any

from tests.benchmarks.intervals import mean_ratio
from tests.benchmarks.step_worker import STATS
from tests.benchmarks.worker import Worker

MIB = 1 << 20
LARGE = {"dtype": "bfloat16", "micro_batch": 8}  # the 119.6 M Llama
RECIPE = LARGE | {  # zero-train's default recipe
    "micro_batch": 4,
    "length": 192,
    "sizes": {
        "hidden_size": 768, "intermediate_size": 1728, "num_hidden_layers": 4, "num_attention_heads": 12,
        "vocab_size": 256,
    },
}  # fmt: skip
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "clipped": LARGE | {"name": "nvme"},
    "in-backward": LARGE | {"name": "nvme", "in_backward": True, "max_grad_norm": None},
    "recipe": RECIPE | {"name": "parameters-nvme", "planned": True},
}


def disk_rate(folder: str, seconds: int) -> float:
    """Bytes a second that fio reads and writes at once."""
    jobs: list[str] = []
    for kind in ("read", "write"):
        path = os.path.join(folder, f"fio-{kind}")
        if not os.path.exists(path):
            with open(path, "wb", 0) as file:
                for _ in range(64):
                    file.write(os.urandom(16 * MIB))
                os.fsync(file.fileno())
        jobs += [f"--name={kind}", f"--filename={path}", f"--rw={kind}"]
    command = [
        *("fio", "--direct=1", "--ioengine=io_uring", "--iodepth=4", f"--bs={16 * MIB}", f"--size={1024 * MIB}"),
        *("--mem=malloc", "--thread", "--overwrite=1", "--refill_buffers=0", "--time_based", f"--runtime={seconds}"),
        *("--output-format=json", *jobs),
    ]
    environment = {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    found = json.loads(done.stdout[done.stdout.index("{") :])["jobs"]
    return float(sum(job[kind]["bw_bytes"] for job, kind in zip(found, ("read", "write"), strict=True)))


def measure(given: argparse.Namespace, folder: str) -> dict[str, Any]:
    chosen = CONFIGURATIONS[given.configuration] | {"folder": folder} | given.options
    nothing = {key: value for key, value in chosen.items() if key not in ("name", "in_backward", "planned")}
    workers = {"stored": Worker(chosen["name"], chosen), "none": Worker(given.base, nothing)}
    if given.before:
        workers["before"] = Worker(chosen["name"], chosen, checkout=given.before)
    rates: list[float] = []
    try:
        for worker in workers.values():
            if worker.ready().missing:
                raise SystemExit(f"{worker.name} is missing: {worker.missing}")
        names = list(workers)
        for number in range(given.pairs + 1):  # the first round is for the caches
            if number in (0, (given.pairs + 1) // 2, given.pairs):
                rates.append(disk_rate(folder, 3))
            for k in range(len(names)):  # each follows each
                turn = (k if number % 2 else -k) + number // 2
                workers[names[turn % len(names)]].turn(given.steps)
    finally:
        for worker in workers.values():
            worker.close()
    answers = {each: worker.answers[1:] for each, worker in workers.items()}
    seconds = {each: [answer["seconds"] for answer in told] for each, told in answers.items()}
    told = {
        each: {
            key: statistics.median(answer[key] for answer in answers[each])
            for key in (*STATS, "cpu_seconds", "peak_rss_bytes")
        }
        for each in names
        if each != "none"
    }
    nbytes = sum(told["before" if given.before else "stored"][f"nvme_{way}_bytes"] for way in ("read", "write"))
    on_disk = (nbytes if given.bytes is None else given.bytes) / max(rates)
    bound = [max(each, on_disk) for each in seconds["none"]]
    found = {"pairs": given.pairs, "disk_seconds": on_disk, "disk_rates": rates, **told}
    found["seconds"] = {each: statistics.median(values) for each, values in seconds.items()}
    found["to_bound"] = {each: mean_ratio(seconds[each], bound) for each in told}
    if given.before:
        found["to_before"] = mean_ratio(seconds["stored"], seconds["before"])
        losses = [[answer["losses"] for answer in answers[each]] for each in ("stored", "before")]
        found["equal_losses"] = losses[0] == losses[1]
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--bytes", type=float)
    parser.add_argument("--base", default="host", help="host: as zero-train's offload=none; none: torch's optimizer")
    parser.add_argument("--before")
    parser.add_argument("--options", type=json.loads, default={}, help="more arguments of step_worker.py, as JSON")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as inside:
        print(json.dumps(measure(given, inside)))
