"""Peak RSS of a 119.6 M Llama with everything on the device and with its states on nvme, each in its own process.

    python tests/benchmarks/test_rss.py [--steps 3] [--json FILE]

Claim: what the plan puts on nvme leaves memory, at least 60 % of it; the rest is slots, arena and allocator. Twice:
with the default slots, a quarter of the state bytes, and with the fewest that it accepts. The peak is VmHWM of the
training process, from its metrics.jsonl. Needs the packages installed or on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

SIZES = (
    "model.hidden_size=1024",
    "model.intermediate_size=2816",
    "model.layers=8",
    "model.heads=16",
    "model.vocab_size=8192",
    "run.micro_batch=2",
    "data=synthetic",
    "data.sequence_length=256",
    "run.plots=false",
)
FEWEST = ("offload.slots=3",)
SHARE = 0.6  # of the bytes on nvme


def peak_rss_bytes(folder: Path, steps: int, *overrides: str) -> int:
    """VmHWM of a run of `steps` with these overrides."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "zero_train", "recipe=tiny", *SIZES, *overrides, f"run.steps={steps}"]
    subprocess.run([*command, f"run.dir={folder}"], check=True, env=environment, stdout=subprocess.DEVNULL)
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["peak_rss_bytes"]


def planned_nvme_bytes() -> int:
    """What the plan of the nvme run puts there."""
    from zero_train import config, engine, formats, planning
    from zero_train.ranks import Ranks

    composed = config.compose(["recipe=tiny", *SIZES, "offload=nvme", "run.dir=unused"])
    formats.resolve(composed, Ranks().device)
    draft = engine.draft(composed)
    return planning.make(composed, draft.model, Ranks(), draft.step).total("nvme")


def measure(steps: int = 3) -> dict[str, float]:
    """Bytes of the runs and of the plan, and the share of the planned bytes that left memory."""
    with tempfile.TemporaryDirectory(dir=".") as text:
        folder = Path(text).absolute()
        none = peak_rss_bytes(folder / "none", steps, "offload=none")
        nvme = peak_rss_bytes(folder / "nvme", steps, "offload=nvme")
        fewest = peak_rss_bytes(folder / "fewest", steps, "offload=nvme", *FEWEST)
    planned = planned_nvme_bytes()
    return {
        "none": none,
        "nvme": nvme,
        "nvme_fewest_slots": fewest,
        "planned_on_nvme": planned,
        "share_saved": (none - nvme) / planned,
        "share_saved_fewest_slots": (none - fewest) / planned,
    }


def test_what_is_on_nvme_is_not_in_memory(benchmark):
    if benchmark.disabled:
        pytest.skip("a benchmark of three processes of up to 3 GB: nox -s bench -- rss")
    measured = benchmark.pedantic(measure, rounds=1)
    assert min(measured["share_saved"], measured["share_saved_fewest_slots"]) >= SHARE


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    figures = json.dumps(measure(arguments.steps), indent=1)
    print(figures)
    if arguments.json:
        arguments.json.write_text(figures + "\n")
