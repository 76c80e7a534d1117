"""torchrun, which also writes down in the file $ENDS which ranks it has started, and how each has ended.

python -m tests.machines.agent ARGUMENTS OF TORCHRUN

A line is `RANK PID`, or `RANK PID CODE` with Popen's code, negative where a signal ended it. Each rank is a fork of a
process that has imported everything, so that a start takes a tenth of the processor's time. It runs as `__main__` and
comes to the interpreter's own end, too.
"""

import importlib
import json
import os
import runpy
import select
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any


def noted(*words: object) -> None:
    with open(os.environ["ENDS"], "a", encoding="utf-8") as file:
        file.write(" ".join(map(str, words)) + "\n")


class Forked:
    """What torchrun uses of a Popen, for a fork of `preloaded`."""

    ask: Any = None  # the pipes to and from that process
    answer: Any = None

    def __init__(self, args: Sequence[str], env: dict[str, str], **_: object) -> None:
        self._rank, self.returncode = env["RANK"], None
        Forked.ask.write(json.dumps([args[args.index("-m") + 1 :], env]) + "\n")
        Forked.ask.flush()
        self.pid = int(Forked.answer.readline())

    def poll(self) -> int | None:
        if self.returncode is None:
            with open(os.environ["ENDS"], encoding="utf-8") as file:
                for words in map(str.split, file):
                    if words[:2] == [self._rank, str(self.pid)] and len(words) == 3:
                        self.returncode = int(words[2])
        return self.returncode

    def wait(self, timeout: float) -> int:
        deadline = time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("rank", timeout)
            time.sleep(0.02)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def preloaded(asked: int, answer: int) -> None:
    """Forks a rank for each line of `asked`, until that is closed. Returns in the ranks."""
    for name in (
        "zero_train.run.train",
        "zero_nvme",
        "zero_optim_cpu",
        "transformers.models.llama",
        "zero_core.checkpoint",
    ):
        importlib.import_module(name)

    ranks: dict[int, str] = {}
    with open(asked) as lines:
        while True:
            if select.select([lines], [], [], 0.02)[0]:
                if not (line := lines.readline()):
                    os._exit(0)
                words, env = json.loads(line)
                if not (pid := os.fork()):
                    break
                ranks[pid] = env["RANK"]
                noted(env["RANK"], pid)
                os.write(answer, f"{pid}\n".encode())
            while ranks and (ended := os.waitpid(-1, os.WNOHANG))[0]:
                noted(ranks.pop(ended[0]), ended[0], os.waitstatus_to_exitcode(ended[1]))
    os.close(answer)
    os.setsid()
    os.environ.clear()
    os.environ.update(env)
    sys.argv = words
    runpy.run_module(words[0], run_name="__main__", alter_sys=True)


def main() -> None:
    asked, answered = os.pipe(), os.pipe()
    if not os.fork():
        os.close(asked[1])
        return preloaded(asked[0], answered[1])
    os.close(asked[0])
    os.close(answered[1])
    Forked.ask, Forked.answer = open(asked[1], "w"), open(answered[0])
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    subprocess_handler.Popen = Forked  # type: ignore[assignment, misc]
    run.main()


if __name__ == "__main__":
    main()
