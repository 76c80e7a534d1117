"""Chooses the CPUs for an update on the host of a GPU, from what /sys says. Starts no threads and pins none.

[Note: The host of a GPU]
When a model runs on the CPU, an update shares every core with its compute. When it runs on a GPU, the cores launch
kernels, move bytes and update at the same time. The physical cores of the GPU's NUMA node are divided among the ranks
whose GPUs are on it, and of its share each rank's update takes all but two, with one thread on each:

    NUMA node    0      1      2      3  …  15
                 rest   rest   pool   pool  pool
                 │      └ I/O and the threads that wait for it (both use the second hyperthreads as well)
                 └ Python, autograd, kernel launches

A page of memory belongs to the node of the thread that touches it first. A process that is bound to its cores before
it fills its buffers therefore has them close to its GPU and its update, and nothing else is done about memory.
The process's affinity (cpuset and taskset) and the CPU quota of its control group are respected.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SYS = Path("/sys")


@dataclass(frozen=True)
class Seat:
    """One rank of a host: the NUMA node of its GPU (None if unknown) and the CPUs that it may run on."""

    node: int | None
    allowed: tuple[int, ...]


@dataclass(frozen=True)
class Cores:
    """The numbers of a rank's CPUs. If there is only one core, it is in both ``pool`` and ``rest``."""

    pool: tuple[int, ...]  # one per physical core, for CpuStep(cores=…)
    rest: tuple[int, ...]  # for every other thread of the process, hyperthreads included
    rest_cores: int  # physical cores among `rest`
    node: int | None  # the NUMA node they belong to; None: unknown, or several

    def __str__(self) -> str:
        where = "" if self.node is None else f" of NUMA node {self.node}"
        count = f"{len(self.pool)} thread{'s' if len(self.pool) > 1 else ''}"
        return f"{count} on CPU {ranges(self.pool)}{where}; launches and I/O on {ranges(self.rest)}"


def beside_gpus(seats: Sequence[Seat], local_rank: int, root: Path = SYS) -> Cores:
    """Returns the cores of rank ``local_rank``. ``seats`` has all ranks of the host, ``root`` is where /sys is.

    Ranks that may run on the same CPUs divide them. A node none of whose CPUs is allowed counts as unknown.
    """
    mine = seats[local_rank]
    usable = [_usable(seat, root) for seat in seats]
    sharers = [rank for rank, cpus in enumerate(usable) if cpus & usable[local_rank]]
    cores = physical(usable[local_rank], root)
    turn, count = sharers.index(local_rank), len(sharers)
    share = cores[turn * len(cores) // count : (turn + 1) * len(cores) // count] or cores
    quota = cpu_quota(root)
    if quota is not None:
        share = share[: max(1, int(quota / len(seats)))]
    kept = 2 if len(share) >= 4 else 1 if len(share) >= 2 else 0
    on_node = mine.node is not None and usable[local_rank] <= node_cpus(mine.node, root)
    return Cores(
        pool=tuple(core[0] for core in share[kept:]),
        rest=tuple(sorted(cpu for core in share[:kept] or share for cpu in core)),
        rest_cores=kept or len(share),
        node=mine.node if on_node else None,
    )


def seat_of(device: torch.device, root: Path = SYS) -> Seat:
    """Returns this process's seat for a device. The node is unknown if torch does not tell the PCI address."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)
    address = pci_address(properties(device))
    return Seat(None if address is None else numa_node(address, root), tuple(sorted(os.sched_getaffinity(0))))


def pci_address(properties: object) -> str | None:
    """Returns an address such as `0000:1b:00.0` from a device's properties, or None if torch does not tell."""
    domain, bus, device = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return None if bus is None or device is None else f"{domain or 0:04x}:{bus:02x}:{device:02x}.0"


def numa_node(address: str, root: Path = SYS) -> int | None:
    """Returns the NUMA node of a PCI device, or None if the machine has only one (-1) or does not say."""
    text = _read(root / "bus/pci/devices" / address / "numa_node")
    try:
        node = int(text)
    except ValueError:
        return None
    return node if node >= 0 else None


def node_cpus(node: int, root: Path = SYS) -> set[int]:
    """Returns the CPUs of a NUMA node, none if the machine does not say."""
    return _parsed(_read(root / f"devices/system/node/node{node}/cpulist"))


def physical(cpus: Iterable[int], root: Path = SYS) -> list[tuple[int, ...]]:
    """Groups CPUs by physical core (hyperthreads together), in the order of each core's first CPU."""
    cores: dict[frozenset[int], list[int]] = {}
    for cpu in sorted(cpus):
        siblings = _parsed(_read(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or {cpu}
        cores.setdefault(frozenset(siblings), []).append(cpu)
    return [tuple(each) for each in cores.values()]


def cpu_quota(root: Path = SYS) -> float | None:
    """Returns how many CPUs' worth of time the control group of this process may use, or None without a limit."""
    words = _read(root / "fs/cgroup/cpu.max").split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def granted(cpus: Iterable[int]) -> set[int]:
    """Returns those of these CPUs that the kernel lets this process run on. Restores this thread's affinity.

    The affinity alone does not tell, because a thread may be bound to fewer CPUs than its process may use.
    """
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, set(cpus))
        return os.sched_getaffinity(0) & set(cpus)
    except (OSError, ValueError, OverflowError):
        return set()
    finally:
        os.sched_setaffinity(0, before)


def ranges(cpus: Iterable[int]) -> str:
    """Formats CPUs as a kernel list: `0-3,8` for 0, 1, 2, 3, 8."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _usable(seat: Seat, root: Path) -> set[int]:
    allowed = set(seat.allowed)
    return (allowed & node_cpus(seat.node, root) if seat.node is not None else allowed) or allowed


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _parsed(text: str) -> set[int]:
    """Parses a kernel list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
