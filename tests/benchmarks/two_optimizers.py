"""AdamW and Muon through zero-train, each with the rates that were best of as many trials: losses on held-out bytes.

    python -m tests.benchmarks.two_optimizers DIRECTORY --picture docs/muon.png --orthogonal float32

A Llama of 0.9 M parameters learns the standard library's source files, byte by byte. AdamW has one rate and is given
eight; Muon has one for matrices and one for the rest, and is given four of the one with two of the other. Trials have
seed 0; the best of each is then run with the seeds that follow. All of it is `zero-train` with overrides, states in
host memory. What is printed is one JSON line a run: the rates, the losses by step, and the seconds of a step.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

COMMON = [
    "recipe=tiny", "offload=host", "model.hidden_size=128", "model.intermediate_size=352", "model.layers=4",
    "model.heads=4", "data.sequence_length=128", "run.micro_batch=8", "run.evaluate_batches=16", "run.plots=false",
    "run.report_every=1000", "run.sample_bytes=0", "run.bar=false",
]  # fmt: skip
TRIALS: dict[str, list[dict[str, float]]] = {
    "adamw": [{"lr": rate} for rate in (3e-4, 6e-4, 1e-3, 2e-3, 3e-3, 4e-3, 6e-3, 1e-2)],
    "muon": [{"matrix_lr": m, "lr": rate} for m in (0.01, 0.02, 0.04, 0.08) for rate in (2e-3, 6e-3)],
}


def run(
    folder: Path, kind: str, rates: dict[str, float], seed: int, steps: int, orthogonal: list[str]
) -> dict[str, Any]:
    """One run of zero-train, of which what is found is kept in `folder`: a run that is there is not made again."""
    own = folder / "-".join([kind, *(f"{value:g}" for value in rates.values()), str(seed), str(steps), *orthogonal])
    if not own.exists():
        begun = own.with_name(f"{own.name}.part")
        shutil.rmtree(begun, ignore_errors=True)  # of a run that was killed
        given = [f"optim={kind}", *(f"optim.{name}={value}" for name, value in rates.items())]
        given += [f"optim.orthogonal={each}" for each in orthogonal]
        given += [f"run.seed={seed}", f"run.steps={steps}", f"run.evaluate_every={steps // 6}", f"run.dir={begun}"]
        subprocess.run([sys.executable, "-m", "zero_train", *COMMON, *given], check=True, stdout=subprocess.DEVNULL)
        begun.rename(own)
    losses = {row["step"]: row["loss"] for row in map(json.loads, (own / "validation.jsonl").open())}
    seconds = statistics.median(row["step_seconds"] for row in map(json.loads, (own / "metrics.jsonl").open()))
    return {"optimizer": kind, **rates, "seed": seed, "losses": losses, "step_seconds": seconds}


def draw(found: list[dict[str, Any]], path: str) -> None:
    """The losses of the chosen runs, and the last losses of all trials."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    curves, trials = figure.subplots(1, 2)
    colours = {"adamw": "tab:blue", "muon": "tab:orange"}
    for kind, colour in colours.items():
        for row in (row for row in found if row["optimizer"] == kind and row["chosen"]):
            steps = list(row["losses"])[1:]
            label = f"{kind}, {len([r for r in found if r['optimizer'] == kind and r['chosen']])} seeds"
            curves.plot(
                steps, [row["losses"][step] for step in steps], color=colour, label=label if not row["seed"] else None
            )
        of = [row for row in found if row["optimizer"] == kind and not row["seed"]]
        name = "matrix_lr" if kind == "muon" else "lr"
        trials.scatter(
            [row[name] for row in of], [list(row["losses"].values())[-1] for row in of], color=colour, label=kind
        )
    curves.set(xlabel="step", ylabel="loss on held-out bytes, nats", title="with the best rates")
    trials.set(xlabel="rate (Muon: of matrices)", title="last loss of each trial", xscale="log")
    for axes in (curves, trials):
        axes.legend()
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--orthogonal", choices=["bfloat16", "float32"], default="bfloat16", help="of Muon's matrices")
    parser.add_argument("--picture", default="")
    given = parser.parse_args()
    found = []
    for kind, trials in TRIALS.items():
        also = [given.orthogonal] if kind == "muon" else []
        made = [run(given.directory, kind, rates, 0, given.steps, also) for rates in trials]
        best = min(range(len(made)), key=lambda k: list(made[k]["losses"].values())[-1])
        made += [run(given.directory, kind, trials[best], seed, given.steps, also) for seed in range(1, given.seeds)]
        for k, row in enumerate(made):
            row["chosen"] = k == best or k >= len(trials)
            print(json.dumps(row), flush=True)
        found += made
    if given.picture:
        draw(found, given.picture)


if __name__ == "__main__":
    main()
