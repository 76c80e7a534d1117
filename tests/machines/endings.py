"""Jobs of two ranks that end in different ways, and the exit code of each rank. None may die of SIGABRT as it exits.

python -m tests.machines.endings [--jobs 200] [--seed 0]

normal    both ranks train to the end
error     a rank raises in the middle of the run
kill      a rank is ended by SIGKILL
time-out  a rank is stopped by SIGSTOP, until the other one has ended; then SIGKILL ends it

A job is a loop over `zero_core.shard` at a stage, or a run of zero-train with its states on nvme, of which each step is
durable. Prints a table, and fails if a rank ended with another code than the way of its job allows, or did not end.
Each rank is a fork of this process, which has imported everything, and comes to the interpreter's own end.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

import tests.preload  # noqa: F401  as much as can be before the forks
from tests.integration.zero_train.helpers import COMMON
from tests.machines import training
from zero_train import app, train
from zero_train.loop import Step

TIMEOUTS = {"time-out": 5}  # seconds of the process group, and of all others:
TIMEOUT = 60
LIMIT = 300.0  # seconds in which a job has to end
ENDINGS = {"normal": (0, 0), "error": (1, 1), "kill": (-9, 1), "time-out": (-9, 1)}  # of the rank it is for, the other
STEPS = 6
AT_ONCE = 4  # jobs
PROGRAMS = ("stage 0", "stage 2", "stage 3", "zero-train")


@dataclass(frozen=True)
class Job:
    """`rank`: the one that the ending is for. `after`: of how many of its steps; `pause`: seconds after that."""

    ending: str
    program: str
    rank: int
    after: int
    pause: float


def drawn(jobs: int, seed: int) -> list[Job]:
    dice = random.Random(seed)
    kinds = list(itertools.islice(itertools.cycle(itertools.product(ENDINGS, PROGRAMS)), jobs))
    return [Job(*kind, dice.randrange(2), dice.randint(1, 4), dice.uniform(0, 0.1)) for kind in kinds]


def rank_of(job: Job, rank: int, port: int, folder: Path) -> int:
    """In a fork. Prints its steps. Returns the exit code, or raises."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
    steps = STEPS if job.ending == "normal" else 1_000_000
    timeout = TIMEOUTS.get(job.ending, TIMEOUT)

    def told(number: int) -> None:
        os.write(1, f"step {number}:\n".encode())  # zero-train has sys.stdout of other ranks written to a file
        if job.ending == "error" and (rank, number) == (job.rank, job.after):
            raise RuntimeError("this rank was told to fail")

    if job.program == "zero-train":
        shown = train.Told.step

        def step(self: train.Told, line: Step) -> None:
            shown(self, line)
            told(line.step)

        train.Told.step = step  # type: ignore[method-assign]
        keys = ["offload=nvme", "run.durable=process", f"run.steps={steps}", f"run.timeout={timeout}"]
        return app.main([*COMMON, *keys, f"run.dir={folder / 'run'}"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))
    for number, _ in training.losses(int(job.program[-1]), steps):
        told(number + 1)
    dist.destroy_process_group()
    return 0


class Running:
    """A job whose ranks are forks of this process."""

    def __init__(self, job: Job, folder: Path) -> None:
        self.job, self.folder, self.began = job, folder, time.monotonic()
        self.codes: list[int | None] = [None, None]
        self.struck = job.ending in ("normal", "error")
        folder.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.ranks = [self._start(rank, port) for rank in range(2)]

    def _start(self, rank: int, port: int) -> int:
        process = os.fork()
        if process:
            return process
        log = os.open(self.log(rank), os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.exit(rank_of(self.job, rank, port, self.folder))  # past main, and through the interpreter's own end

    def log(self, rank: int) -> Path:
        return self.folder / f"rank{rank}.log"

    def over(self) -> bool:
        """Strikes when it is time. Raises AssertionError where a rank does not end."""
        job, other = self.job, 1 - self.job.rank
        for rank, process in enumerate(self.ranks):
            if self.codes[rank] is None and (found := os.waitpid(process, os.WNOHANG))[0]:
                self.codes[rank] = os.waitstatus_to_exitcode(found[1])
        log = self.log(job.rank)
        if not self.struck and log.exists() and f"step {job.after}:" in log.read_text(errors="replace"):
            time.sleep(job.pause)
            os.kill(self.ranks[job.rank], signal.SIGKILL if job.ending == "kill" else signal.SIGSTOP)
            self.struck = True
        if job.ending == "time-out" and self.codes[other] is not None and self.codes[job.rank] is None:
            os.kill(self.ranks[job.rank], signal.SIGKILL)
        late = time.monotonic() - self.began > LIMIT
        assert not late, f"{job} has not ended: {[self.log(rank).read_text() for rank in range(2)]}"
        return None not in self.codes


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machines.endings", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    jobs, running, began = drawn(given.jobs, given.seed), [], time.monotonic()
    table: Counter[tuple[str, str, int]] = Counter()
    wrong = 0
    folder = tempfile.mkdtemp()  # which no fork removes as it leaves here
    numbers = itertools.count()
    while jobs or running:
        while jobs and len(running) < AT_ONCE:
            running.append(Running(jobs.pop(0), Path(folder, str(next(numbers)))))
        for each in [job for job in running if job.over()]:
            running.remove(each)
            found = each.codes[each.job.rank], each.codes[1 - each.job.rank]
            for whose, code in zip(("its rank", "the other"), found, strict=True):
                table[each.job.ending, whose, code] += 1
            if found != ENDINGS[each.job.ending]:
                wrong += 1
                print(each.job, found, *(each.log(rank).read_text() for rank in range(2)), sep="\n", flush=True)
        time.sleep(0.02)
    shutil.rmtree(folder)
    for (ending, whose, code), count in sorted(table.items()):
        print(f"{ending:8}  {whose:9}  exit code {code:3}: {count}")
    print(f"{given.jobs} jobs in {time.monotonic() - began:.0f} s, {wrong} with another code than their ending allows")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
