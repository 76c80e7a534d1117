"""What is told where: lines in files, lines for a pipe, a bar for a terminal, nothing on other ranks."""

import csv
import dataclasses
import json

import pytest

from zero_train.cli import sweep
from zero_train.report import picture, progress
from zero_train.report.metrics import Step, records
from zero_train.schema import RunConfig

KEYS = (
    "step loss grad_norm learning_rate step_seconds tokens_per_second exposed_seconds nvme_read_bytes "
    "nvme_write_bytes host_bytes device_bytes peak_rss_bytes nvme_bytes"
).split()


def step(number):
    return Step(number, 2.5, 1.0, 1e-3, 0.5, 1234.5, 0.25, 10, 20, 30, 40, 50)


def told(folder, steps, *, done=0, leader=True, **options):
    """Tells of the steps after `done`."""
    with progress.Told(folder, RunConfig(steps=steps, **options), done, leader) as run:
        for number in range(done + 1, steps + 1):
            run.step(step(number))
            run.validation(number, 2.5, "nats/byte")


def test_a_pipe_gets_every_nth_line_and_the_first_and_last(tmp_path, capsys):
    told(tmp_path, 7, report_every=3)
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("validation")]
    assert [line.split()[1] for line in lines] == ["1/7", "3/7", "6/7", "7/7"]
    assert "loss 2.5000  1,234 tokens/s  exposed 250 ms" in lines[0]


def test_a_terminal_gets_a_bar_with_the_figures(tmp_path, capsys):
    told(tmp_path, 2, bar=True)
    printed = capsys.readouterr().out
    assert "validation after step 1: 2.5000 nats/byte" in printed
    assert "2/2" in printed and "loss 2.5000" in printed and "step 1/2" not in printed


def test_a_line_has_the_documented_keys_and_is_there_at_once(tmp_path):
    with progress.Told(tmp_path, RunConfig(), 0, leader=True) as run:
        run.step(step(1))
        line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert list(line) == KEYS == [field.name for field in dataclasses.fields(Step)]
    assert picture.read_steps(tmp_path) == [step(1)]


def test_resuming_keeps_earlier_lines_and_drops_later_and_half_ones(tmp_path):
    told(tmp_path, 5)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')
    told(tmp_path, 6, done=3)
    assert [s.step for s in picture.read_steps(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in records(tmp_path / "validation.jsonl")] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_the_picture_is_drawn_for_any_number_of_steps(tmp_path, steps):
    from zero_train.report.metrics import History

    told(tmp_path, steps)
    seconds = {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.1}
    history = History(phases=[(number, seconds) for number in range(1, steps + 1)])
    picture.draw(tmp_path, history, {"host tier": 1 << 30, "nvme tier": 3 << 30})
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")


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


@pytest.mark.promise("sweep-table")
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


@pytest.mark.promise("sweep-table")
def test_the_line_that_a_killed_job_was_writing_is_left_out(tmp_path):
    killed = job(tmp_path / "0", ["a=1"], 137, [3.0, 2.0], [0.1, 2.5])
    for name in ("metrics.jsonl", "validation.jsonl"):
        with (tmp_path / "0" / name).open("a") as file:
            file.write('{"step": 3, "lo')
    assert sweep.table([killed])[1][3:6] == ["2", "2.0000", "2.5000"]


@pytest.mark.promise("sweep-table")
def test_a_refused_job_has_no_figures_of_an_earlier_run_in_its_folder(tmp_path):
    refused = job(tmp_path / "0", ["a=1"], 2, [3.0])
    assert sweep.table([refused])[1] == ["0", "a=1", "2", *[""] * 6]
