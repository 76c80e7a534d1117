"""A step with nothing offloaded against one with everything on the host, through zero-train on a CPU.

    python -m tests.benchmarks.offload_none [--rounds 5] [--steps 10] [--before FOLDER]

Each run is a process: the 103 M Llama of hidden size 1024, bf16 where the CPU has it, micro-batch 2 of 256 bytes, exact
clipping. Runs alternate; a run's figure is the median of its steps but the first three. `--before` names a checkout of
another version, with its native modules built in place, whose two runs then take turns with these.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = ["model.hidden_size=1024", "model.intermediate_size=2816", "model.layers=8", "model.heads=16"]
RUN = ["run.micro_batch=2", "data.sequence_length=256", "run.evaluate_every=0", "run.sample_bytes=0"]


def median_seconds(tree: Path, offload: str, steps: int) -> float:
    """Of the steps of one run of zero-train, from the sources in `tree`."""
    sources = os.pathsep.join(str(folder) for folder in sorted(tree.glob("packages/*/src")))
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "zero_train", f"offload={offload}", *MODEL, *RUN, f"run.steps={steps}"]
        done = subprocess.run(
            [*command, f"run.dir={folder}/run"],
            env={**os.environ, "PYTHONPATH": sources},
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise SystemExit(f"{tree}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
        lines = (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()
    return statistics.median([json.loads(line)["step_seconds"] for line in lines][3:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--before", type=Path)
    options = parser.parse_args()
    trees = {"now": Path(__file__).parents[2], **({"before": options.before.resolve()} if options.before else {})}
    seconds: dict[tuple[str, str], list[float]] = {}
    for number in range(options.rounds):
        for when, tree in trees.items():
            for offload in ("none", "host") if number % 2 else ("host", "none"):
                seconds.setdefault((when, offload), []).append(median_seconds(tree, offload, options.steps))
                print(when, offload, f"{seconds[when, offload][-1]:.3f} s", flush=True)
    for when in trees:
        ratios = [a / b for a, b in zip(seconds[when, "none"], seconds[when, "host"], strict=True)]
        none, host = (statistics.median(seconds[when, offload]) for offload in ("none", "host"))
        print(
            f"{when}: none {none:.3f} s, host {host:.3f} s, none / host {statistics.median(ratios):.3f} "
            f"({min(ratios):.3f} to {max(ratios):.3f} over {len(ratios)} pairs)"
        )


if __name__ == "__main__":
    main()
