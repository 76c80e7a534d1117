"""The table of a sweep: fails if a figure is of another job, or a job that was refused ends it."""

import csv
import json

import pytest

from zero_train.cli import sweep

pytestmark = pytest.mark.promise("sweep-table")


def job(folder, words, code, losses=(), validation=()):
    folder.mkdir(parents=True)
    sizes = {"peak_rss_bytes": 2_000_000_000, "device_bytes": 500_000_000}
    lines = [{"step": n, "loss": loss, "tokens_per_second": 100.0 * n, **sizes} for n, loss in enumerate(losses, 1)]
    if lines:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    lines = [{"step": n, "loss": loss} for n, loss in enumerate(validation)]
    if lines:
        (folder / "validation.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return sweep.Job(folder, words, code)


def test_each_job_is_a_row_with_what_only_it_had(tmp_path):
    jobs = [
        job(tmp_path / "0", ["recipe=tiny", "optim.lr=1"], 0, [3.0, 2.0, 1.5], [0.1, 2.5, 1.75]),
        job(tmp_path / "1", ["recipe=tiny", "optim.lr=2"], 1, [3.0]),
        job(tmp_path / "2", ["recipe=tiny", "optim.lr=x"], 2),
    ]
    text = sweep.write(jobs)
    with (tmp_path / sweep.FILE).open(newline="") as file:
        rows = list(csv.reader(file))
    assert rows[1] == ["0", "optim.lr=1", "0", "3", "1.5000", "1.7500", "200", "2.00", "0.50"]
    assert rows[2][:6] == ["1", "optim.lr=2", "1", "1", "3.0000", ""]
    assert rows[3] == ["2", "optim.lr=x", "2", *[""] * 6]
    assert text.count("\n") == 4 and text.endswith(sweep.FILE) and "recipe=tiny" not in text


def test_the_line_that_a_killed_job_was_writing_is_left_out(tmp_path):
    killed = job(tmp_path / "0", ["a=1"], 137, [3.0, 2.0], [0.1, 2.5])
    for name in ("metrics.jsonl", "validation.jsonl"):
        with (tmp_path / "0" / name).open("a") as file:
            file.write('{"step": 3, "lo')
    assert sweep.table([killed])[1][3:6] == ["2", "2.0000", "2.5000"]


def test_a_refused_job_has_no_figures_of_an_earlier_run_in_its_folder(tmp_path):
    refused = job(tmp_path / "0", ["a=1"], 2, [3.0])
    assert sweep.table([refused])[1] == ["0", "a=1", "2", *[""] * 6]
