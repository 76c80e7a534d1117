"""What a run leaves in its folder: metrics.jsonl, validation.jsonl, report.png, timeline.json, timeline.png.

Owns files and drawing; measures nothing. Drawing failures are the caller's to hear of: nothing is swallowed here.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from zero_train.loop import History, Phases, Step

GIB = 1 << 30
_PHASES = ("data", "forward", "backward", "optimizer")  # of a step, one after the other on the training thread
_COLOURS = {  # in the order of rows: what computes, what it waits for, the update, what moves
    "data": "#bcbd22",
    "forward": "#4c72b0",
    "backward": "#1f3b66",
    "optimizer": "#7f7f7f",
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
_ORDER = {kind: number for number, kind in enumerate(_COLOURS)}


class Metrics:
    """metrics.jsonl (one line a step) and validation.jsonl, each line on disk when its step is over.

    A folder that holds lines of steps before `first`, of a run that is resumed, keeps those and drops later ones.
    """

    def __init__(self, folder: Path, first: int) -> None:
        self._steps = folder / "metrics.jsonl"
        self._validation = folder / "validation.jsonl"
        for path in (self._steps, self._validation):
            kept = [line for line in _lines(path) if line["step"] < first]
            partial = path.with_name(path.name + ".partial")  # a kill in between must not take the earlier lines
            partial.write_text("".join(json.dumps(line) + "\n" for line in kept))
            partial.replace(path)
        self._files = [path.open("a") for path in (self._steps, self._validation)]

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._files:
            file.close()

    def step(self, step: Step) -> None:
        """Appends one step."""
        self._write(0, dataclasses.asdict(step))

    def validation(self, number: int, loss: float) -> None:
        """Appends one validation loss, taken after step `number`."""
        self._write(1, {"step": number, "loss": loss})

    def _write(self, which: int, record: dict[str, Any]) -> None:
        self._files[which].write(json.dumps(record) + "\n")
        self._files[which].flush()


def _lines(path: Path) -> list[dict[str, Any]]:
    """The complete records of a file: a killed run may have left half a line at the end."""
    records = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            records.append(json.loads(line))
        except ValueError:
            break
    return records


def read_steps(folder: Path) -> list[Step]:
    """The steps that metrics.jsonl of a run folder holds."""
    return [Step(**line) for line in _lines(folder / "metrics.jsonl")]


def read_validation(folder: Path) -> list[tuple[int, float]]:
    """(after step, nats a byte), from validation.jsonl of a run folder."""
    return [(line["step"], line["loss"]) for line in _lines(folder / "validation.jsonl")]


def draw(folder: Path, history: History, nvme_bytes: int) -> None:
    """report.png: loss, memory per tier, and where the step time went. `nvme_bytes`: what the plan puts there.

    Loss and memory are of all steps in the folder, the seconds of those of this process.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # it tells of its font cache otherwise
    from matplotlib.figure import Figure

    steps = read_steps(folder)
    figure = Figure(figsize=(9, 10), layout="constrained")
    above, middle, below = figure.subplots(3, 1)
    _loss(above, steps, read_validation(folder))
    _memory(middle, steps, nvme_bytes)
    _seconds(below, steps, history.phases)
    figure.savefig(folder / "report.png", dpi=110)


def _loss(axes: Any, steps: Sequence[Step], validation: Sequence[tuple[int, float]]) -> None:
    axes.plot([s.step for s in steps], [s.loss for s in steps], color="#4c72b0", linewidth=1, label="training")
    if validation:
        axes.plot(*zip(*validation, strict=True), "o-", color="#c44e52", label="validation")
    axes.set(title="loss", ylabel="nats per byte")
    axes.grid(alpha=0.3)
    axes.legend()


def _memory(axes: Any, steps: Sequence[Step], nvme_bytes: int) -> None:
    numbers = [s.step for s in steps]
    for name, values in (
        ("device tier", [s.device_bytes for s in steps]),
        ("host tier", [s.host_bytes for s in steps]),
        ("nvme tier (plan)", [nvme_bytes for _ in steps]),
        ("peak RSS", [s.peak_rss_bytes for s in steps]),
    ):
        axes.plot(numbers, [value / GIB for value in values], label=name)
    axes.set(title="memory per tier", ylabel="GiB", ylim=(0, None))
    axes.grid(alpha=0.3)
    axes.legend()


def _seconds(axes: Any, steps: Sequence[Step], phases: Sequence[Phases]) -> None:
    numbers = [p.step for p in phases]
    parts = {name: [getattr(p, name) for p in phases] for name in ("data", "forward", "backward", "optimizer")}
    axes.stackplot(numbers, *parts.values(), labels=list(parts), alpha=0.8)
    exposed = {s.step: s.exposed_seconds for s in steps}
    axes.plot(numbers, [exposed.get(n, 0.0) for n in numbers], color="black", linewidth=1, label="of it exposed")
    axes.set(title="where the step time went", xlabel="step", ylabel="seconds")
    axes.grid(alpha=0.3)
    axes.legend(loc="upper right")


def draw_timeline(path: Path, events: Sequence[Any], steps: int = 3) -> None:
    """timeline.png: the last `steps` steps of a zero_offload.Timeline's events, from where they begin.

    What the training thread computes is one row; what it waits for, other threads and each direction of transfers are
    a row each. Draws all events where none is a step.
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
        axes.broken_barh(spans, (number - 0.4, 0.8), facecolors=colours)
    for mark in marks:
        axes.axvline((mark.start_ns - begin) / 1e9, color="black", linewidth=0.8)
    axes.set_yticks(range(len(rows)), [_LABELS.get(kind, f"{lane}: {kind}") for lane, kind in rows])
    axes.invert_yaxis()
    title = ", ".join(mark.unit for mark in marks)
    axes.set(title=f"steps {title}" if marks else "the last events", xlabel="seconds", xlim=(0, (end - begin) / 1e9))
    kinds = dict.fromkeys(event.kind for shown in rows.values() for event in shown)
    handles = [Patch(color=_COLOURS.get(kind, _OTHER), label=kind) for kind in kinds]
    figure.legend(handles=handles, ncols=max(1, len(kinds)), loc="outside lower center")
    figure.savefig(path, dpi=110)
