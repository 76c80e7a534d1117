"""Ctrl-C and SIGTERM end a run after the step under way, with its plots, and the process says which signal it was."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zero_nvme")
pytest.importorskip("zero_optim_cpu")

from tests.integration.zero_train.helpers import COMMON, left, trained
from zero_train import progress, report

LEFT = [".lock", "config.yaml", "metrics.jsonl", "report.png", "timeline.json", "timeline.png", "validation.jsonl"]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_step_under_way_is_the_last(tmp_path, monkeypatch, number, code):
    shown = progress.Plain.step

    def step(self, line):
        shown(self, line)
        if line.step == 3:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(progress.Plain, "step", step)
    before = signal.getsignal(number)
    run = trained(tmp_path / "run", "offload=nvme", "run.steps=1000", "run.sample_bytes=10", "run.plots=true")
    assert run.exit_code == code
    assert [s.step for s in report.read_steps(run.folder)] == [1, 2, 3]
    assert left(run.folder) == LEFT
    assert run.sample == ""
    assert signal.getsignal(number) == before


def test_a_validation_loss_is_left_after_its_batch(tmp_path, monkeypatch):
    said = progress.Plain.say

    def say(self, text):
        said(self, text)
        if text.startswith("validation after step 2"):
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(progress.Plain, "say", say)
    run = trained(tmp_path / "run", "offload=host", "run.steps=1000", "run.evaluate_every=2", "run.plots=true")
    assert run.exit_code == 130
    assert [number for number, _ in report.read_validation(run.folder)] == [0, 2]
    assert left(run.folder) == LEFT


def test_a_real_process_whose_parent_ignores_ctrl_c(tmp_path):
    command = [sys.executable, "-u", "-m", "zero_train", *COMMON, "offload=nvme", "run.steps=1000000", "run.plots=true"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the child inherits it
    try:
        process = subprocess.Popen(
            [*command, f"run.dir={tmp_path / 'run'}"],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    lines = []
    try:
        for line in process.stdout:
            lines.append(line)
            if line.startswith("step 3/"):
                process.send_signal(signal.SIGINT)
        code = process.wait(timeout=240)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    text = "".join(lines)
    assert code == 130, text
    assert "Traceback" not in text
    assert "stopped after step" in text
    assert left(tmp_path / "run") == LEFT
    assert [path.name for path in Path(tmp_path).iterdir()] == ["run"]
