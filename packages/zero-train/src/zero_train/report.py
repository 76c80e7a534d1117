"""Writes what a run leaves in its folder: metrics.jsonl, validation.jsonl, report.png, timeline.png.

Owns files and drawing, measures nothing. Errors while drawing are raised to the caller.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import textwrap
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from zero_train.loop import History, Step
from zero_train.run_folder import records, replace

GIB = 1 << 30
_PHASES = ("data", "forward", "backward", "optimizer")  # of a step, one after the other on the training thread
_COLOURS = {  # in the order of rows: what computes, what it waits for, the update, what moves
    "data": "#bcbd22",
    "forward": "#4c72b0",
    "backward": "#1f3b66",
    "optimizer": "#7f7f7f",
    "part": "#8fb3e0",
    "wait": "#c44e52",
    "gather": "#55a868",
    "reduce": "#8172b3",
    "norm": "#937860",
    "update": "#dd8452",
    "swap_in": "#64b5cd",
    "swap_out": "#da8bc3",
}
_LABELS = {"swap_in": "reads", "swap_out": "writes"}
_OTHER = "#d9d9d9"
_SHOWN = {"peak RSS": "peak RSS, with libraries"}
_ORDER = {kind: number for number, kind in enumerate(_COLOURS)}


class Metrics(ExitStack):
    """Writes metrics.jsonl and validation.jsonl, a line a step, and flushes each line when its step is over.

    If the files have lines of a run that is resumed, the lines before step `first` are kept and the others dropped.
    """

    def __init__(self, folder: Path, first: int) -> None:
        super().__init__()
        self._files = {}
        for name in ("metrics", "validation"):
            path = folder / f"{name}.jsonl"
            kept = [line for line in records(path) if line["step"] < first]
            replace(path, "".join(json.dumps(line) + "\n" for line in kept))
            self._files[name] = self.enter_context(path.open("a"))

    def step(self, step: Step) -> None:
        """Appends one step."""
        self._write("metrics", dataclasses.asdict(step))

    def validation(self, number: int, loss: float, accuracy: float | None = None) -> None:
        """Appends the validation loss taken after step `number`, and the share of pairs that are told apart."""
        more = {} if accuracy is None else {"accuracy": accuracy}
        self._write("validation", {"step": number, "loss": loss, **more})

    def _write(self, name: str, record: dict[str, Any]) -> None:
        self._files[name].write(json.dumps(record) + "\n")
        self._files[name].flush()


def read_steps(folder: Path) -> list[Step]:
    """Returns the steps in a run folder's metrics.jsonl."""
    return [Step(**line) for line in records(folder / "metrics.jsonl")]


def read_validation(folder: Path) -> list[tuple[int, float]]:
    """Returns (step, loss) of every validation in a run folder."""
    return [(line["step"], line["loss"]) for line in records(folder / "validation.jsonl")]


def planned(plan: Any) -> dict[str, int]:
    """Returns the bytes of a zero_offload.Plan that each curve of the memory panel is compared with.

    Activations are in none of the tiers' counters. On a CPU the device's memory is the host's: the process has both.
    """
    placed = sum(plan.bytes_of("device", kind) for kind in ("parameters", "gradients", "optimizer"))
    on_cpu = plan.hardware is None or plan.hardware.device == "cpu"
    return {
        "device tier": placed,
        "host tier": plan.total("host") - plan.bytes_of("host", "activations"),
        "nvme tier": plan.total("nvme"),
        "peak RSS": plan.total("host") + (plan.total("device") if on_cpu else 0),
    }


def draw(folder: Path, history: History, plan: Mapping[str, int], unit: str = "nats per byte") -> None:
    """Draws report.png: loss, memory in each tier beside the plan's, and where the step time went.

    Loss and memory cover all steps in the folder, the seconds only those of this process. `plan`: see `planned`.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # otherwise it logs that it builds its font cache
    from matplotlib.figure import Figure

    steps, validation = read_steps(folder), read_validation(folder)
    figure = Figure(figsize=(9, 10), layout="constrained")
    loss, memory, seconds = figure.subplots(3, 1)

    if history.remarks:
        figure.suptitle("\n".join(textwrap.fill(remark, 110) for remark in history.remarks), fontsize="small")
    loss.set(title="loss", ylabel=unit)
    loss.plot([s.step for s in steps], [s.loss for s in steps], color="#4c72b0", linewidth=1, label="training")
    if validation:
        loss.plot(*zip(*validation, strict=True), "o-", color="#c44e52", label="validation")

    for name, values in (
        ("device tier", [s.device_bytes for s in steps]),
        ("host tier", [s.host_bytes for s in steps]),
        ("nvme tier", [s.nvme_bytes for s in steps]),
        ("peak RSS", [s.peak_rss_bytes for s in steps]),
    ):
        if not any(values) and not plan.get(name):
            continue
        (line,) = memory.plot([s.step for s in steps], [value / GIB for value in values], label=_SHOWN.get(name, name))
        memory.axhline(plan.get(name, 0) / GIB, color=line.get_color(), linestyle="--", linewidth=1)
    memory.plot([], [], color="grey", linestyle="--", linewidth=1, label="its plan")
    memory.set(title="memory: measured, and what the plan says of it", ylabel="GiB", ylim=(0, None))

    numbers = [p.step for p in history.phases]
    parts = [[getattr(p, name) for p in history.phases] for name in _PHASES]
    seconds.stackplot(numbers, *parts, labels=_PHASES, alpha=0.8)
    exposed = {s.step: s.exposed_seconds for s in steps}
    seconds.plot(numbers, [exposed.get(n, 0.0) for n in numbers], color="black", linewidth=1, label="of it exposed")
    seconds.set(title="where the step time went", xlabel="step", ylabel="seconds")

    for axes in (loss, memory, seconds):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(folder / "report.png", dpi=110)


def draw_timeline(path: Path, events: Sequence[Any], steps: int = 3) -> None:
    """Draws timeline.png: the last `steps` steps of a zero_offload.Timeline's events, or all events without a step.

    The training thread's computation is one row. Its waits, each other thread and each direction of transfers have
    rows of their own.
    """
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    marks = [event for event in events if event.kind == "step"][-steps:]
    begin = min((event.start_ns for event in marks or events), default=0)
    end = max((event.stop_ns for event in marks or events), default=begin + 1)
    rows: dict[tuple[str, str], list[Any]] = {}
    for event in sorted(events, key=lambda event: _ORDER.get(event.kind, len(_ORDER))):
        if event.kind != "step" and event.stop_ns > begin and event.start_ns < end:
            row = (event.lane, "compute") if event.kind in _PHASES else (event.lane, event.kind)
            rows.setdefault(row, []).append(event)
    figure = Figure(figsize=(12, 1.5 + 0.4 * len(rows)), layout="constrained")
    axes = figure.subplots()
    for number, shown in enumerate(rows.values()):
        spans = [((event.start_ns - begin) / 1e9, (event.stop_ns - event.start_ns) / 1e9) for event in shown]
        colours = [_COLOURS.get(event.kind, _OTHER) for event in shown]
        edges = "white" if shown[0].kind == "part" else "none"  # they touch
        axes.broken_barh(spans, (number - 0.4, 0.8), facecolors=colours, edgecolors=edges, linewidth=0.4)
    for mark in marks:
        axes.axvline((mark.start_ns - begin) / 1e9, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [_LABELS.get(kind, f"{lane}: {kind}") for lane, kind in rows])
    axes.invert_yaxis()
    title = ", ".join(mark.unit for mark in marks)
    shown_steps = f"{'step' if len(marks) == 1 else 'steps'} {title}" if marks else "the last events"
    axes.set(title=shown_steps, xlabel="seconds", xlim=(0, (end - begin) / 1e9))
    kinds = dict.fromkeys(event.kind for shown in rows.values() for event in shown)
    handles = [Patch(color=_COLOURS.get(kind, _OTHER), label=kind) for kind in kinds]
    figure.legend(handles=handles, ncols=max(1, len(kinds)), loc="outside lower center")
    figure.savefig(path, dpi=110)
