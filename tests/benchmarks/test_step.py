"""A training step by where its states lie, against no offload, against the least possible and against DeepSpeed.

    python -m tests.benchmarks.test_step --json FILE [--micro-batch 2 8] [--pairs 7] [--configurations host nvme …]
    python -m tests.benchmarks.test_step --json FILE --table

Each configuration is a process of its own (step_worker.py). All that are named stay alive, as far as memory goes, and
take turns in an order that rotates, so what a pair has in common is the machine's speed in those seconds. A ratio
is to the smaller of `none` (no offload) and `floor` (forward and backward alone, plus one pass of CpuStep over as many
elements); beside its median stands the 95 % interval of the median, from order statistics. FILE keeps every
round, and a later run adds to them, so that one may be cut in slices; --table prints it as Markdown.

Claims (BOUNDS): a bound is met where the interval reaches it. Misses are printed as misses. Under `pytest
--benchmark-enable` a smaller model takes steps in each tier, to show a change; with --benchmark-disable one step.
"""

import argparse
import json
import platform
import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.benchmarks import step_worker
from tests.benchmarks.intervals import interval_of_median
from tests.benchmarks.step_model import model_of
from tests.benchmarks.worker import Worker

BOUNDS = {  # of the ratio, by micro-batch
    "host": {2: 1.03, 8: 1.03},
    "nvme": {2: 1.15, 8: 1.03},
    "nvme-fewest-slots": {2: 1.40, 8: 1.10},
    "nvme-8bit": {2: 1.08},
    "parameters-nvme": {2: 1.50, 8: 1.10},
}
PEERS = {"host": "deepspeed-host", "nvme": "deepspeed-nvme", "everything-nvme": "deepspeed-everything-nvme"}
PEER_BOUNDS = {2: 0.45, 8: 0.65}  # of the peer's step time
PEER_RSS = 0.35  # of the peer's peak, at micro-batch 2
PREDICTION = 0.2


Round = dict[str, dict[str, Any]]  # what each process said of its turn, by name


def measured(names: list[str], options: dict[str, Any], pairs: int, count: int) -> Iterator[Round]:
    """Rounds, but the first, which is for the caches."""
    workers: list[Worker] = []
    try:
        workers = [Worker(each, options) for each in names]
        for worker in workers:
            if worker.ready().missing:
                print(f"{worker.name} is left out: {worker.missing}", flush=True)
        there = [worker for worker in workers if not worker.missing]
        for number in range(pairs + 1):
            for k in range(len(there)):
                there[(k + number) % len(there)].turn(count)
            last = {worker.name: round(worker.answers[-1]["seconds"], 3) for worker in there}
            print(f"  {number}/{pairs} {last}", flush=True)
            if number:
                yield {worker.name: worker.answers[-1] for worker in there}
    finally:
        for worker in workers:
            worker.close()


def compared(numerator: list[float], denominator: list[float]) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(numerator, denominator, strict=True)]
    return {"ratio": statistics.median(ratios), "interval": interval_of_median(ratios)}


def row(name: str, rounds: list[Round]) -> dict[str, Any]:
    """What the table says of one configuration."""

    def seconds(which: str, *keys: str) -> list[float]:
        return [sum(each[which][key] for key in keys) for each in rounds if which in each]

    def peaks(which: str) -> list[int]:
        return [each[which]["peak_rss_bytes"] for each in rounds if which in each]

    bases = {"none": seconds("none", "seconds"), "floor + CpuStep": seconds("floor", "seconds", "extra_seconds")}
    base = min(bases, key=lambda each: statistics.median(bases[each]))
    mine = seconds(name, "seconds")
    found = {
        "seconds": statistics.median(mine),
        "base": base,
        "base_seconds": statistics.median(bases[base]),
        "floor_seconds": statistics.median(seconds("floor", "seconds")),
        "cpu_step_seconds": statistics.median(seconds("floor", "extra_seconds")),
        "none_seconds": statistics.median(bases["none"]),
        **compared(mine, bases[base]),
        "exposed_seconds": statistics.median(seconds(name, "exposed_seconds")),
        "peak_rss_bytes": max(peaks(name)),
        "none_peak_rss_bytes": max(peaks("none")),
        "pairs": len(mine),
    }
    if peer := [each for each in rounds if PEERS.get(name) in each]:
        theirs = [each[PEERS[name]]["seconds"] for each in peer]
        found["peer"] = compared([each[name]["seconds"] for each in peer], theirs) | {
            "seconds": statistics.median(theirs),
            "peak_rss_bytes": max(peaks(PEERS[name])),
            "pairs": len(peer),
        }
    return found


def predicted(name: str, options: dict[str, Any], probed: dict[str, Any], floor_seconds: float) -> float | None:
    """The planner's step time. Its TFLOP/s are those of the floor: of this model, not of the probe's block."""
    import zero_offload
    import zero_optim_cpu

    sizes, tokens = sizes_of(options["micro_batch"], options["tiny"])
    tflops = 6 * sizes.compute_numel * tokens / floor_seconds / 1e12
    placed, layout, slots, prefetch_bytes = step_worker.choices(name)
    step = zero_optim_cpu.CpuStep(layout=layout)
    step.bind(torch.optim.AdamW([torch.zeros(1)]))
    return zero_offload.plan(
        sizes, zero_offload.Hardware(**probed | {"tflops": tflops}), **placed, activations="keep", step=step,
        parameter_dtype=getattr(torch, options["dtype"]), slots=slots, prefetch_bytes=prefetch_bytes, tokens=tokens,
    ).step_seconds  # fmt: skip


@cache
def sizes_of(micro_batch: int, tiny: bool) -> tuple[Any, int]:
    """What the planner knows of the model, and tokens of a step."""
    import zero_offload

    model, batch = model_of({"micro_batch": micro_batch, "tiny": tiny})
    return zero_offload.ModelSizes.of(model), batch.tokens.numel()


def probe(folder: str, options: dict[str, Any]) -> dict[str, Any]:
    import zero_nvme
    import zero_offload
    import zero_optim_cpu

    dtype = getattr(torch, options["dtype"])
    with tempfile.TemporaryDirectory(dir=folder) as inside, zero_nvme.Slab([inside]) as slab:
        step = zero_optim_cpu.CpuStep()
        found = dict(zero_offload.probe(nvme=slab, step=step, parameter_dtype=dtype).to_dict())
    return found | {"nvme_gib": shutil.disk_usage(folder).free / (1 << 30)}  # as the slab has left it again


def verdicts(key: str, each: dict[str, Any]) -> list[str]:
    """What is claimed of a row, and whether it holds."""
    name, micro_batch = key.split("@")[0], int(key.split("@")[1])
    said = []

    def claim(what: str, value: float, bound: float) -> None:
        said.append(f"{what} ≤ {bound:g}: {'met' if value <= bound else 'MISSED'}")

    if (bound := BOUNDS.get(name, {}).get(micro_batch)) is not None:
        claim("ratio", each["interval"][0], bound)
    if "peer" in each:
        claim("of DeepSpeed", each["peer"]["interval"][0], PEER_BOUNDS.get(micro_batch, 1.0))
        if micro_batch == 2:
            claim("of its RSS", each["peak_rss_bytes"] / each["peer"]["peak_rss_bytes"], PEER_RSS)
    if each.get("predicted_seconds"):
        claim("prediction off by", abs(each["predicted_seconds"] / each["seconds"] - 1), PREDICTION)
    return said


def table(results: dict[str, Any]) -> str:
    lines = [
        "| configuration | micro-batch | step, s | ratio (95 %) | to | exposed, s | predicted, s | peak RSS, GB "
        "| DeepSpeed: step, s; ours to it; RSS, GB | bounds |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for key, each in results["rows"].items():
        name, micro_batch = key.split("@")[:2]
        low, high = each["interval"]
        peer = "-"
        if "peer" in each:
            theirs = each["peer"]
            peer = f"{theirs['seconds']:.2f}; {theirs['ratio']:.2f}; {theirs['peak_rss_bytes'] / 1e9:.1f}"
        guess = f"{each['predicted_seconds']:.2f}" if each.get("predicted_seconds") else "-"
        lines.append(
            f"| {name} | {micro_batch} | {each['seconds']:.2f} | {each['ratio']:.3f} ({low:.3f}-{high:.3f}) "
            f"| {each['base']} {each['base_seconds']:.2f} | {each['exposed_seconds']:.2f} | {guess} "
            f"| {each['peak_rss_bytes'] / 1e9:.2f} | {peer} | {'; '.join(verdicts(key, each)) or '-'} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[2, 8])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=1, help="timed steps of a turn")
    parser.add_argument("--configurations", nargs="+", default=list(step_worker.TIERS), choices=step_worker.TIERS)
    parser.add_argument("--dtype", default="float32", help="of parameters and compute: bf16 only where the CPU has it")
    parser.add_argument("--folder", default=".", help="where the slabs lie")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--table", action="store_true", help="print what FILE holds, and measure nothing")
    arguments = parser.parse_args()
    results: dict[str, Any] = {"rounds": {}, "rows": {}}
    if arguments.json.exists():
        results |= json.loads(arguments.json.read_text())
    if not arguments.table:
        options = {"dtype": arguments.dtype, "folder": str(Path(arguments.folder).absolute()), "tiny": arguments.tiny}
        results |= {"torch": torch.__version__, "machine": platform.processor(), "date": time.strftime("%Y-%m-%d")}
        results["hardware"] = probed = probe(arguments.folder, options)
        for micro_batch in arguments.micro_batch:
            options["micro_batch"] = micro_batch
            peers = [] if arguments.no_peers else [PEERS[name] for name in arguments.configurations if name in PEERS]
            names = ["none", "floor", *arguments.configurations, *peers]
            print(f"micro-batch {micro_batch}: {', '.join(names)}", flush=True)
            for each in measured(names, options, arguments.pairs, arguments.steps):
                for name in arguments.configurations:
                    wanted = ("none", "floor", name, PEERS.get(name))
                    rounds = results["rounds"].setdefault(f"{name}@{micro_batch}", [])
                    rounds.append({key: said for key, said in each.items() if key in wanted})
                    found = row(name, rounds)
                    found["predicted_seconds"] = predicted(name, options, probed, found["floor_seconds"])
                    results["rows"][f"{name}@{micro_batch}"] = found
                arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


@pytest.mark.parametrize("tier", ["none", "host", "nvme"])
def test_step(benchmark, tier):
    from contextlib import ExitStack

    with tempfile.TemporaryDirectory(dir=".") as folder, ExitStack() as stack:  # beside the sources: /tmp may be memory
        options = {"name": tier, "micro_batch": 2, "folder": folder, "tiny": benchmark.disabled}
        parts = step_worker.ours(options, stack)
        benchmark.pedantic(parts["step"], rounds=10, warmup_rounds=2)


if __name__ == "__main__":
    main()
