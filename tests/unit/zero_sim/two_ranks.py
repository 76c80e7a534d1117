"""Two processes in a group over `simccl`, kept while a test module runs. Stands alone, as zero-sim does."""

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

SIZE = 2


class TwoRanks:
    """`run(function, *args)` calls `function(rank, *args)` in both processes and returns what they returned."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zero-sim-ranks-")
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["zero_sim", "torch.distributed", "torch.distributed.fsdp"])
        self._ranks: list[tuple[Any, Connection]] = []
        for rank in range(SIZE):
            ours, theirs = context.Pipe()
            arguments = (rank, theirs, (Path(self._folder.name) / "rendezvous").as_uri())
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def run(self, function: Callable[..., Any], *args: Any, timeout_seconds: float = 120) -> list[Any]:
        for _, pipe in self._ranks:
            pipe.send((function, args))
        answers = []
        for rank, (_, pipe) in enumerate(self._ranks):
            if not pipe.poll(timeout_seconds):
                self.close()
                raise AssertionError(f"rank {rank} did not return in {timeout_seconds} s")
            answers.append(pipe.recv())
        failures = [f"rank {rank} raised:\n{value}" for rank, (succeeded, value) in enumerate(answers) if not succeeded]
        assert not failures, "\n".join(failures)
        return [value for _, value in answers]

    def close(self) -> None:
        for process, _ in self._ranks:
            process.kill()
            process.join()
        self._folder.cleanup()


def _serve(rank: int, pipe: Connection, rendezvous: str) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    import torch
    import torch.distributed as dist

    import zero_sim

    torch.set_num_threads(1)
    torch.sim.set_device(rank)
    timeout = timedelta(seconds=60)
    dist.init_process_group("cpu:gloo,sim:simccl", init_method=rendezvous, rank=rank, world_size=SIZE, timeout=timeout)
    while True:
        function, args = pipe.recv()
        try:
            zero_sim.take_races()
            answer: tuple[bool, Any] = True, function(rank, *args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
