"""Which CPUs an update takes on the host of a GPU. Facts of /sys in, numbers out: starts no thread, binds nothing.

[Note: The host of a GPU]
On the CPU an update shares every core with compute. Beside a GPU the cores have nothing to compute, but three things
to do at once: launch kernels, move bytes, update. So of the physical cores of the GPU's NUMA node, divided among the
ranks whose GPUs are on it, the update takes all but two, one thread each:

    NUMA node    0      1      2      3  …  15
                 rest   rest   pool   pool  pool
                 │      └ I/O, and what waits for it (a second hyperthread of these two is theirs as well)
                 └ Python, autograd, kernel launches

Memory is the node of whoever touches a page first. A process that is bound to its cores before it fills its buffers
therefore has them beside its GPU and its update; nothing else is done about memory.
Respected: the process's affinity (cpuset and taskset), and the CPU quota of its control group.
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
    """What one rank of a host has: the NUMA node of its GPU (None: not known) and the CPUs that it may run on."""

    node: int | None
    allowed: tuple[int, ...]


@dataclass(frozen=True)
class Cores:
    """CPUs of one rank by their numbers. Where there is one core only, both have it."""

    pool: tuple[int, ...]  # one a physical core, for CpuStep(cores=…)
    rest: tuple[int, ...]  # for every other thread of the process, hyperthreads included
    rest_cores: int  # physical cores among `rest`
    node: int | None  # the NUMA node that they are of; None: not known, or of any

    def __str__(self) -> str:
        where = "" if self.node is None else f" of NUMA node {self.node}"
        count = f"{len(self.pool)} thread{'s' if len(self.pool) > 1 else ''}"
        return f"{count} on CPU {ranges(self.pool)}{where}; launches and I/O on {ranges(self.rest)}"


def beside_gpus(seats: Sequence[Seat], local_rank: int, root: Path = SYS) -> Cores:
    """The cores of rank `local_rank` among the ranks of its host, `seats`. `root`: where /sys is.

    Ranks that may run on the same CPUs divide them. A node none of whose CPUs is allowed is as one that is not known.
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
    """This process's seat for a device. Its node is not known where torch does not tell the device's PCI address."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", lambda _: None)
    address = pci_address(properties(device))
    return Seat(None if address is None else numa_node(address, root), tuple(sorted(os.sched_getaffinity(0))))


def pci_address(properties: object) -> str | None:
    """`0000:1b:00.0` from what torch tells of a device; None: this torch does not tell."""
    domain, bus, device = (getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device"))
    return None if bus is None or device is None else f"{domain or 0:04x}:{bus:02x}:{device:02x}.0"


def numa_node(address: str, root: Path = SYS) -> int | None:
    """The NUMA node of a PCI device; None: the machine has one only (-1), or does not say."""
    text = _read(root / "bus/pci/devices" / address / "numa_node")
    try:
        node = int(text)
    except ValueError:
        return None
    return node if node >= 0 else None


def node_cpus(node: int, root: Path = SYS) -> set[int]:
    """The CPUs of a NUMA node; none where the machine does not say."""
    return _parsed(_read(root / f"devices/system/node/node{node}/cpulist"))


def physical(cpus: Iterable[int], root: Path = SYS) -> list[tuple[int, ...]]:
    """Of these CPUs, those of each physical core (hyperthreads together), in order of the first."""
    cores: dict[frozenset[int], list[int]] = {}
    for cpu in sorted(cpus):
        siblings = _parsed(_read(root / f"devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")) or {cpu}
        cores.setdefault(frozenset(siblings), []).append(cpu)
    return [tuple(each) for each in cores.values()]


def cpu_quota(root: Path = SYS) -> float | None:
    """CPUs' worth of time that the control group of this process may take; None: no limit."""
    words = _read(root / "fs/cgroup/cpu.max").split()
    if len(words) != 2 or not all(word.isdigit() for word in words) or int(words[1]) == 0:
        return None
    return int(words[0]) / int(words[1])


def granted(cpus: Iterable[int]) -> set[int]:
    """Of these CPUs, those that the kernel lets this process run on. Leaves this thread's affinity as it was.

    The affinity alone does not tell: a thread may be bound to a part of what its process may use.
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
    """`0-3,8` for 0, 1, 2, 3, 8."""
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
    """The numbers of a kernel list such as `0-3,8`."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found
