"""Small runs in this process, and what they leave: shared by the integration tests of zero-train."""

import dataclasses
import hashlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import zero_core
from zero_train.report import progress
from zero_train.report.metrics import Step
from zero_train.run import train
from zero_train.settings import compose

# One thread, so that sums have one order; any filesystem, as /tmp may be memory where the tests run.
COMMON = (
    "recipe=tiny",
    "data=synthetic",
    "precision=bf16",
    "run.threads=1",
    "io.allow_memory=true",
    "run.plots=false",
    "run.bar=false",
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """A finished run, small enough to travel between ranks."""

    exit_code: int
    folder: Path | None
    losses: tuple[float, ...]
    steps: tuple[Step, ...]
    validation: tuple[tuple[int, float], ...]
    digest: str  # of every parameter's name and bits, gathered
    sample: str


def trained(folder: Path, *overrides: str) -> Trained:
    """Runs `COMMON` and `overrides` into `folder`, in this process.

    On nvme with 3 slots unless `overrides` say more: by default the states of a model this small would all stay in
    slots, and nothing would be read.
    """
    digests: list[str] = []
    few = ["offload.slots=3"] if "offload=nvme" in overrides else []
    composed = compose.compose([*COMMON, f"run.dir={folder}", *few, *overrides])
    threads = torch.get_num_threads()
    try:
        outcome = train.run(composed, on_end=lambda engine: digests.append(digest(engine.model)))
    finally:
        torch.set_num_threads(threads)
    steps = tuple(outcome.history.steps)
    return Trained(
        outcome.exit_code,
        outcome.folder,
        tuple(step.loss for step in steps),
        steps,
        tuple(outcome.history.validation),
        digests[0] if digests else "",
        outcome.sample,
    )


@contextmanager
def after_step(number: int, act: Callable[[], object]) -> Iterator[None]:
    """Inside, `act` is called when a run has shown this step, the first time."""
    shown, due = progress.Told.step, [act]

    def told(self, line):
        shown(self, line)
        if line.step == number and due:
            due.pop()()

    with mock.patch.object(progress.Told, "step", told):
        yield


def stopped_after(step: int, by: int = signal.SIGINT) -> AbstractContextManager[None]:
    """Inside, a run gets this signal when it has shown this step."""
    return after_step(step, lambda: os.kill(os.getpid(), by))


def killed(interpreter: Any, folder: Path, step: int, *overrides: str) -> None:
    """A run into `folder` in a process of its own, which kill -9 ends when it has shown this step."""
    program = f"""
        import signal
        from tests.integration.zero_train.helpers import COMMON, stopped_after
        from zero_train.cli import app
        with stopped_after({step}, signal.SIGKILL):
            app.main({[*COMMON, *overrides, f"run.dir={folder}"]!r})
    """
    done = interpreter(program, folder.parent)
    assert done.returncode == -signal.SIGKILL, done.stderr


def begun(folder: Path, *words: str, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own, which runs in `folder`."""
    command = [sys.executable, "-u", "-m", "zero_train", *words]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))} | environment
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, **pipes)


def printed(process: subprocess.Popen[str], until: str | None = None, number: int = signal.SIGINT) -> str:
    """All that it prints until it ends. It gets the signal at a line that begins with `until`."""
    lines = []
    with process:
        try:
            for line in process.stdout or ():
                lines.append(line)
                if until and line.startswith(until):
                    process.send_signal(number)
            process.wait(timeout=240)
        finally:
            process.kill()
    assert "Traceback" not in "".join(lines), "".join(lines)
    return "".join(lines)


def digest(model: torch.nn.Module) -> str:
    """A hash of every parameter's bits. Collective."""
    total = hashlib.sha256()
    with torch.no_grad(), zero_core.gathered(model):
        for name, parameter in model.named_parameters():
            total.update(name.encode())
            total.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def left(folder: Path) -> list[str]:
    """Names of the files in `folder`, at any depth, but for the locks of run folders."""
    files = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return sorted(path.relative_to(folder).as_posix() for path in files)
