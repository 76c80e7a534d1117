"""Ctrl-C and SIGTERM end a run after the step under way, with its plots, and the process says which signal it was."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.zero_train.helpers import COMMON, left
from zero_train.report import picture

LEFT = ["config.yaml", "metrics.jsonl", "report.png", "timeline.json", "validation.jsonl"]


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


@pytest.mark.promise("start-sigterm")
def test_a_rank_that_waits_for_others_to_start_ends_on_sigterm(tmp_path):
    """torchrun ends what is left of a job with SIGTERM, and waits 30 seconds before it kills."""
    port, environment = alone_of_two()
    command = [sys.executable, "-m", "zero_train", *COMMON, "offload=host", f"run.dir={tmp_path / 'run'}"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment)
    try:
        until = time.monotonic() + 120
        while not listens(port):
            assert time.monotonic() < until and process.poll() is None
            time.sleep(0.05)
        time.sleep(1)  # it waits for the other one by now
        process.terminate()
        assert process.wait(timeout=15) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    assert list(tmp_path.iterdir()) == []


def alone_of_two():
    """A port, and the environment of a rank 0 whose rank 1 never comes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    alone = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return port, environment | alone


def listens(port):
    """Whether some process listens on the port, by Linux's tables."""
    tables = [Path(f"/proc/net/{name}") for name in ("tcp", "tcp6")]
    lines = [line.split() for table in tables if table.exists() for line in table.read_text().splitlines()[1:]]
    return any(line[1].endswith(f":{port:04X}") and line[3] == "0A" for line in lines)


@pytest.mark.advice("Start all ranks within run.timeout=")
@pytest.mark.promise("start-sigterm")
def test_a_rank_that_waits_for_others_to_start_raises_after_its_timeout(tmp_path):
    _, environment = alone_of_two()
    command = [sys.executable, "-m", "zero_train", *COMMON, "offload=host", f"run.dir={tmp_path / 'run'}"]
    command += ["run.steps=2", "run.evaluate_every=0", "run.plots=false"]
    alone = [*command, "run.timeout=2"]
    done = subprocess.run(alone, capture_output=True, text=True, cwd=tmp_path, env=environment, timeout=120)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert "the run stopped: rank 0 of 2 did not reach the others" in done.stderr
    assert "Start all ranks within run.timeout=2 seconds, or raise it" in done.stderr
    _, environment = alone_of_two()
    both = [
        subprocess.Popen([*command, "run.timeout=120"], cwd=tmp_path, env=environment | {"RANK": str(rank)})
        for rank in range(2)
    ]
    assert [process.wait(timeout=120) for process in both] == [0, 0]
    assert len(picture.read_steps(tmp_path / "run")) == 2
