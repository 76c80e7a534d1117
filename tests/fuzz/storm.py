"""A storm of kill -9 over one durable run of zero-train: `python -m tests.fuzz.storm FOLDER --kills 100 --ranks 2`.

A process is killed in a forward, a backward, an update, a sync, a write of a manifest, a resumption or the copy of a
checkpoint in the background, and the next one goes on with run.resume=auto. At last one is left alone. Fails if more is
lost than the step that had not returned and the one before it, or if the weights are not those of an uninterrupted run,
bit for bit. Processes are forked from one that has imported everything, so that most of the time is training.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import re
import shutil
import signal
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.integration.zero_train.helpers import trained

MOMENTS: dict[str, tuple[tuple[str, str], ...]] = {
    "forward": (("zero_train.loop", "loss_of"),),
    "backward": (("zero_core.runtime.hooks.Engine", "collect"),),
    "update": (("zero_optim_cpu.CpuStep", "update"), ("zero_optim_cpu.CpuStep", "start")),
    "sync": (("zero_nvme.Slab", "sync"),),
    "manifest": (("zero_offload.tiles.generations.Generations", "_write"),),
    "resume": (("zero_core.durable._Run", "restore"), ("zero_offload.tiles.generations.Generations", "adopt")),
    "copy": (
        ("zero_offload.tiles.generations.Generations", "read_pinned"),
        ("zero_core.checkpoint.files.StreamingWriter", "finish"),
    ),
}
MOST_CALLS = {"forward": 4, "backward": 40, "update": 30, "sync": 6, "manifest": 6, "resume": 1, "copy": 40}


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def arm(moment: str, generator: random.Random) -> None:
    """The process dies before, in or after one of the next calls of the moment's functions."""
    left = [generator.randrange(1, MOST_CALLS[moment] + 1)]
    where, seconds = generator.choice(("before", "in", "after")), generator.uniform(0, 0.003)

    def wrapped(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and where == "before":
                die()
            if left[0] == 0 and where == "in":
                threading.Timer(seconds, die).start()
            found = function(*arguments, **options)
            if left[0] == 0:
                die()
            return found

        return call

    for owner, name in MOMENTS[moment]:
        module, _, attribute = owner.rpartition(".")
        found = sys.modules.get(owner) or getattr(importlib.import_module(module), attribute)
        setattr(found, name, wrapped(getattr(found, name)))


def start(given: argparse.Namespace, rank: int, port: int, log: Path, moment: str | None, seed: int) -> int:
    """A forked process that runs one rank; returns its number."""
    process = os.fork()
    if process:
        return process
    fd = os.open(log, os.O_CREAT | os.O_TRUNC | os.O_WRONLY)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    code = 1
    try:
        if given.ranks > 1:
            ranks = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": given.ranks, "MASTER_PORT": port}
            os.environ |= {key: str(value) for key, value in ranks.items()} | {"MASTER_ADDR": "127.0.0.1"}
        if moment is not None:
            arm(moment, random.Random(seed))
        done = trained(given.folder / "run", *options(given), f"run.durable={given.durable}", "run.resume=auto")
        (given.folder / f"digest{rank}").write_text(done.digest)
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def options(given: argparse.Namespace) -> list[str]:
    return [f"offload={given.offload}", f"run.steps={given.steps}", "zero.stage=3", "run.checkpoint_every=2"]


def together(given: argparse.Namespace, moment: str | None, seed: int) -> bool:
    """Run all ranks, one of them armed. When one dies the others are killed too. Returns whether all ended well."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    armed, logs = seed % given.ranks, [given.folder / f"log{rank}" for rank in range(given.ranks)]
    running = {
        start(given, rank, port, logs[rank], moment if rank == armed else None, seed) for rank in range(given.ranks)
    }
    codes = []
    while running:
        process, status = os.wait()
        running.discard(process)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1]:
            for other in running:
                os.kill(other, signal.SIGKILL)
    fine = set(codes) == {0} or -signal.SIGKILL in codes  # the others may have noticed before they were killed
    assert fine, f"{codes}: {[log.read_text()[-3000:] for log in logs]}"
    return not any(codes)


def returned(folder: Path) -> int:
    """The last step whose line is in metrics.jsonl: it had returned."""
    path = folder / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    steps = [0]
    for line in lines:
        try:
            steps.append(json.loads(line).get("step", 0))
        except ValueError:  # the process was killed while it wrote it
            pass
    return max(steps)


def continued(folder: Path) -> int | None:
    """The step after which the last process went on; None if it did not come that far."""
    text = (folder / "log0").read_text()
    found = re.search(r"continuing after step (\d+)", text)
    return int(found[1]) if found else 0 if "beginning at step 1" in text else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--offload", default="nvme")
    parser.add_argument("--durable", default="power", choices=["power", "process"])
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for package in ("zero_nvme", "zero_optim_cpu", "transformers.models.llama"):
        importlib.import_module(package)
    given.steps, begun = 2 * given.kills + 20, time.perf_counter()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    kills: Counter[str] = Counter()
    lost: Counter[int] = Counter()
    seed = given.seed
    while sum(kills.values()) < given.kills:
        moment = min(MOMENTS, key=lambda name: (kills[name], name))
        before, seed = returned(given.folder), seed + 1
        if together(given, moment, seed):
            raise SystemExit(f"the run ended after {sum(kills.values())} kills: give it more steps")
        kills[moment] += 1
        after = continued(given.folder)
        if after is not None and before:
            lost[before - after] += 1
            assert after >= before - 1, f"step {before} had returned, and the run went on after step {after}"
    assert together(given, None, 0), "the last process did not end well"
    plain = given.folder / "plain"
    given.folder, ranks = plain, given.ranks
    plain.mkdir()
    whole = argparse.Namespace(**{**vars(given), "durable": "null"})
    assert together(whole, None, 0)
    ends = {(folder / f"digest{rank}").read_text() for folder in (plain, plain.parent) for rank in range(ranks)}
    print(
        f"{sum(kills.values())} kills ({', '.join(f'{n} in {name}' for name, n in sorted(kills.items()))}) over "
        f"{given.steps} steps on {ranks} ranks, {time.perf_counter() - begun:.0f} s; of the steps that had returned, "
        f"lost: {dict(sorted(lost.items()))}; weights {'equal' if len(ends) == 1 else 'DIFFER'}"
    )
    raise SystemExit(len(ends) != 1)


if __name__ == "__main__":
    main()
