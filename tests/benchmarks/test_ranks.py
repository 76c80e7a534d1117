"""One rank against two of the same run, by where the states lie: step time, exposed time, memory of a rank.

    python -m tests.benchmarks.test_ranks [--rounds 3] [--steps 6] [--json FILE] [--tiers host nvme]

The 119.6 M Llama through zero-train, two rows of 256 tokens a step: both on one rank, or one on each of two, which
share the machine's cores and its disk. Every run is processes of its own, one and two ranks in turn. A step's seconds
are the median of a run's lines in metrics.jsonl but the first and the last (which waits for its own update). No claim.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.test_rss import SIZES, environment

RANKS = (1, 2)
TIERS = ("host", "nvme")
ROWS = 2  # of 256 tokens, on all ranks together


def run(folder: Path, ranks: int, steps: int, *overrides: str) -> dict[str, float]:
    """Medians of one run."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    sizes = [each for each in SIZES if not each.startswith("run.micro_batch")] + [f"run.micro_batch={ROWS // ranks}"]
    wanted = ["recipe=tiny", *sizes, "model.layers=8", *overrides, f"run.steps={steps}", f"run.dir={folder}"]
    command = [sys.executable, *launch, "-m", "zero_train", *wanted]
    subprocess.run(command, check=True, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    inner = lines[1:-1]
    return {
        "seconds": statistics.median(line["step_seconds"] for line in inner),
        "exposed_seconds": statistics.median(line["exposed_seconds"] for line in inner),
        "peak_rss_bytes": lines[-1]["peak_rss_bytes"],
        "loss": lines[-1]["loss"],
    }


def measure(rounds: int, steps: int, tiers: tuple[str, ...], *overrides: str) -> dict[str, list[dict[str, float]]]:
    """By "tier@ranks", one entry a round."""
    found: dict[str, list[dict[str, float]]] = {f"{tier}@{ranks}": [] for tier in tiers for ranks in RANKS}
    for number in range(rounds):
        for tier in tiers:
            for ranks in RANKS:
                with tempfile.TemporaryDirectory(dir=".") as text:
                    each = run(Path(text).absolute() / "run", ranks, steps, f"offload={tier}", *overrides)
                found[f"{tier}@{ranks}"].append(each)
                print(f"  {number + 1}/{rounds} {tier}, ranks {ranks}: {each}", flush=True)
    return found


def table(found: dict[str, list[dict[str, float]]]) -> str:
    rows = [
        "| states on | ranks | step, s (range) | to one rank | exposed, s | peak RSS of rank 0, GB |",
        "|---" * 6 + "|",
    ]
    for key, each in found.items():
        tier, ranks = key.split("@")
        seconds = [one["seconds"] for one in each]
        ratio = statistics.median(a / one["seconds"] for a, one in zip(seconds, found[f"{tier}@1"], strict=True))
        exposed = statistics.median(one["exposed_seconds"] for one in each)
        cells = [
            *(tier, ranks, f"{statistics.median(seconds):.2f} ({min(seconds):.2f}-{max(seconds):.2f})"),
            *(f"{ratio:.2f}", f"{exposed:.2f}", f"{max(one['peak_rss_bytes'] for one in each) / 1e9:.2f}"),
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def test_two_ranks_take_the_same_steps(benchmark):
    if benchmark.disabled:
        pytest.skip("a benchmark of four runs of the 119.6 M Llama: nox -s bench -- ranks")
    found = benchmark.pedantic(lambda: measure(1, 3, TIERS), rounds=1)
    for tier in TIERS:
        one, two = (found[f"{tier}@{ranks}"][0]["loss"] for ranks in RANKS)
        assert abs(one - two) <= 1e-3 * abs(one)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tiers", nargs="+", default=list(TIERS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    found: dict[str, Any] = measure(arguments.rounds, arguments.steps, tuple(arguments.tiers))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    print(table(found))


if __name__ == "__main__":
    main()
