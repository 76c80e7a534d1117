"""A step on one GPU: everything in its memory, everything on the host, and what others make of the host.

    nox -s bench-gpu -- [--json FILE] [--pairs 5] [--folder .]

WRITTEN FOR CUDA AND NOT YET RUN ON A GPU: only the tiny sizes have run, on a CPU (`--tiny`). bf16, activation
checkpointing, exact fp32 states, clipping 1.0. Needs no network: torch with CUDA, a C++ compiler for zero-optim-cpu,
transformers. DeepSpeed (with ninja and nvcc, for its CPUAdam) is left out, with the reason, where it cannot be imported
or started.

Each comparison is two processes that take turns of one untimed and two timed steps (step_worker.py), so both see the
same minutes; only two at a time, because each holds a model's states. Claims (BOUNDS) are of tokens per second: ours
over the other's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.intervals import interval_of_median
from tests.benchmarks.test_step import measured

LLAMA_3B = {"hidden_size": 2560, "intermediate_size": 8960, "num_hidden_layers": 32, "num_attention_heads": 20}
LENGTH = 2048
ROWS = {8192: 4, 32768: 16}  # rows of a step, by its tokens
BOUNDS = {  # least tokens/s of ours over the other's, by tokens of a step
    "none": {8192: 0.6, 32768: 0.90},
    "fsdp2-host": {8192: 2.0, 32768: 2.0},
    "deepspeed-host": {8192: 1.5, 32768: 1.5},
}
TURN = 2  # timed steps


def compared(other: str, tokens: int, options: dict[str, Any], pairs: int) -> dict[str, Any] | None:
    """`host` against another; None where the other cannot run."""
    rounds = [each for each in measured(["host", other], options, pairs, TURN) if other in each and "host" in each]
    if not rounds or any("missing" in each[name] for each in rounds for name in ("host", other)):
        return None
    ratios = [each[other]["seconds"] / each["host"]["seconds"] for each in rounds]

    def median(name: str, key: str) -> float:
        return statistics.median(each[name].get(key, 0.0) for each in rounds)

    return {
        "tokens": tokens,
        "other": other,
        "pairs": len(rounds),
        "ratio": statistics.median(ratios),
        "interval": interval_of_median(ratios),
        "bound": BOUNDS[other][tokens],
        "exposed_seconds": median("host", "exposed_seconds"),
        **{
            f"{key}_{name}": median(name, key)
            for key in ("seconds", "peak_device_bytes", "peak_rss_bytes")
            for name in ("host", other)
        },
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| tokens a step | to | ours, tokens/s | theirs | ratio (95 %) | bound | exposed, s "
        "| peak HBM: ours, theirs, GB | peak RSS: ours, theirs, GB |",
        "|---" * 9 + "|",
    ]
    for each in rows:
        other, (low, high) = each["other"], each["interval"]
        rates = [each["tokens"] / each[f"seconds_{name}"] for name in ("host", other)]
        verdict = "met" if high >= each["bound"] else "**missed**"
        cells = [
            *(str(each["tokens"]), other, *(f"{rate:.0f}" for rate in rates)),
            f"{each['ratio']:.2f} ({low:.2f}-{high:.2f}), {each['pairs']} pairs",
            *(f"{each['bound']:.2f}: {verdict}", f"{each['exposed_seconds']:.2f}"),
        ]
        for key in ("peak_device_bytes", "peak_rss_bytes"):
            cells.append(", ".join(f"{each[f'{key}_{name}'] / 1e9:.1f}" for name in ("host", other)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def run(
    others: list[str], options: dict[str, Any], pairs: int, rows: dict[int, int], save: Callable[[list[Any]], None]
) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for tokens, count in rows.items():
        for other in others:
            print(f"{tokens} tokens: host and {other}", flush=True)
            each = compared(other, tokens, options | {"micro_batch": count}, pairs)
            if each is not None:
                found.append(each)
                save(found)
    return found


def test_the_report_has_its_shape(tmp_path):
    """On the CPU, in small: the program, not the GPU."""
    options = {"tiny": True, "device": "cpu", "dtype": "float32", "folder": str(tmp_path)}
    saved: list[Any] = []
    found = run(["none", "fsdp2-host"], options, 1, {8192: 2}, saved.extend)
    assert [each["other"] for each in found] == ["none"] == [each["other"] for each in saved]  # FSDP2 needs a GPU
    assert found[0]["ratio"] > 0 and found[0]["peak_rss_bytes_host"] > 0
    assert table(found).splitlines()[2].startswith("| 8192 | none | ")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/bench_gpu.json"))
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--folder", default=".")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--others", nargs="+", default=list(BOUNDS), choices=BOUNDS)
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU, to try the program")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; --tiny tries the program on the CPU", file=sys.stderr)
        return 1
    device = {"device": "cpu", "dtype": "float32"} if arguments.tiny else {"device": "cuda", "dtype": "bfloat16"}
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": "cpu" if arguments.tiny else torch.cuda.get_device_name(),
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)

    def save(rows: list[dict[str, Any]]) -> None:
        arguments.json.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        sizes = {"sizes": LLAMA_3B, "length": LENGTH, "checkpointing": True, "tiny": arguments.tiny, "folder": folder}
        rows = {tokens: ROWS[tokens] for tokens in arguments.tokens}
        found = run(arguments.others, sizes | device, arguments.pairs, rows, save)
    print(facts, table(found), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
