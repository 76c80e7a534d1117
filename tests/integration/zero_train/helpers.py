"""Small runs in this process, and what they leave: shared by the integration tests of zero-train."""

import dataclasses
import hashlib
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
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
def stopped_after(step: int, by: int = signal.SIGINT) -> Iterator[None]:
    """Inside, a run gets this signal when it has shown this step."""
    shown = progress.Told.step

    def told(self, line):
        shown(self, line)
        if line.step == step:
            os.kill(os.getpid(), by)

    with mock.patch.object(progress.Told, "step", told):
        yield


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
