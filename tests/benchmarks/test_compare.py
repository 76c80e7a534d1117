"""`compare`: what a row says of turns that are known, and one comparison at toy size."""

import json
import sys

from tests.benchmarks import compare


def test_a_row_has_medians_ratios_and_the_bytes_at_the_drives_rate():
    floor = [{"seconds": 1.0, "extra_seconds": 1.0, "losses": [2.0, 4.0]}] * 3
    moved = {"nvme_read_bytes": 3e9, "nvme_write_bytes": 1e9}
    turns = [{"seconds": seconds, "losses": [2.0, 5.0], **moved} for seconds in (4.0, 8.0, 16.0)]
    found = compare.row(turns, floor, 1e9)
    assert found["seconds"] == 8.0 and found["pairs"] == 3 and found["losses"] == 0.25
    assert found["disk_seconds"] == 4.0  # longer than forward, backward and the pass of the update, 2 s
    assert (found["ratio"], found["to_bound"]) == ([4.0], [2.0])


def test_ours_take_the_same_steps_in_processes_of_their_own(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(compare.fio, "available", lambda: False)
    sides = ["none", "floor", "host", "nvme"]
    given = ["compare", str(tmp_path), "tiers", "--pairs", "1", "--options", '{"tiny": true}', "--sides", *sides]
    monkeypatch.setattr(sys, "argv", given)
    compare.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["side"] for row in rows] == sides
    assert rows[2]["losses"] == rows[3]["losses"] < 1e-5 < rows[1]["losses"]  # which updates nothing
    assert rows[3]["nvme_write_bytes"] > 0 and list(tmp_path.iterdir()) == []
