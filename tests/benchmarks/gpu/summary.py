"""Makes summary.md, the picture and the archive of whatever results there are. Measures nothing, waits for nothing."""

import json
import tarfile
from pathlib import Path
from typing import Any

from tests.benchmarks import trace
from tests.benchmarks.gpu import tables
from tests.benchmarks.gpu.stage import read
from tests.tables import markdown

MOST_BYTES = 16 << 20  # of a file in the archive: a trace may have more


def make(out: Path) -> None:
    """OUT/summary.md, timeline.png beside it, and OUT.tar.gz. What fails leaves the reason in the summary."""
    results = read(out / "results.json")
    notes = _drawn(out, results["pieces"].get("timeline", {}))
    large = [path.name for path in sorted(out.iterdir()) if path.stat().st_size > MOST_BYTES]
    notes += [f"{name} is larger than {MOST_BYTES >> 20} MiB, so the archive leaves it out" for name in large]
    try:
        told = text(results, notes)
    except Exception as error:  # what was found is to be sent back in any case, and other stages are to run
        told = f"# No summary\n\n{type(error).__name__}: {error}. The figures are in results.json.\n"
    (out / "summary.md").write_text(told)
    new = out.with_name(f"{out.name}.new")
    with tarfile.open(new, "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if path.name not in large:
                archive.add(path, f"{out.name}/{path.name}")
    new.replace(out.with_name(f"{out.name}.tar.gz"))


def text(results: dict[str, Any], notes: list[str]) -> str:
    """The summary in Markdown."""
    pieces = results["pieces"]
    title = "Toy sizes on a CPU" if results["dry"] else "A GPU"
    ended = [
        [name, record["told"].replace("|", "/"), f"{record['seconds']:.0f}", record["date"]]
        for name, record in results["stages"].items()
    ]
    lines = [f"# {title}", "", markdown(("stage", "", "s", "ended"), ended), "", *(f"- {note}" for note in notes)]
    for stage in tables.STAGES:
        lines += _of_tables(stage, pieces.get(stage, {}))
    smoke = {name: each for name, each in pieces.get("smoke", {}).items() if name in ("none", "host", "nvme")}
    titles = {"facts": "The machine", "device": "tests/device", "timeline": "Two steps"}
    for name, found in [("smoke", smoke), *((name, pieces.get(name)) for name in titles)]:
        if found:
            dumped = json.dumps(found, indent=1, default=str)[:6000]
            lines += ["", f"## {titles.get(name, 'Losses')}", "", "```", dumped, "```"]
    return "\n".join(lines) + "\n"


def _of_tables(stage: str, found: dict[str, Any]) -> list[str]:
    if not found.get("turns") and not found.get("missing"):
        return []
    turns = [(name, tokens, turns[-1]) for name, each in found["turns"].items() for tokens, turns in each.items()]
    lasts = []
    for name, tokens, last in sorted(turns, key=lambda turn: (int(turn[1]), turn[2]["seconds"])):
        told = found["told"].get(name, {})
        held = ", ".join(f"{last.get(key, 0) / 1e9:.1f}" for key in ("peak_device_bytes", "reserved_bytes"))
        cells = [name, tokens, f"{last['seconds']:.3f}", held, last.get("retries", "-")]
        lasts.append([*cells, f"{told.get('setup_seconds', 0):.0f}", told.get("predicted_seconds") or "-"])
    head = ("", "tokens", "step, s", "HBM, reserved, GB", "retries", "setup, s", "planned: step, s")
    parts = [tables.table(found["rows"]), tables.exposed_table(found["rows"]), markdown(head, lasts)]
    missing = [f"- {name}: {' '.join(why.split())[-400:]}" for name, why in found["missing"].items()]
    return ["", f"## {stage.capitalize()}", *(f"\n{part}" for part in parts), "", *missing]


def _drawn(out: Path, found: dict[str, Any]) -> list[str]:
    """Draws the stage timeline, where it has kernels. Returns why that fails."""
    try:
        if found.get("kernels"):
            lanes = trace.lanes(trace.read(out / found["file"]))
            trace.draw(lanes, out / "timeline.png", "two steps with everything on the host")
    except Exception as error:  # matplotlib is missing, or a stage was ended while it wrote
        return [f"timeline.png is not drawn: {type(error).__name__}: {error}"]
    return []
