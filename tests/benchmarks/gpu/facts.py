"""What the machine is and does. Each part fails alone, and says why.

Figures of copies are GB/s, the best of several; those of memory are GiB. The part `probe` is what the planner is given.
"""

import importlib.metadata
import os
import platform
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

from tests.benchmarks.gpu.stage import GIB, Missing, Piece

PACKAGES = (
    "torch transformers accelerate triton deepspeed hydra-core omegaconf aiofiles zstandard pybind11 pytest "
    "pytest-xdist pytest-timeout matplotlib"
).split()
ROUNDS = 5


def run(piece: Piece) -> None:
    for part in (versions, memory, device, link, probe, loaded):
        piece.attempt(part.__name__, partial(part, piece))


def versions(piece: Piece) -> dict[str, Any]:
    import torch

    def of(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    revision = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return {name: of(name) for name in PACKAGES} | {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": line_of("/proc/cpuinfo", "model name"),
        "cpus": len(os.sched_getaffinity(0)),
        "cuda": torch.version.cuda,
        "swaps_storages": hasattr(torch.UntypedStorage, "_swap_data_ptr_"),
        "commit": revision.stdout.strip() or None,
    }


def memory(piece: Piece) -> dict[str, Any]:
    """GiB. A virtual machine may show less than it is given once it is used."""
    import resource
    import shutil

    import zero_offload

    locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return {
        "available_gib": zero_offload.available_host_bytes() / GIB,
        "total": line_of("/proc/meminfo", "MemTotal"),
        "huge_pages": line_of("/sys/kernel/mm/transparent_hugepage/enabled", ""),
        "may_be_locked_gib": None if locked == resource.RLIM_INFINITY else locked / GIB,
        "free_for_slabs_gib": shutil.disk_usage(piece.options["folder"]).free / GIB,
    }


def line_of(path: str, begin: str) -> str | None:
    """The rest of the first line that begins so."""
    try:
        with open(path) as file:
            found = next((line for line in file if line.startswith(begin)), None)
    except OSError:
        return None
    return found and found.removeprefix(begin).strip(" :\t\n")


def device(piece: Piece) -> dict[str, Any]:
    import torch

    _needs_device(piece)
    properties, (free, total) = torch.cuda.get_device_properties(0), torch.cuda.mem_get_info()
    return {
        "name": properties.name,
        "total_gib": total / GIB,
        "free_gib": free / GIB,  # without this process's context
        "processors": properties.multi_processor_count,
        "capability": f"{properties.major}.{properties.minor}",
    }


def _needs_device(piece: Piece) -> None:
    if piece.options["device"] == "cpu":
        raise Missing("this is a CPU")


def _seconds(work: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """The least of several, after one that is not timed."""
    from tests.benchmarks.step_worker import wait_for_kernels

    times = []
    for _ in range(rounds + 1):
        wait_for_kernels()
        begun = time.perf_counter()
        work()
        wait_for_kernels()
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def link(piece: Piece) -> dict[str, float]:
    """GB/s between host and device: of registered memory, as the stores have it, of torch's pinned, and of pageable."""
    import torch

    from zero_offload.memory.arena import Arena
    from zero_offload.memory.host_registration import register, unregister

    _needs_device(piece)
    nbytes, where = 512 << 20, torch.device("cuda", 0)
    arena = Arena(2 * nbytes)
    host = arena.whole()
    register(host, where)
    up, down = host.split(nbytes)
    pinned, pageable = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True), torch.ones(nbytes, dtype=torch.uint8)
    first, second = (torch.empty(nbytes, dtype=torch.uint8, device=where) for _ in range(2))
    lanes = [torch.cuda.Stream() for _ in range(2)]

    def to_device(piece_bytes: int = nbytes) -> None:
        with torch.cuda.stream(lanes[0]):
            for start in range(0, nbytes, piece_bytes):
                part = slice(start, start + piece_bytes)
                first[part].copy_(up[part], non_blocking=True)

    def to_host() -> None:
        with torch.cuda.stream(lanes[1]):
            down.copy_(second, non_blocking=True)

    def both() -> None:
        to_device()
        to_host()

    def rate(work: Callable[[], Any], moved: int = nbytes) -> float:
        return moved / _seconds(work) / 1e9

    found = {"to_device": rate(to_device), "to_host": rate(to_host), "both_summed": rate(both, 2 * nbytes)}
    found |= {f"to_device_by_{mib}_mib": rate(partial(to_device, mib << 20)) for mib in (1, 8, 64)}
    found["pinned_to_device"] = rate(lambda: first.copy_(pinned, non_blocking=True))
    found |= {"pageable_to_device": rate(lambda: first.copy_(pageable)), "pageable_to_host": rate(first.cpu)}
    unregister(host, where)
    return found


@cache
def update_cores(device: str) -> tuple[int, ...] | None:
    """The host's update's cores beside a GPU. Binds this process to the others, so it is asked once."""
    from tests.benchmarks.step_worker import beside_gpu

    return beside_gpu({"device": device})


def probe(piece: Piece) -> dict[str, Any]:
    """zero_offload.probe, with the host's update on the cores that it has beside a GPU. It binds this process."""
    import torch

    import zero_offload
    import zero_optim_cpu

    where, dtype = piece.options["device"], getattr(torch, piece.options["dtype"])
    step = zero_optim_cpu.CpuStep("split", cores=update_cores(where))
    width, tokens = (64, 64) if piece.dry else (2560, 2048)
    found = zero_offload.probe(device=where, step=step, parameter_dtype=dtype, hidden_size=width, tokens=tokens)
    return dict(found.to_dict())


def loaded(piece: Piece) -> dict[str, float]:
    """The host's update and copies both ways at once: how much faster a step's update is if the device has a share.

    update, link: GB/s alone; update_loaded, link_loaded: beside each other. gain: elements updated a second by the host
    and by a device that is brought and gives back 12 bytes an element (parameter, remainder, two moments), over those
    of the host alone. share: of the tiles, for which both take as long. On a CPU a thread's copies inside of memory
    stand for the link.
    """
    import torch

    import zero_optim_cpu
    from zero_offload.planning import probing
    from zero_offload.streams import Streams

    where, dtype = probing.indexed(torch.device(piece.options["device"])), getattr(torch, piece.options["dtype"])
    step = zero_optim_cpu.CpuStep("split", cores=update_cores(where.type))
    tiles = 2 if piece.dry else probing.SERVER_TILES
    update, nbytes = probing.updates(step, dtype, tiles)
    moved = (16 if piece.dry else 512) << 20
    streams = None if where.type == "cpu" else Streams(where, torch.empty(0, dtype=torch.uint8))
    memory = torch.empty(2 * moved, dtype=torch.uint8) if streams is None else streams.host(2 * moved)
    here, there = memory.fill_(1).split(moved), torch.ones(2 * moved, dtype=torch.uint8, device=where).split(moved)

    def copies() -> None:
        if streams is None:
            there[0].copy_(here[0])
            here[1].copy_(there[1])
            return
        for mark in [streams.copy("swap_in", there[0], here[0]), streams.copy("swap_out", here[1], there[1])]:
            mark.wait()

    def beside(other: Callable[[], None], work: Callable[[], None]) -> float:
        stop = threading.Event()

        def busy() -> None:
            while not stop.is_set():
                other()

        thread = threading.Thread(target=busy)
        thread.start()
        try:
            return _seconds(work)
        finally:
            stop.set()
            thread.join()

    found = {"update": nbytes / _seconds(update) / 1e9, "link": 2 * moved / _seconds(copies) / 1e9}
    found["update_loaded"] = nbytes / beside(copies, update) / 1e9
    found["link_loaded"] = 2 * moved / beside(update, copies) / 1e9
    each = nbytes / tiles / probing.UPDATE_NUMEL  # bytes of an element
    host, device = found["update_loaded"] / each, found["link_loaded"] / 2 / 12
    return found | {"gain": (host + device) / (found["update"] / each), "share": device / (host + device)}
