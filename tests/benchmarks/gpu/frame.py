"""Runs stages one after another: each a process with a limit of its own, whose results stay whatever becomes of it.

Owns the processes, their limits, and which stages a call repeats. Imports no torch, and touches no device: nothing
that hangs there hangs here.

[Note: Calls]
A call lasts `--seconds`. A stage begins only if its whole limit is left of them, else it waits for the next call. The
first stage of a call begins in any case, with what there is. What has ended, well or not, is not repeated by a later
call. So a machine that allows ten minutes a command sees every stage after a few commands, and one that allows more
sees all in one.
"""

import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import summary
from tests.benchmarks.gpu.stage import read, write

ROOT = Path(__file__).parents[3]
PACKING_SECONDS = 10  # of a call, for the picture and the archive
ENVIRONMENT = {  # where the caller says nothing else
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
    "PYTORCH_ALLOC_CONF": "expandable_segments:True",  # its name from torch 2.9 on
}
START = "from tests.benchmarks.gpu.stage import main; main()"
STUBS = {  # in place of a stage's program, to try this one: what it knew before it broke stays
    "hang": """echo '{"begun": true}' > "$0"; setsid sleep 600 & echo $! > "$0.child"; wait""",
    "fail": """echo '{"begun": true}' > "$0"; echo "it broke" >&2; exit 3""",
    "pass": """echo '{"begun": true}' > "$0" """,
}
STUB_SECONDS = 1


@dataclass(frozen=True)
class Stage:
    """`module` of this package, for at most `limit` seconds, or `dry` at toy size."""

    name: str
    module: str
    limit: int
    dry: int
    what: str


def run(
    stages: Sequence[Stage], options: Mapping[str, Any], *, seconds: float, again: bool, stubs: Mapping[str, str]
) -> bool:
    """Whether every stage that ran here ran well. `stubs`: by stage, which of STUBS takes its place."""
    out, until = Path(options["out"]), time.monotonic() + seconds - PACKING_SECONDS
    out.mkdir(parents=True, exist_ok=True)
    results = read(out / "results.json") or {"dry": options["dry"], "stages": {}}
    if results["dry"] != options["dry"]:
        raise SystemExit(
            f"{out} has the results of a run {'at toy size' if results['dry'] else 'on a GPU'}: give --out"
        )
    records, ran = results["stages"], list[str]()
    for stage in stages:
        limit, left = stage.dry if options["dry"] else stage.limit, until - time.monotonic()
        if stage.name in records and not again:
            print(f"-- {stage.name} ended in an earlier call ({records[stage.name]['told']}); --again repeats it")
            continue
        if ran and limit > left:
            print(f"-- {stage.name} waits for the next call: it may take {limit} s, {max(0, left):.0f} s are left")
            continue
        limit = STUB_SECONDS if stubs.get(stage.name) == "hang" else max(1, min(limit, left))
        print(f"-- {stage.name}, at most {limit:.0f} s: {stage.what}", flush=True)
        (out / f"{stage.name}.json").unlink(missing_ok=True)
        records[stage.name] = record = _one(stage, dict(options), limit, stubs.get(stage.name))
        ran.append(stage.name)
        print(f"   {record['told']}, {record['seconds']:.0f} s", flush=True)
        write(out / "results.json", results | {"pieces": {name: read(out / f"{name}.json") for name in records}})
        summary.make(out)
    return all(records[name]["told"] == "done" for name in ran)


def _one(stage: Stage, options: dict[str, Any], limit: float, stub: str | None) -> dict[str, Any]:
    """Its record. Whatever it started has ended, and the folder for its slabs is gone."""
    begun, piece = time.monotonic(), Path(options["out"], f"{stage.name}.json")
    folder = tempfile.mkdtemp(prefix="bench_gpu_", dir=options["folder"])
    given = options | {"stage": stage.name, "limit": limit, "folder": str(Path(folder).absolute())}
    command = [sys.executable, "-c", START, stage.module, json.dumps(given)]
    if stub is not None:
        command = ["sh", "-c", STUBS[stub], str(piece)]
    log = piece.with_suffix(".log")
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, cwd=ROOT, env=_environment(),
            start_new_session=True,
        )  # fmt: skip
    try:
        _let(process.pid)
        code = process.wait(limit)
        told = "done" if code == 0 else f"failed, exit {code}: {_last_line(log)}"
    except subprocess.TimeoutExpired:
        told = f"stopped at its limit of {limit:.0f} s"
    finally:
        _end(process)
        shutil.rmtree(folder, ignore_errors=True)
    return {"told": told, "seconds": round(time.monotonic() - begun, 1), "date": time.strftime("%Y-%m-%d %H:%M")}


def _let(pid: int) -> None:
    """The process may lock as much memory and open as many files as is allowed. If memory runs out, it is what goes."""
    with suppress(OSError):
        for each in (resource.RLIMIT_MEMLOCK, resource.RLIMIT_NOFILE):
            hard = resource.prlimit(pid, each)[1]
            resource.prlimit(pid, each, (hard, hard))
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")


def _environment() -> dict[str, str]:
    """With the paths that this interpreter has."""
    return ENVIRONMENT | os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the process, its group, and what descends from it in groups of its own."""
    family = list(_descendants(process.pid))
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        print(f"   process {process.pid} waits in the kernel and cannot be ended", flush=True)


def _descendants(pid: int) -> Iterator[int]:
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in map(int, children.read_text().split()):
                yield child
                yield from _descendants(child)


def _last_line(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:400] if lines else "it said nothing"
