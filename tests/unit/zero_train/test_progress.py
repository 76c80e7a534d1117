"""What is told where: lines in files, lines for a pipe, a bar for a terminal, nothing on other ranks."""

import dataclasses
import json

import pytest

from zero_train.report import picture, progress
from zero_train.report.metrics import Step
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
    assert [number for number, _ in picture.read_validation(tmp_path)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_the_picture_is_drawn_for_any_number_of_steps(tmp_path, steps):
    from zero_train.report.metrics import History

    told(tmp_path, steps)
    seconds = {"data": 0.1, "forward": 0.2, "backward": 0.3, "optimizer": 0.1}
    history = History(phases=[(number, seconds) for number in range(1, steps + 1)])
    picture.draw(tmp_path, history, {"host tier": 1 << 30, "nvme tier": 3 << 30})
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")
