"""Peak memory of Llamas with their states on nvme, each run in its own process.

    python -m tests.benchmarks.test_rss [--steps 3] [--json FILE] [--only spared deep]

spared  119.6 M in the machine's own precision. Claim: what the plan puts on nvme leaves memory, at least 60 % of it;
        the rest is slots, arena and allocator. Twice: with the default slots, and with the fewest that it accepts.
deep    119.6 M and 438 M (8 and 32 layers) in bf16, everything on nvme, fewest slots, activations recomputed. Claim: at
        most 1.2 and 1.7 GB; beyond activations and the planned arena nothing grows with depth. Beside it the floor: the
        same model's forward and backward alone, recomputing too.
The peak is VmHWM of the training process, from its metrics.jsonl; it has no children. Needs the packages installed or
on PYTHONPATH.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

SIZES = (
    "model.hidden_size=1024",
    "model.intermediate_size=2816",
    "model.heads=16",
    "model.vocab_size=8192",
    "run.micro_batch=2",
    "data=synthetic",
    "data.sequence_length=256",
    "run.plots=false",
)
FEWEST = ("offload.slots=3",)
EVERYTHING = (
    *("precision=bf16", "offload.activations=recompute", "offload=nvme", "offload.gradients=nvme"),
    *("zero.prefetch_bytes=0", *FEWEST),
)
SHARE = 0.6  # of the bytes on nvme
DEEP_GB = {8: 1.2, 32: 1.7}


def run(folder: Path, layers: int, steps: int, *overrides: str) -> list[dict[str, Any]]:
    """The metrics of a run of `steps` with these overrides."""
    sizes = (*SIZES, f"model.layers={layers}")
    command = [sys.executable, "-m", "zero_train", "recipe=tiny", *sizes, *overrides, f"run.steps={steps}"]
    subprocess.run([*command, f"run.dir={folder}"], check=True, env=environment(), stdout=subprocess.DEVNULL)
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def planned(layers: int, *overrides: str) -> Any:
    """The plan of the run with these overrides."""
    from zero_train.model import dtypes
    from zero_train.run import assemble, planning
    from zero_train.run.ranks import Ranks
    from zero_train.settings import compose as config

    options = ["recipe=tiny", *SIZES, f"model.layers={layers}", *overrides, "run.dir=unused"]
    composed = config.compose(options)
    dtypes.resolve(composed, Ranks().device)
    draft = assemble.draft(composed)
    return planning.make(composed, draft.model, Ranks(), draft.step)


def spared(steps: int) -> dict[str, float]:
    """Bytes of the runs and of the plan, and the share of the planned bytes that left memory."""
    peaks = {}
    with tempfile.TemporaryDirectory(dir=".") as text:
        for name, overrides in (
            ("none", ("offload=none",)),
            ("nvme", ("offload=nvme",)),
            ("nvme_fewest_slots", ("offload=nvme", *FEWEST)),
        ):
            peaks[name] = run(Path(text).absolute() / name, 8, steps, *overrides)[-1]["peak_rss_bytes"]
    there = planned(8, "offload=nvme").total("nvme")
    return {
        **peaks,
        "planned_on_nvme": there,
        "share_saved": (peaks["none"] - peaks["nvme"]) / there,
        "share_saved_fewest_slots": (peaks["none"] - peaks["nvme_fewest_slots"]) / there,
    }


def deep(layers: int, steps: int) -> dict[str, float]:
    """Peak and step time with everything on nvme, the arena that was planned, and the floor."""
    with tempfile.TemporaryDirectory(dir=".") as text:
        metrics = run(Path(text).absolute() / "run", layers, steps, *EVERYTHING)
    floor = subprocess.run(
        [sys.executable, __file__, "--floor", str(layers)], check=True, env=environment(), stdout=subprocess.PIPE
    )
    return {
        "peak_rss_bytes": metrics[-1]["peak_rss_bytes"],
        "peak_rss_bytes_by_step": [line["peak_rss_bytes"] for line in metrics],
        "step_seconds": statistics.median(line["step_seconds"] for line in metrics[1:] or metrics),
        "arena_bytes": metrics[-1]["host_bytes"],
        "planned_activation_bytes": planned(layers, *EVERYTHING).bytes_of("device", "activations"),
        **json.loads(floor.stdout),
    }


def floor(layers: int) -> dict[str, float]:
    """In this process: forward and backward alone, bf16, recomputing; two of them."""
    import time

    import torch

    from zero_train.model import causal_lm
    from zero_train.report import metrics
    from zero_train.run import loop
    from zero_train.settings import compose as config

    options = ["recipe=tiny", *SIZES, f"model.layers={layers}", *EVERYTHING, "run.dir=unused"]
    composed = config.compose(options)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)  # built in bf16: an fp32 model first would be a peak of its own
    model = causal_lm.build(composed.model, composed.data.sequence_length)
    torch.set_default_dtype(default)
    tokens = torch.randint(0, 256, (composed.run.micro_batch, composed.data.sequence_length))
    for _ in range(2):
        begin = time.perf_counter()
        loop.loss_of(model, tokens, tokens).backward()
        seconds = time.perf_counter() - begin
        model.zero_grad()
    return {"floor_rss_bytes": metrics.peak_rss_bytes(), "floor_seconds": seconds}


def test_what_is_on_nvme_is_not_in_memory(benchmark):
    if benchmark.disabled:
        pytest.skip("a benchmark of three processes of up to 3 GB: nox -s bench -- rss")
    measured = benchmark.pedantic(lambda: spared(3), rounds=1)
    assert min(measured["share_saved"], measured["share_saved_fewest_slots"]) >= SHARE


@pytest.mark.parametrize("layers", list(DEEP_GB))
def test_depth_costs_no_memory(benchmark, layers):
    if benchmark.disabled:
        pytest.skip("a benchmark of minutes, 12 GB of nvme: nox -s bench -- rss")
    measured = benchmark.pedantic(lambda: deep(layers, 2), rounds=1)
    assert measured["peak_rss_bytes"] <= DEEP_GB[layers] * 1e9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--only", nargs="+", default=["spared", "deep"], choices=["spared", "deep"])
    parser.add_argument("--layers", type=int, nargs="+", default=list(DEEP_GB))
    parser.add_argument("--floor", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.floor:
        print(json.dumps(floor(arguments.floor)))
        return
    figures: dict[str, Any] = spared(arguments.steps) if "spared" in arguments.only else {}
    for layers in arguments.layers if "deep" in arguments.only else ():
        figures[f"{layers}_layers"] = deep(layers, arguments.steps)
    text = json.dumps(figures, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
