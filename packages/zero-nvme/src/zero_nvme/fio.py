"""Runs fio on a file, where it is installed, as a peer to be measured against."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass


@dataclass(frozen=True)
class FioResult:
    gigabytes_per_second: float
    cpu_seconds_per_gib: float


def available() -> bool:
    return shutil.which("fio") is not None


def run(
    path: str, *, write: bool, nbytes: int, block_bytes: int, depth: int, engine: str = "io_uring", huge: bool = True
) -> FioResult:
    """One sequential pass of O_DIRECT over an existing file of `nbytes`, which a write overwrites.

    `huge`: buffers on 2 MiB pages, as ours are. Raises OSError with fio's own words when it fails.
    """
    environment = dict(os.environ)
    if huge:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    command = [
        *("fio", "--name=peer", f"--filename={path}", f"--rw={'write' if write else 'read'}", "--direct=1"),
        *(f"--size={nbytes}", f"--bs={block_bytes}", f"--iodepth={depth}", f"--ioengine={engine}"),
        *("--output-format=json", "--mem=malloc", "--overwrite=1", "--refill_buffers=0", "--thread"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise OSError(done.returncode, f"fio: {done.stderr.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    direction = job["write" if write else "read"]
    seconds = direction["runtime"] / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * seconds
    return FioResult(direction["io_bytes"] / seconds / 1e9, cpu / (direction["io_bytes"] / 2**30))
