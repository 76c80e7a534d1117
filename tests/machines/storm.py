"""A storm of faults over one run of zero-train on two machines with two ranks each.

The run has to end as an undisturbed one does: with the same losses, and the same bits of parameters and optimizer
states.

python -m tests.machines.storm FOLDER [--faults 40] [--seed 0] [--max-restarts 3]

Each rank keeps every step on its machine's disk (run.durable), each machine's torchrun starts its ranks again, and the
run goes on by itself (run.resume=auto). Faults come at moments that the seed chooses, some while ranks start again:

kill    a rank is ended by SIGKILL
stop    a rank is stopped by SIGSTOP; its torchrun ends it 30 s after the others have ended
link    nothing crosses the link for 5 s, half of the time-out
disk    the disk of a machine, or the one with the run folder, is full for some seconds

A torchrun that has used up its restarts is started again. A rank is a fork of a process that has imported everything,
so that starts take little time (see `agent`). Fails if a bit or a loss differs, if no step is finished for `LIMIT`
seconds, or if a rank dies of a signal, other than SIGTERM as it starts, that was not sent to it here. FOLDER gets the
logs. A disk is a tmpfs of its own. Needs what `two` needs.
"""

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from tests.machines.two import ADDRESSES, PORT, Machines, Process, missing

TIMEOUT = 10  # run.timeout
CUT = 5.0  # seconds without a link
LIMIT = 600.0  # seconds without a finished step: a hang
RANKS = 2  # on each machine
KINDS = ("kill", "stop", "link", "disk")
DISKS = ("disk0", "disk1", "shared")  # of machine 0, of machine 1, and of run.dir
DISK_MIB = 64
KEYS = (
    *("recipe=tiny", "data=synthetic", "precision=bf16", "zero.stage=3", "offload=nvme", "offload.slots=3"),
    *("run.threads=1", "io.allow_memory=true", "run.plots=false", "run.bar=false", "run.resume=auto"),
    *("run.durable=process", "run.checkpoint_every=25"),
)
# Both machines have their own disk at one path, and a host name.
OWN = 'hostname "$1" && mount --bind "$2" "$3" && shift 3 && exec "$@"'
FINE = {0, 1, 2, 128 + signal.SIGTERM, -signal.SIGTERM}  # how a rank may end that nothing was done to


@dataclass
class Fault:
    """One of the storm. `early`: the next one comes while ranks start again."""

    kind: str
    gap: int  # steps since the last one
    pause: float  # seconds beside them
    target: int  # a rank, or the number of a disk: from 2 on, run.dir's
    length: float  # seconds that a disk is full
    early: bool
    began: float = 0.0
    step: int = 0  # the last one that was finished
    ends: str = ""  # how ranks ended until the next step
    seconds: float = 0.0  # until the next finished step

    def __str__(self) -> str:
        where = {"link": "", "disk": DISKS[min(self.target, 2)]}.get(self.kind, f"rank {self.target}")
        how = f"{self.kind} {where}".strip()
        return f"{how:11} after step {self.step:4}; next step in {self.seconds:5.1f} s; {self.ends or 'no rank ended'}"


def drawn(faults: int, seed: int) -> list[Fault]:
    dice = random.Random(seed)
    kinds = [KINDS[k % len(KINDS)] for k in range(faults)]
    dice.shuffle(kinds)
    return [
        Fault(kind, dice.randint(2, 6), dice.uniform(0, 0.5), dice.randrange(2 * RANKS), dice.uniform(1, 3), early)
        for number, kind in enumerate(kinds, 1)
        for early in [kind in ("kill", "stop") and dice.random() < 0.25 and number < faults]
    ]


class StormError(Exception):
    """What must not come of it."""


@dataclass
class Run:
    """The run on both machines, under a torchrun each."""

    machines: Machines
    folder: Path
    name: str
    steps: int
    restarts: int
    torchruns: list[Process] = field(default_factory=list)
    started: int = 0
    told: int = 0  # ends of ranks that were looked at
    hit: set[int] = field(default_factory=set)  # process numbers of ranks that a fault was for

    @property
    def ends(self) -> Path:
        return self.folder / f"{self.name}-ends.txt"

    @property
    def run_dir(self) -> Path:
        return self.folder / "shared" / self.name

    def begin(self) -> None:
        self.torchruns = [self._torchrun(machine) for machine in range(2)]

    def _torchrun(self, machine: int) -> Process:
        self.started += 1
        disk, local = self.folder / f"disk{machine}", self.folder / "local"
        words = ["unshare", "--mount", "--uts", "sh", "-c", OWN, "sh", f"machine{machine}", str(disk), str(local)]
        words += [sys.executable, "-m", "tests.machines.agent", "--nnodes", "2", "--nproc-per-node", str(RANKS)]
        words += ["--node-rank", str(machine), "--master-addr", ADDRESSES[0], "--master-port", str(PORT)]
        words += ["--max-restarts", str(self.restarts), "-m", "zero_train", *KEYS, f"run.steps={self.steps}"]
        words += [f"run.timeout={TIMEOUT}", f"run.dir={self.run_dir}", f"offload.nvme_paths=['{local}']"]
        return self.machines.start(machine, words, f"{self.name}-{self.started}-machine{machine}", ENDS=self.ends)

    def tend(self) -> bool:
        """Start torchruns again that have used up their restarts. Returns whether both have ended well."""
        codes = [process.popen.poll() for process in self.torchruns]
        for machine, code in enumerate(codes):
            if code:
                self.torchruns[machine] = self._torchrun(machine)
        return codes == [0, 0]

    def step(self) -> int:
        """The last finished one that stands in metrics.jsonl."""
        return max((line["step"] for line in self.lines()), default=0)

    def lines(self) -> list[dict[str, Any]]:
        found = []
        with suppress(OSError):
            for line in (self.run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
                with suppress(ValueError):  # it is being written, or the disk was full
                    found.append(json.loads(line))
        return found

    def ranks(self) -> dict[int, int]:
        """The process of each rank that there is."""
        noted = [tuple(map(int, line.split())) for line in self.noted()]
        ended = {words[:2] for words in noted if len(words) == 3}
        there = [words for words in noted if len(words) == 2 and words not in ended]
        ranks = dict(there)
        if len(ranks) < len(there):
            raise StormError(f"a rank runs twice: {there}")
        return ranks

    def noted(self) -> list[str]:
        """The whole lines of agent.py."""
        return self.ends.read_text().splitlines() if self.ends.exists() else []

    def new_ends(self) -> list[tuple[int, int, int]]:
        """Rank, process and code of each that ended since the last call. Raises StormError where none may end so."""
        ended = [line.split() for line in self.noted() if line.count(" ") == 2]
        found = [(int(rank), int(pid), int(code)) for rank, pid, code in ended[self.told :]]
        self.told = len(ended)
        for rank, pid, code in found:
            if code not in FINE and not (code == -signal.SIGKILL and pid in self.hit):
                raise StormError(f"rank {rank} (process {pid}) ended with {code}, and nothing was done to it")
        return found

    def until(self, condition: Callable[[], object], what: str) -> None:
        last, deadline = self.step(), time.monotonic() + LIMIT
        while not condition():
            self.tend()
            if (now := self.step()) > last:
                last, deadline = now, time.monotonic() + LIMIT
            if time.monotonic() > deadline:
                raise StormError(f"{what}: no step in {LIMIT:.0f} s; ranks {self.ranks()}")
            time.sleep(0.1)

    def goes_on(self, what: str) -> None:
        """Return when two more steps are finished, of which one began after this call."""
        wanted = self.step() + 2
        self.until(lambda: self.step() >= min(wanted, self.steps), f"a step after {what}")


def strike(run: Run, fault: Fault) -> None:
    """Returns when it is over, and what it was for is gone."""
    if fault.kind == "link":
        run.machines.cut()
        time.sleep(CUT)
        run.machines.mend()
    elif fault.kind == "disk":
        disk = run.folder / DISKS[min(fault.target, 2)]
        with suppress(OSError), (disk / "full").open("wb") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        time.sleep(fault.length)
        (disk / "full").unlink()
    else:
        run.until(lambda: fault.target in run.ranks(), f"rank {fault.target} starts")
        pid = run.ranks()[fault.target]
        run.hit.add(pid)
        os.kill(pid, signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
        if not fault.early:
            run.until(lambda: run.ranks().get(fault.target) != pid, f"process {pid} is gone")


def storm(run: Run, faults: Sequence[Fault], say: Callable[[str], object]) -> None:
    """Until the run has ended."""
    waiting: list[Fault] = []
    run.begin()
    for fault in faults:
        if not waiting:
            after = run.step() + fault.gap
            run.until(lambda after=after: run.step() >= after, f"step {after}")
        time.sleep(fault.pause * (20 if waiting else 1))
        fault.step, fault.began = run.step(), time.monotonic()
        if fault.step >= run.steps:
            raise StormError(f"the run was done before {fault.kind}: it needs more steps")
        strike(run, fault)
        waiting.append(fault)
        if fault.early:
            continue
        run.goes_on(str(fault))
        ended = Counter(f"rank {rank}: {code}" for rank, _, code in run.new_ends())
        for each in waiting:
            each.seconds = time.monotonic() - each.began
        fault.ends = ", ".join(f"{what}{f' ({count} times)' if count > 1 else ''}" for what, count in ended.items())
        for each in waiting:
            say(f"{each}{'' if each is fault else ', see the next line'}")
        waiting.clear()
    run.until(run.tend, "the end of the run")
    run.new_ends()


@contextmanager
def disks(folder: Path) -> Iterator[None]:
    with ExitStack() as stack:
        for name in DISKS:
            (folder / name).mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_MIB}m", "tmpfs", str(folder / name)], check=True)
            stack.callback(subprocess.run, ["umount", "--lazy", str(folder / name)], check=False)
        (folder / "local").mkdir()
        yield


def differences(one: Run, other: Run) -> list[str]:
    """Losses, parameters and optimizer states."""
    import torch
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    losses = [[(line["step"], line["loss"]) for line in run.lines()] for run in (one, other)]
    found = [] if losses[0] == losses[1] and len(losses[0]) == one.steps else ["losses"]
    values: list[dict[str, Any]] = []
    for run in (one, other):
        whole = run.folder / f"{run.name}.pt"
        dcp_to_torch_save(run.run_dir / "checkpoints" / f"step_{run.steps:07d}", whole)
        values.append(dict(_tensors("", torch.load(whole, weights_only=False))))
    assert any("exp_avg" in name for name in values[0]), list(values[0])
    if values[0].keys() != values[1].keys():
        return [*found, f"names {sorted(values[0].keys() ^ values[1].keys())}"]
    for name, value in values[0].items():
        if value.shape != values[1][name].shape or not torch.equal(
            value.contiguous().view(-1).view(torch.uint8), values[1][name].contiguous().view(-1).view(torch.uint8)
        ):
            found.append(name)
    return found


def _tensors(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _tensors(f"{name}/{key}", part)
    elif hasattr(value, "numel") and value.numel():
        yield name, value


def main(words: Sequence[str] | None = None, say: Callable[[str], object] = print) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.machines.storm", description=(__doc__ or "").split("\n\n")[0]
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--faults", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-restarts", type=int, default=3)
    given = parser.parse_args(words)
    if reason := missing():
        say(reason)
        return 2
    folder, faults = given.folder.absolute(), drawn(given.faults, given.seed)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with disks(folder), Machines(folder=folder / "logs") as machines:
        runs = [Run(machines, folder, name, 25 * given.faults + 10, given.max_restarts) for name in ("plain", "storm")]
        began = time.monotonic()
        try:
            storm(runs[1], faults, say)
            middle = time.monotonic()
            storm(runs[0], [], say)
            differ = differences(*runs)
        except StormError as error:
            say(f"FAILED: {error}; what ranks printed is in {folder / 'logs'}")
            return 1
        for kind in KINDS:
            seconds = [fault.seconds for fault in faults if fault.kind == kind]
            if seconds:
                span = f"median {median(seconds):.1f} s ({min(seconds):.1f}-{max(seconds):.1f})"
                say(f"{kind}: {len(seconds)} faults, next finished step after {span}")
        ends = Counter(int(line.split()[2]) for line in runs[1].noted() if line.count(" ") == 2)
        say(f"ranks ended: {', '.join(f'{count} with {code}' for code, count in sorted(ends.items()))}")
        say(f"torchrun was started {runs[1].started - 2} times again")
        say(f"{runs[0].steps} steps took {middle - began:.0f} s, undisturbed {time.monotonic() - middle:.0f} s")
        say(f"DIFFERENT: {', '.join(differ)}" if differ else "losses, parameters and optimizer states: the same bits")
        return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main(say=lambda text: print(text, flush=True)))
