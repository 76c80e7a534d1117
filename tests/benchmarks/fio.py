"""Runs fio on a file, if it is installed: the peer that zero_nvme is compared with."""

import json
import os
import shutil
import subprocess
from dataclasses import dataclass

from zero_nvme.tools.measure import Kind

_RW = {"read": "read", "write": "write", "mixed": "rw"}  # rw: half the blocks are read, half are written


@dataclass(frozen=True)
class FioResult:
    gigabytes_per_second: float  # read and written together
    cpu_seconds_per_gib: float


def available() -> bool:
    return shutil.which("fio") is not None


def run(
    path: str, kind: Kind, *, nbytes: int, block_bytes: int, depth: int, engine: str = "io_uring", huge: bool = True
) -> FioResult:
    """Measures one sequential pass with O_DIRECT over an existing file of `nbytes`. Writing overwrites the file.

    `huge` puts the buffers on 2 MiB pages, as ours are. Raises OSError with fio's own message if it fails.
    """
    environment = dict(os.environ)
    if huge:
        environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
    command = [
        *("fio", "--name=peer", f"--filename={path}", f"--rw={_RW[kind]}", "--direct=1"),
        *(f"--size={nbytes}", f"--bs={block_bytes}", f"--iodepth={depth}", f"--ioengine={engine}"),
        *("--output-format=json", "--mem=malloc", "--overwrite=1", "--refill_buffers=0", "--thread"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise OSError(done.returncode, f"fio: {done.stderr.strip()}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    directions = [job[name] for name in ("read", "write") if job[name]["io_bytes"]]
    moved = sum(direction["io_bytes"] for direction in directions)
    seconds = max(direction["runtime"] for direction in directions) / 1000
    cpu = (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000
    return FioResult(moved / seconds / 1e9, cpu / (moved / 2**30))
