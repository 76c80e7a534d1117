"""The GPU benchmark's frame, and all of its stages at toy size on the CPU: the program, not a GPU.

Fails if a stage that hangs or breaks takes others' results with it, if what a stage started outlives it, or if a later
call repeats what has ended.
"""

import json
import math
import tarfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.benchmarks import step_worker
from tests.benchmarks.gpu import frame, summary, tables, timeline
from tests.benchmarks.gpu.__main__ import FIRST, STAGES, main
from tests.benchmarks.gpu.stage import write
from tests.benchmarks.step_model import model_of
from tests.benchmarks.test_trace import EVENTS

NAMES = [stage.name for stage in STAGES]
TOY = {"tiny": True, "micro_batch": 2, "checkpointing": True, "dtype": "float32"}


def call(out, *arguments, stubs=None):
    """(exit code, what is known) of a call at toy size."""
    given = [word for name, how in (stubs or {}).items() for word in ("--stub", name, how)]
    code = main(["--dry", "--out", str(out), "--folder", str(out.parent), *arguments, *given])
    return code, json.loads((out / "results.json").read_text())


@pytest.mark.promise("bench-gpu")
@pytest.mark.timeout(1500)  # a minute of ten processes, on a machine with other work
def test_every_stage_runs_at_toy_size(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # in processes of toy sizes, threads would wait for each other
    code, found = call(tmp_path / "out", "--rounds", "1", "--tokens", "8192", "--others", "none", "--seconds", "1e4")
    assert {name: record["told"] for name, record in found["stages"].items()} == dict.fromkeys(NAMES, "done")
    assert code == 0
    pieces = found["pieces"]
    missing = {name for name, part in pieces["facts"].items() if set(part) & {"missing", "failed"}}
    assert missing == {"device", "link"}  # what a CPU has not
    assert pieces["smoke"]["host_equals_nvme"] and len(pieces["smoke"]["host"]["losses"]) == 5
    assert pieces["device"]["passed"] > 0 and not pieces["device"]["not_ended"]
    (row,) = pieces["placements"]["rows"]
    assert row["other"] == "none" and row["ratio"] > 0 and row["predicted"]["seconds"] > 0 and row["pairs"] == 1
    told = (tmp_path / "out" / "summary.md").read_text()
    assert "| 8192 | none | " in told
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        names = {Path(name).name for name in archive.getnames()}
    assert {"results.json", "summary.md", timeline.FILE, *(f"{name}.log" for name in NAMES)} <= names


@pytest.mark.promise("bench-gpu")
@pytest.mark.parametrize("how, told", [("hang", "stopped at its limit of 1 s"), ("fail", "failed, exit 3: it broke")])
@pytest.mark.parametrize("name", NAMES)
def test_a_stage_that_hangs_or_fails_leaves_the_others_and_what_it_knew(tmp_path, name, how, told):
    out = tmp_path / "out"
    code, found = call(out, stubs=dict.fromkeys(NAMES, "pass") | {name: how})
    assert code == 1
    assert {each: record["told"] for each, record in found["stages"].items()} == dict.fromkeys(NAMES, "done") | {
        name: told
    }
    assert found["pieces"][name] == {"begun": True}
    assert f"| {name} | {told} | " in (out / "summary.md").read_text()
    with tarfile.open(tmp_path / "out.tar.gz") as archive:
        assert f"out/{name}.json" in archive.getnames()
    if how == "hang":
        assert gone(int((out / f"{name}.json.child").read_text()))  # although it had a group of its own
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "out.tar.gz"]  # and no slabs


def gone(pid: int) -> bool:
    """Whether the process has ended, which a killed one does as soon as it has a processor."""
    for _ in range(600):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.promise("bench-gpu-goes-on")
def test_a_later_call_goes_on_where_an_earlier_one_had_no_time_left(tmp_path, capsys):
    out, stubs = tmp_path / "out", dict.fromkeys(NAMES, "pass")
    short = ("--seconds", str(STAGES[0].dry))  # the whole limit of no stage
    code, found = call(out, *short, stubs=stubs)
    assert code == 0 and list(found["stages"]) == ["facts"]
    assert "-- smoke waits for the next call: it may take 300 s" in capsys.readouterr().out
    code, found = call(out, *short, stubs=stubs)
    assert code == 0 and list(found["stages"]) == ["facts", "smoke"]
    assert "-- facts ended in an earlier call (done); --again repeats it" in capsys.readouterr().out
    _, found = call(out, "--seconds", "1e4", stubs=stubs | {"facts": "fail"})
    assert list(found["stages"]) == NAMES and found["stages"]["facts"]["told"] == "done"
    code, found = call(out, "--again", "--stages", "facts", stubs={"facts": "fail"})
    assert code == 1 and found["stages"]["facts"]["told"].startswith("failed")
    assert list(found["pieces"]) == NAMES


@pytest.mark.promise("bench-gpu-goes-on")
def test_the_limits_of_all_stages_fit_in_four_calls_and_the_first_ones_in_one():
    waiting, a_call = list(STAGES), 570 - frame.PACKING_SECONDS - 1
    for _ in range(4):
        left = a_call
        for stage in list(waiting):
            if stage.limit <= left:
                left -= stage.limit
                waiting.remove(stage)
    assert not waiting and sum(FIRST.values()) <= a_call


def test_others_take_turns_with_ours_as_far_as_memory_goes():
    numel = tables.numel_of(tables.MODELS["3b"])
    model, _ = model_of({"sizes": tables.MODELS["3b"], "device": "meta", "micro_batch": 1})
    assert numel == sum(p.numel() for p in model.parameters())
    every = [name for stage in ("placements", "peers") for name in tables.STAGES[stage]]
    beside = ["none", "nvme", "plain", "fsdp2-host", "deepspeed-host"]
    assert tables.groups(every, numel, (math.inf, math.inf)) == [["host", "floor", *beside], ["auto"], ["shared"]]
    peers, h100 = list(tables.STAGES["peers"]), (118 << 30, 78 << 30)  # GiB free of host and device
    assert tables.groups(peers, numel, h100) == [["host", "floor", *peers[:2]], peers[2:]]


def test_plain_torch_and_what_the_planner_chooses_take_the_steps_of_ours(tmp_path):
    losses = {}
    for name, build in (("none", step_worker.ours), ("plain", step_worker.plain), ("auto", step_worker.ours)):
        with ExitStack() as stack:
            parts = build(TOY | {"name": name, "folder": str(tmp_path), "host_gib": 1.0}, stack)
            losses[name] = [parts["step"]().item() for _ in range(3)]
    assert losses["plain"] == pytest.approx(losses["none"], rel=1e-5)
    assert losses["auto"] == pytest.approx(losses["none"], rel=1e-5)


def test_a_timeline_is_drawn_where_kernels_ran(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": EVENTS}))
    pieces = {"timeline": {"kernels": 3, "file": "trace.json"}}
    write(tmp_path / "results.json", {"dry": False, "stages": {}, "pieces": pieces})
    summary.make(tmp_path)
    assert (tmp_path / "timeline.png").stat().st_size > 1000
