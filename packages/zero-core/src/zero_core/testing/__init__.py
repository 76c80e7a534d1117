"""Provides ranks kept across tests, and suites of conformance, for zero-core and its siblings. Imports no pytest."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist

from ..device import backend_of
from .collectives import CollectivesSuite
from .conformance import ShardStoreSuite

__all__ = ["CollectivesSuite", "LocalRank", "RankError", "RankPool", "ShardStoreSuite"]


class RankError(AssertionError):
    """A rank of a pool raised, died or ran out of time."""


class LocalRank:
    """The pool of one rank: this process, without a process group."""

    size = 1

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 0) -> list[Any]:
        """Calls the function here, and returns a list with its result."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        try:
            return [function(*args)]
        finally:
            torch.set_num_threads(threads)

    def close(self) -> None:
        """Does nothing: there is no process to end."""


class RankPool:
    """`size` processes joined in a group, kept across calls; any failure ends them, the next call makes new ones.

    Every rank runs one thread, and each call begins with a barrier and torch's seed at 0. Functions and arguments
    travel by pickle, so functions are module-level; so do results.
    device: "cpu", or another type that torch knows: rank r computes on its device r and on no other. imports: modules
    that each rank imports before it joins, such as one that registers the device.
    backend: as for `torch.distributed.init_process_group`; None: gloo for the CPU and torch's default for the device.
    start_method: "forkserver" imports what `multiprocessing.set_forkserver_preload` names once and not in every rank;
    not for ranks that use a GPU, which a forked process cannot if anything imported has asked for it.
    """

    def __init__(
        self,
        size: int,
        collective_timeout_seconds: float = 60.0,
        backend: str | None = None,
        start_method: Literal["spawn", "forkserver"] = "spawn",
        device: str = "cpu",
        imports: Sequence[str] = (),
    ) -> None:
        self.size, self.device, self.backend, self.start_method = size, device, backend, start_method
        self.imports = tuple(imports)
        self._timeout = timedelta(seconds=collective_timeout_seconds)
        self._processes: list[Any] = []
        self._pipes: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 240.0) -> list[Any]:
        """Calls `function(*args)` on every rank; returns the results by rank. Raises RankError, with the traceback."""
        if not self._processes:
            self._start()
        message = pickle.dumps((function, args))
        results: dict[int, Any] = {}
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
            deadline = time.monotonic() + timeout_seconds
            while len(results) < self.size:
                waiting = [p for r, p in enumerate(self._pipes) if r not in results]
                ready: list[Any] = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = sorted(set(range(self.size)) - set(results))
                    raise RankError(f"ranks {missing} of {self.size} did not finish in {timeout_seconds} s")
                for pipe in ready:
                    self._collect(pipe, results)
        except BaseException:
            self._kill()
            raise
        return [results[r] for r in range(self.size)]

    def _collect(self, pipe: Any, results: dict[int, Any]) -> None:
        rank = self._pipes.index(pipe)
        try:
            succeeded, value = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError) as error:
            self._processes[rank].join(5)
            raise RankError(f"rank {rank} of {self.size} died, exit code {self._processes[rank].exitcode}") from error
        if not succeeded:
            raise RankError("\n".join([f"rank {rank} of {self.size} raised:\n{value}", *self._others(rank, results)]))
        results[rank] = value

    def _others(self, failed: int, results: dict[int, Any]) -> list[str]:
        """Returns the last lines of other ranks' errors, and which died: the first to report may not be the cause."""
        others = {self._pipes[r]: r for r in range(self.size) if r != failed and r not in results}
        found = []
        for pipe in wait(list(others), timeout=1.0):
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())  # type: ignore[union-attr]
                if not succeeded:
                    found.append(f"rank {others[pipe]} raised: {value.strip().splitlines()[-1]}")  # type: ignore[index]
            except (EOFError, ConnectionError):
                found.append(f"rank {others[pipe]} died")  # type: ignore[index]
        return found

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zero-ranks-")
        rendezvous = (Path(self._folder.name) / "rendezvous").as_uri()
        context: Any = multiprocessing.get_context(self.start_method)
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            group = {"rank": rank, "world_size": self.size, "init_method": rendezvous, "timeout": self._timeout}
            arguments = theirs, self.backend, group, self.device, self.imports
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()
            process.join(10)
        for pipe in self._pipes:
            pipe.close()
        if self._folder is not None:
            self._folder.cleanup()
        self._processes, self._pipes, self._folder = [], [], None

    def close(self) -> None:
        """Ends the ranks, each after leaving its process group: gloo aborts in a finalised interpreter."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send_bytes(pickle.dumps(None))
        for process in self._processes:
            process.join(10)
        self._kill()


def _serve(pipe: Connection, backend: str | None, group: dict[str, Any], device: str, imports: Sequence[str]) -> None:
    """Runs one rank: joins, answers until it is stopped, leaves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    for module in imports:
        importlib.import_module(module)
    if device != "cpu":
        torch.get_device_module(device).set_device(group["rank"])
    dist.init_process_group(backend or backend_of(device), **group)
    before = ""
    while True:
        try:
            message = pickle.loads(pipe.recv_bytes())
        except EOFError:
            break
        except Exception:
            pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
            continue
        if message is None:
            break
        function, args = message
        torch.manual_seed(0)  # whatever an earlier call has left
        try:
            _meet(before)
            before = f"{getattr(function, '__name__', function)!s}{args!r:.200}"
            answer = pickle.dumps((True, function(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        try:
            pipe.send_bytes(answer)
        except OSError:
            break
    dist.destroy_process_group()


def _meet(before: str) -> None:
    try:
        dist.barrier()
    except RuntimeError as error:
        raise RankError(f"an earlier call left the process group broken: {before}") from error
