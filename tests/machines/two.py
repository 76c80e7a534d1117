"""Two machines on one: two network namespaces and a link between them, which may be slow, lose packets, or be cut.

Needs root, iproute2 and a C compiler, and a slow link /dev/net/tun: it is relay.c, as not every kernel has tc's netem.
"""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
DEVICE = "net0"  # in each namespace
ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29400  # of what ranks meet at, on the first machine
_numbers = itertools.count()


@cache
def missing() -> str:
    """Why there cannot be two machines here, in a sentence; empty where there can."""
    if not sys.platform.startswith("linux"):
        return f"network namespaces are Linux's, this is {sys.platform}"
    for program in ("ip", "cc"):
        if shutil.which(program) is None:
            return f"the program {program!r} is not installed"
    try:
        import torch.distributed.run  # noqa: F401
    except ImportError as error:
        return f"torchrun is missing: {error}"
    try:
        Machines().close()
    except (OSError, subprocess.SubprocessError) as error:
        said = (getattr(error, "stderr", None) or str(error)).strip()
        return f"network namespaces are not allowed here: {said}"
    return ""


@dataclass
class Process:
    """One that runs on a machine; `log` is the file with what it prints."""

    popen: subprocess.Popen[bytes]
    log: Path

    @property
    def printed(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def exit_code(self, within: float) -> int | None:
        """None if it has not ended after so many seconds."""
        try:
            return self.popen.wait(max(0.0, within))
        except subprocess.TimeoutExpired:
            return None

    def has_printed(self, text: str, within: float = 120.0) -> None:
        """Return when it has. Raises AssertionError where it ends without, or does not for so many seconds."""
        deadline = time.monotonic() + within
        while text not in self.printed:
            ended = self.popen.poll()
            assert ended is None, f"ended with {ended} before it printed {text!r}:\n{self.printed}"
            assert time.monotonic() < deadline, f"has not printed {text!r} in {within:.0f} s:\n{self.printed}"
            time.sleep(0.02)


@dataclass
class Machines:
    """Two namespaces and the link. `close`, or the end of a `with`, kills what runs there and removes both.

    rate: bits a second, delay: microseconds one way, loss: per cent of the packets; 0 each: none.
    """

    rate: float = 0
    delay: float = 0
    loss: float = 0
    folder: Path | None = None  # for logs

    def __post_init__(self) -> None:
        name = f"zm{os.getpid()}x{next(_numbers)}"
        self.names = (f"{name}a", f"{name}b")
        self._work = Path(tempfile.mkdtemp(prefix="zero-machines-"))
        self._relay: subprocess.Popen[str] | None = None
        self._started: list[Process] = []
        try:
            for space in self.names:
                _ip("netns", "add", space)
                _ip("-n", space, "link", "set", "lo", "up")
            self._join()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Machines:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        for process in self._started:
            process.popen.kill()  # also one that is stopped
            process.popen.wait()
        for machine in range(2):
            for pid in self.pids(machine):  # what these have started
                if self._relay is None or pid != self._relay.pid:
                    _kill(pid)
        if self._relay is not None:
            self._relay.kill()
            self._relay.communicate()
        for space in self.names:
            _run(["ip", "netns", "del", space], check=False)
        shutil.rmtree(self._work, ignore_errors=True)

    # -- the link ---------------------------------------------------------------------------------------------------

    def _join(self) -> None:
        if self.rate or self.delay or self.loss:
            self._start_relay()
        else:
            first, second = self.names
            _ip("link", "add", DEVICE, "netns", first, "type", "veth", "peer", "name", DEVICE, "netns", second)
        for space, address in zip(self.names, ADDRESSES, strict=True):
            _ip("-n", space, "link", "set", DEVICE, "mtu", "65000", "up")
            _ip("-n", space, "address", "add", f"{address}/24", "dev", DEVICE)
            self._lead(space)

    def _lead(self, space: str) -> None:
        """A TUN device does not know the other end by itself."""
        _ip("-n", space, "route", "replace", "10.77.0.0/24", "dev", DEVICE)

    def _start_relay(self) -> None:
        program = self._work / "relay"
        _run([os.environ.get("CC", "cc"), "-O2", "-pthread", "-o", str(program), str(HERE / "relay.c")])
        words = [*self.names, f"{self.rate:.0f}", f"{self.delay:.0f}", str(self.loss)]
        self._relay = subprocess.Popen([str(program), *words], stdout=subprocess.PIPE, text=True)
        assert self._relay.stdout is not None
        if not self._relay.stdout.readline():
            raise OSError("the relay could not make its devices")

    def cut(self) -> None:
        """No packet arrives from here on, and nobody is told so."""
        for space in self.names:
            _ip("-n", space, "link", "set", DEVICE, "down")

    def mend(self) -> None:
        """After `cut`: packets arrive again."""
        for space in self.names:
            _ip("-n", space, "link", "set", DEVICE, "up")
            self._lead(space)

    def sent(self) -> tuple[int, int]:
        """Bytes that each machine has sent to the other one, with the headers."""
        lines = [_ip("netns", "exec", space, "cat", "/proc/net/dev") for space in self.names]
        first, second = (int(text.split(f"{DEVICE}:")[1].split()[8]) for text in lines)
        return first, second

    def pids(self, machine: int) -> list[int]:
        """Of all processes on a machine."""
        return [int(pid) for pid in _run(["ip", "netns", "pids", self.names[machine]], check=False).split()]

    # -- processes --------------------------------------------------------------------------------------------------

    def start(self, machine: int, words: Sequence[str], label: str = "", **environment: object) -> Process:
        """Run a program on machine 0 or 1."""
        log = (self.folder or self._work) / f"{label or len(self._started)}.log"
        log.parent.mkdir(parents=True, exist_ok=True)
        devices = dict.fromkeys(("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), DEVICE)
        paths = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
        values = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1", **devices}
        values |= {name: str(value) for name, value in environment.items()}
        command = ["ip", "netns", "exec", self.names[machine], *words]
        with log.open("wb") as output:
            popen = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=values)
        self._started.append(Process(popen, log))
        return self._started[-1]

    def ranks(self, words: Sequence[str], counts: Sequence[int] = (1, 1)) -> list[Process]:
        """Run a Python program as so many ranks on each machine, without torchrun: each ends by itself."""
        started: list[Process] = []
        for machine, count in enumerate(counts):
            for local in range(count):
                rank = len(started)
                where = {"RANK": rank, "WORLD_SIZE": sum(counts), "LOCAL_RANK": local, "LOCAL_WORLD_SIZE": count}
                meets = {"MASTER_ADDR": ADDRESSES[0], "MASTER_PORT": PORT}
                words_of_rank = [sys.executable, "-u", *words]
                started.append(self.start(machine, words_of_rank, f"rank{rank}", **where, **meets))
        return started

    def torchrun(self, words: Sequence[str], count: int) -> list[Process]:
        """Run a Python program under torchrun, as `count` ranks on each machine. Returns the two torchruns."""
        return [
            self.start(
                machine,
                [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(count)]
                + ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}", "--rdzv-id", self.names[0]]
                + ["--rdzv-conf", f"is_host={machine == 0}", "--local-addr", address, *words],
                f"machine{machine}",
            )
            for machine, address in enumerate(ADDRESSES)
        ]


def _run(words: Sequence[str], check: bool = True) -> str:
    return subprocess.run(words, check=check, capture_output=True, text=True).stdout


def _ip(*words: str) -> str:
    return _run(["ip", *words])


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
