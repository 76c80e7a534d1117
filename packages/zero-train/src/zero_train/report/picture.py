"""Draws report.png from the files of a run folder, and writes it beside the timeline."""

from __future__ import annotations

import logging
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_train.report.metrics import History, Step, records

GIB = 1 << 30
_PHASES = ("data", "forward", "backward", "optimizer")  # of a step, one after the other on the training thread
_SHOWN = {"peak RSS": "peak RSS, with libraries"}


def read_steps(folder: Path) -> list[Step]:
    """Returns the steps in a run folder's metrics.jsonl."""
    return [Step(**line) for line in records(folder / "metrics.jsonl")]


def planned(plan: Any) -> dict[str, int]:
    """Returns the bytes of a zero_offload.Plan that each curve of the memory panel is compared with.

    No tier's counter includes activations. On a CPU, device memory is host memory, so the process holds both.
    """
    placed = sum(plan.bytes_of("device", kind) for kind in ("parameters", "gradients", "optimizer"))
    on_cpu = plan.hardware is None or plan.hardware.device == "cpu"
    return {
        "device tier": placed,
        "host tier": plan.total("host") - plan.bytes_of("host", "activations"),
        "nvme tier": plan.total("nvme"),
        "peak RSS": plan.total("host") + (plan.total("device") if on_cpu else 0),
    }


def write(folder: Path, history: History, timeline: Any, plan: Mapping[str, int] | None, unit: str) -> Iterator[str]:
    """Writes the timeline, and unless `plan` is None the picture. Yields a sentence on each that cannot be written."""
    written: dict[str, Callable[[], None]] = {}
    if plan is not None and (history.steps or not (folder / "report.png").exists()):
        written["report.png"] = lambda: draw(folder, history, plan, unit)
    if history.steps:  # a finished run that is exported keeps the timeline of its last steps
        written["timeline.json"] = lambda: timeline.save(folder / "timeline.json")
    for name, save in written.items():
        try:
            save()
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            yield f"could not write {name}: {error}"


def draw(folder: Path, history: History, plan: Mapping[str, int], unit: str = "nats per byte") -> None:
    """Draws report.png: loss, memory in each tier beside the plan's, and where the step time went.

    Loss and memory cover all steps in the folder, the seconds only those of this process. `plan`: see `planned`.
    """
    logging.getLogger("matplotlib").setLevel(logging.WARNING)  # otherwise it logs that it builds its font cache
    from matplotlib.figure import Figure

    steps = read_steps(folder)
    validation = [(line["step"], line["loss"]) for line in records(folder / "validation.jsonl")]
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

    numbers = [number for number, _ in history.phases]
    parts = [[phases[name] for _, phases in history.phases] for name in _PHASES]
    seconds.stackplot(numbers, *parts, labels=_PHASES, alpha=0.8)
    exposed = {s.step: s.exposed_seconds for s in steps}
    seconds.plot(numbers, [exposed.get(n, 0.0) for n in numbers], color="black", linewidth=1, label="of it exposed")
    seconds.set(title="where the step time went", xlabel="step", ylabel="seconds")

    for axes in (loss, memory, seconds):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(folder / "report.png", dpi=110)
