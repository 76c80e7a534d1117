"""The run folder's files: one line a step with the documented keys, plots that are pictures, half lines dropped."""

import dataclasses
import json

import pytest

pytest.importorskip("zero_core")
pytest.importorskip("zero_offload")

from matplotlib.figure import Figure

from zero_offload import Timeline
from zero_offload.timeline import Event
from zero_train import report
from zero_train.loop import History, Phases, Step

KEYS = (
    "step loss grad_norm learning_rate step_seconds tokens_per_second exposed_seconds nvme_read_bytes "
    "nvme_write_bytes host_bytes device_bytes peak_rss_bytes nvme_bytes"
).split()


def step(number):
    return Step(number, 2.0, 1.0, 1e-3, 0.5, 100.0, 0.1, 10, 20, 30, 40, 50)


def write(folder, first, numbers):
    with report.Metrics(folder, first) as metrics:
        for number in numbers:
            metrics.step(step(number))
            metrics.validation(number, 2.5)


def test_a_line_has_the_documented_keys_and_is_there_at_once(tmp_path):
    with report.Metrics(tmp_path, 1) as metrics:
        metrics.step(step(1))
        line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(line) == KEYS
    assert report.read_steps(tmp_path) == [step(1)]


def test_resuming_keeps_earlier_lines_and_drops_later_and_half_ones(tmp_path):
    write(tmp_path, 1, range(1, 6))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    write(tmp_path, 4, [4, 5, 6])
    assert [s.step for s in report.read_steps(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [number for number, _ in report.read_validation(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_the_plot_is_drawn_for_any_number_of_steps(tmp_path, steps):
    write(tmp_path, 1, range(1, steps + 1))
    history = History(phases=[Phases(n, 0.1, 0.2, 0.3, 0.1) for n in range(1, steps + 1)])
    report.draw(tmp_path, history, {"host tier": 1 << 30, "nvme tier": 3 << 30})
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("count", [0, 3])
def test_a_timeline_without_steps_is_drawn(tmp_path, count):
    timeline = Timeline()
    for number in range(count):
        with timeline.span("update", f"layers.{number}"):
            pass
    report.draw_timeline(tmp_path / "timeline.png", timeline.events())
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_the_timeline_shows_whole_steps(tmp_path, monkeypatch):
    """Fails if the picture begins inside a step, shows what comes after the last, or leaves out a kind."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure.axes[0]))
    events = []
    for number in range(1, 6):
        at = 100 * number
        parts = [("step", 0, 90), ("forward", 0, 30), ("wait", 5, 9), ("backward", 30, 80), ("optimizer", 80, 90)]
        events += [Event(kind, str(number), at + a, at + b, "MainThread") for kind, a, b in parts]
        events += [Event("update", "tile", at - 8, at + 4, "update"), Event("swap_in", "tile", at, at + 9, "read")]
        events += [Event("swap_out", "tile", at + 4, at + 20, "write")]
        events += [Event("part", f"layers.0 {k}:{k + 1}", at + k, at + k + 1, "MainThread") for k in range(4)]
    events.append(Event("wait", "sampling", 700, 900, "MainThread"))
    report.draw_timeline(tmp_path / "timeline.png", events)
    (axes,) = drawn
    assert axes.get_title() == "steps 3, 4, 5"
    assert axes.get_xlim() == (0, pytest.approx(290e-9))
    rows = [label.get_text() for label in axes.get_yticklabels()]
    assert rows == ["MainThread: compute", "MainThread: part", "MainThread: wait", "update: update", "reads", "writes"]
    assert [len(row.get_paths()) for row in axes.collections] == [9, 12, 3, 3, 3, 3]


def test_steps_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        step(1).loss = 3.0
