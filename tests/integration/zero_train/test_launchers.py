"""Recipes of a user's own folder under each of Hydra's launchers and sweepers, and Ctrl-C during a sweep.

`pip install './packages/zero-train[sweeps]'` brings the launchers and the sweeper; a test skips without its own.
"""

import csv
import importlib.util
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.zero_train.helpers import COMMON

WORDS = [*(word for word in COMMON if word != "recipe=tiny"), "recipe=mine", "offload=none", "run.threads=1"]
MINE = "# @package _global_\ndefaults:\n  - tiny\n  - override /optim: sgd\nrun:\n  steps: 2\n"
PLUGINS = {
    "joblib": "hydra_joblib_launcher",
    "submitit_local": "hydra_submitit_launcher",
    "optuna": "hydra_optuna_sweeper",
}


def is_installed(plugin: str) -> bool:
    return bool(importlib.util.find_spec("hydra_plugins") and importlib.util.find_spec(f"hydra_plugins.{plugin}"))


def begun(folder: Path, *words: str) -> subprocess.Popen[str]:
    """Starts a sweep in `folder` with a recipe of one's own there. Its processes have a mark in their environment."""
    for word in words:
        plugin = PLUGINS.get(word.partition("=")[2])
        if plugin is not None and not is_installed(plugin):
            pytest.skip(f"needs {plugin.replace('_', '-')}: pip install './packages/zero-train[sweeps]'")
    (folder / "recipe").mkdir()
    (folder / "recipe" / "mine.yaml").write_text(MINE)
    command = [sys.executable, "-m", "zero_train", "-m", f"--config-dir={folder}", *WORDS, "run.dir=all", *words]
    environment = {**os.environ, "ZERO_TRAIN_TEST": str(folder), "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    return subprocess.Popen(
        command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def table(folder: Path) -> list[list[str]]:
    """Returns what each job had, its exit code, its steps, and whether it has a loss."""
    with (folder / "all" / "sweep.csv").open(newline="") as file:
        return [[row[1], row[2], row[3], bool(row[4])] for row in list(csv.reader(file))[1:]]


@pytest.mark.promise("launchers")
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_each_launcher_runs_a_recipe_of_ones_own_and_leaves_the_table(tmp_path, launcher):
    """Fails if a job that fails stops the others, or is not in the table and in the exit code."""
    sweep = begun(tmp_path, f"hydra/launcher={launcher}", "optim.momentum=0.5,1.5,0.9")
    out, errors = sweep.communicate(timeout=500)
    assert sweep.returncode == 2, errors
    assert table(tmp_path) == [
        ["optim.momentum=0.5", "0", "2", True],
        ["optim.momentum=1.5", "2", "", False],
        ["optim.momentum=0.9", "0", "2", True],
    ]
    assert "Traceback" not in errors and "sweep.csv" in out


@pytest.mark.promise("launchers")
def test_optuna_lowers_the_last_loss(tmp_path):
    """Fails if a job returns no loss, or if a trial that fails ends the sweep without a table."""
    words = ["hydra/sweeper=optuna", "hydra.sweeper.n_trials=3", "hydra.sweeper.n_jobs=3", "optim.momentum=0.5"]
    sweep = begun(tmp_path, *words, "optim.lr=choice(0.1,0.2)", "run.evaluate_every=2")
    out, errors = sweep.communicate(timeout=500)
    assert sweep.returncode == 0, errors
    assert [row[1:] for row in table(tmp_path)] == [["0", "2", True]] * 3
    with (tmp_path / "all" / "sweep.csv").open(newline="") as file:
        losses = [float(row["best validation"]) for row in csv.DictReader(file)]
    assert f"Best value: {min(losses):.4f}"[:16] in out


def marked(folder: Path) -> list[int]:
    """Returns the processes of a sweep that still run."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            mark = f"ZERO_TRAIN_TEST={folder}".encode() in (process / "environ").read_bytes().split(b"\0")
            if mark and (process / "stat").read_text().rpartition(") ")[2][0] != "Z":
                found.append(int(process.name))
        except OSError:  # it has ended, or is another user's
            continue
    return found


@pytest.mark.promise("sweep-ctrl-c")
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_ctrl_c_at_the_command_alone_leaves_no_process_of_a_sweep(tmp_path, launcher):
    """Fails if a launcher's workers go on training after the command has ended."""
    sweep = begun(tmp_path, f"hydra/launcher={launcher}", "run.steps=90001,90002")
    until = time.monotonic() + 400
    while not any(path.stat().st_size for path in tmp_path.glob("all/*/metrics.jsonl")):
        assert sweep.poll() is None and time.monotonic() < until, sweep.communicate()
        time.sleep(0.2)
    sweep.send_signal(signal.SIGINT)
    out, errors = sweep.communicate(timeout=120)
    assert sweep.returncode == 130 and "Traceback" not in errors, errors
    until = time.monotonic() + 30
    while marked(tmp_path) and time.monotonic() < until:
        time.sleep(0.2)
    assert not marked(tmp_path)
