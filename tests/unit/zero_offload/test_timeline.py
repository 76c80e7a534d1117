"""Timeline: what is recorded, and that the trace is what Perfetto reads."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from zero_offload import Timeline


def test_spans_and_transfers_become_a_trace(tmp_path: Path) -> None:
    timeline = Timeline(rank=3)
    with timeline.span("compute", "layers.0"):
        pass
    started = time.perf_counter_ns()
    thread = threading.Thread(target=lambda: timeline.transfer("swap_in", "states", started, started + 5000, 4096))
    thread.start()
    thread.join()
    timeline.save(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert [(e["name"], e["cat"], e["pid"]) for e in spans] == [("compute layers.0", "compute", 3)]
    assert spans[0]["dur"] >= 0
    begin, end = [next(e for e in events if e["ph"] == phase) for phase in "be"]
    assert (
        begin["id"] == end["id"]
        and end["ts"] - begin["ts"] == pytest.approx(5.0, abs=1e-2)
        and begin["args"]["bytes"] == 4096
    )
    lanes = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {threading.current_thread().name, "read"}
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_old_events_make_room() -> None:
    timeline = Timeline(capacity=2)
    for unit in "abc":
        with timeline.span("wait", unit):
            pass
    assert [event.unit for event in timeline.events()] == ["b", "c"]
    assert set(timeline.seconds()) == {"wait"}
    timeline.clear()
    timeline.enabled = False
    with timeline.span("wait", "d"):
        pass
    assert timeline.events() == ()


def test_spans_are_ranges_of_torchs_profiler() -> None:
    timeline = Timeline()
    with torch.profiler.profile() as profile, timeline.span("update", "layers.0"):
        torch.zeros(2).add_(1)
    assert "zero::update::layers.0" in {event.key for event in profile.key_averages()}
