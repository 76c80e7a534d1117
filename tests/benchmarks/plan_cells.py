"""zero-train, planned beside measured: 16 cells of placement, precision and batch.

    python -m tests.benchmarks.plan_cells [--json FILE] [--precisions fp32 bf16] [--rounds 3]

The machine is probed once for each precision. Then each cell is trained by a process of its own, and placements take
turns, so that each has a run with `offload=none` in the same round. Run it where nothing else runs.

    bytes    on each tier, and written to nvme: the run's own counters, equal to the plan's. It may read less than
             the plan, which counts on no unit that is still in its slot since the step before
    RSS      peak (VmHWM) less libraries, within the larger of 15 % and 0.15 GB of what the plan puts into memory.
             Libraries are what a tiny model's run with the same placement and precision has beyond its own plan
    ratio    a step to that of `offload=none`, the median of rounds, within 20 % of the planned ratio. A run's step is
             the median of its steps but the first and the last, which waits for its own update
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.test_rss import environment

MODEL = ("hidden_size=512", "intermediate_size=1408", "heads=8", "layers=6")
COMMON = (*("recipe=tiny", "data=synthetic", "data.sequence_length=128", "run.plots=false"),)
PLACEMENTS = {
    "none": ("offload=none",),
    "host": ("offload=host",),
    "states": ("offload=host", "offload.optimizer=nvme"),
    "nvme": ("offload=nvme", "offload.gradients=nvme"),
}
BATCHES = {"fp32": (4, 16), "bf16": (1, 2)}  # rows of 128 tokens; bf16 is slow without arithmetic of its own
MOVED = ("nvme_read_bytes", "nvme_write_bytes")
STEPS = {"fp32": 8, "bf16": 4}
RSS_SHARE, RSS_BYTES, RATIO = 0.15, 0.15e9, 0.2


def words(placement: str, precision: str, batch: int, tiny: bool = False) -> list[str]:
    """The command line of a cell, or of the tiny model in its place."""
    sizes = [] if tiny else [f"model.{each}" for each in MODEL]
    cell = [f"precision={precision}", f"run.micro_batch={batch}", *PLACEMENTS[placement]]
    return [*COMMON, *sizes, *cell]


def trained(folder: Path, steps: int, options: list[str]) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl of one run."""
    command = [sys.executable, "-m", "zero_train", *options, f"run.steps={steps}", f"run.dir={folder}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(options)}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def probed(folder: Path, precision: str) -> dict[str, Any]:
    """The hardware that run.probe=true prints."""
    from omegaconf import OmegaConf

    options = [*words("nvme", precision, BATCHES[precision][-1]), "run.probe=true", f"run.dir={folder}"]
    command = [sys.executable, "-m", "zero_train", *options]
    done = subprocess.run(command, env=environment(), stdout=subprocess.PIPE, text=True, check=True)
    return dict(OmegaConf.to_container(OmegaConf.create(done.stdout)))


def planned(options: list[str], hardware: dict[str, Any]) -> Any:
    """The plan of a run on the probed machine."""
    from zero_train import config, engine, formats, planning
    from zero_train.ranks import Ranks

    composed = config.compose([*options, "run.dir=unused"])
    for key, value in hardware.items():
        setattr(composed.hardware, key, value)
    formats.resolve(composed, Ranks().device)
    draft = engine.draft(composed)
    return planning.make(composed, draft.model, Ranks(), draft.step)


def in_memory(plan: Any) -> int:
    """Bytes that the plan puts into the memory of the host."""
    return int(plan.total("device") + plan.total("host"))


def tiers(plan: Any, steps: int) -> dict[str, int]:
    """What the counters of a run must say: what is held after it, and what it has moved."""
    from zero_offload.tiles.footprint import STATE_KINDS

    device = sum(plan.bytes_of("device", kind) for kind in STATE_KINDS)
    return {
        "device_bytes": device,
        "host_bytes": plan.store.arena_bytes - device,
        "nvme_bytes": plan.store.extent_bytes("nvme"),
        "nvme_read_bytes": plan.read_bytes_per_step * steps,
        "nvme_write_bytes": plan.write_bytes_per_step * steps,
    }


def seconds(lines: list[dict[str, Any]]) -> float:
    return statistics.median(line["step_seconds"] for line in lines[1:-1])


def group(folder: Path, precision: str, batch: int, rounds: int, hardware: dict[str, Any]) -> list[dict[str, Any]]:
    """The four cells of a precision and a batch."""
    runs: dict[str, list[list[dict[str, Any]]]] = {name: [] for name in PLACEMENTS}
    for number in range(rounds):
        for name in PLACEMENTS if number % 2 == 0 else reversed(PLACEMENTS):
            place = folder / f"{precision}_{batch}_{name}_{number}"
            runs[name].append(trained(place, STEPS[precision], words(name, precision, batch)))
            print(f"  {precision}, {batch} rows, {name}: {seconds(runs[name][-1]):.3f} s a step", flush=True)
    base = planned(words("none", precision, batch), hardware)
    found = []
    for name, each in runs.items():
        tiny = words(name, precision, 1, tiny=True)
        plan, small = planned(words(name, precision, batch), hardware), planned(tiny, hardware)
        libraries = trained(folder / f"{precision}_{batch}_{name}_tiny", 3, tiny)[-1]["peak_rss_bytes"] - in_memory(
            small
        )
        peak = max(lines[-1]["peak_rss_bytes"] for lines in each) - libraries
        ratio = statistics.median(seconds(a) / seconds(b) for a, b in zip(each, runs["none"], strict=True))
        wanted = tiers(plan, STEPS[precision])
        moved = {key: sum(line[key] for line in each[0]) for key in wanted if key in MOVED}
        counted = {key: each[0][-1][key] for key in wanted} | moved
        row = {
            "placement": name,
            "precision": precision,
            "rows": batch,
            "planned_bytes": wanted,
            "bytes": counted,
            "planned_rss": in_memory(plan),
            "rss": peak,
            "planned_seconds": plan.step_seconds,
            "seconds": statistics.median(map(seconds, each)),
            "planned_ratio": plan.step_seconds / base.step_seconds,
            "ratio": ratio,
        }
        read = counted["nvme_read_bytes"] / max(1, wanted["nvme_read_bytes"])
        row["exact"] = read <= 1 and counted == wanted | {"nvme_read_bytes": counted["nvme_read_bytes"]}
        row["read"] = read
        row["rss_within"] = abs(peak - row["planned_rss"]) <= max(RSS_SHARE * row["planned_rss"], RSS_BYTES)
        row["ratio_within"] = abs(ratio / row["planned_ratio"] - 1) <= RATIO
        found.append(row)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| placement | precision | rows | bytes on tiers, and written | read, of the plan's "
        "| memory planned, peak RSS less libraries, GB | step planned, measured, s | to `none` planned, measured |",
        "|---" * 8 + "|",
    ]
    for row in rows:
        marks = ["" if row[key] else " (missed)" for key in ("rss_within", "ratio_within")]
        moved = f"{'exact' if row['exact'] else 'differ'} | {row['read']:.2f}"
        lines.append(
            f"| {row['placement']} | {row['precision']} | {row['rows']} | {moved} "
            f"| {row['planned_rss'] / 1e9:.2f}, {row['rss'] / 1e9:.2f}{marks[0]} "
            f"| {row['planned_seconds']:.3g}, {row['seconds']:.3g} "
            f"| {row['planned_ratio']:.2f}, {row['ratio']:.2f}{marks[1]} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precisions", nargs="+", default=list(BATCHES), choices=list(BATCHES))
    parser.add_argument("--rounds", type=int, default=3, help="of fp32; bf16 has one")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    machines = {}
    with tempfile.TemporaryDirectory(dir=".") as text:
        folder = Path(text).absolute()
        for precision in arguments.precisions:
            machines[precision] = probed(folder / f"probe_{precision}", precision)
            print(f"probed for {precision}: {machines[precision]}", flush=True)
            for batch in BATCHES[precision]:
                rounds = arguments.rounds if precision == "fp32" else 1
                rows += group(folder, precision, batch, rounds, machines[precision])
    if arguments.json:
        arguments.json.write_text(json.dumps({"hardware": machines, "cells": rows}, indent=1) + "\n")
    print(table(rows))
    for row in rows:
        if not row["exact"]:
            print(f"{row['placement']}, {row['precision']}, {row['rows']} rows: {row['planned_bytes']}, {row['bytes']}")


if __name__ == "__main__":
    main()
