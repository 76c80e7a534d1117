"""Interpreters for programs that end, are killed or run out of memory: forked from one that has imported once.

Torch, transformers and the packages take seconds to import, each time. Here one process has imported them (see
`preload`); a program runs in a fork of it as `__main__`, from the first line to the interpreter's own end: threads
joined, exit handlers called, modules torn down, and what it raises printed.
"""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

SERVE = """
import json, os, sys
import tests.preload
replies = os.fdopen(os.dup(1), "w", buffering=1)
for line in iter(sys.stdin.readline, ""):
    request = json.loads(line)
    child = os.fork()
    if not child:
        break
    replies.write(f"{os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}\\n")
else:
    sys.exit()
replies.close()
for number, name in enumerate((os.devnull, "stdout", "stderr")):
    opened = os.open(name, os.O_RDWR | os.O_CREAT)
    os.dup2(opened, number)
    os.close(opened)
sys.stdin = open(0, closefd=False)
os.chdir(request["folder"])
exec(compile(request["program"], "<program>", "exec"))
"""


class Interpreters:
    """`run` one program after another, each in an interpreter of its own."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="zero-interpreters-")
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, program: str, folder: Path | str | None = None, timeout_seconds: float = 240.0
    ) -> subprocess.CompletedProcess[str]:
        """What the program printed and ended with, as `subprocess.run` has it. `folder`: where it runs."""
        if self._process is None:
            self._process = self._start()
        process, outputs = self._process, [Path(self._folder.name, name) for name in ("stdout", "stderr")]
        for output in outputs:
            output.unlink(missing_ok=True)
        assert process.stdin is not None and process.stdout is not None
        request = {"program": textwrap.dedent(program), "folder": str(folder or os.getcwd())}
        process.stdin.write(json.dumps(request) + "\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], timeout_seconds)
        answer = process.stdout.readline() if ready else ""
        printed = [output.read_text() if output.exists() else "" for output in outputs]
        if not answer:
            self._end()
            raise AssertionError(f"no end within {timeout_seconds} s: {printed[0][-1000:]}{printed[1][-3000:]}")
        return subprocess.CompletedProcess(program, int(answer), *printed)

    def _start(self) -> subprocess.Popen[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), *filter(None, sys.path)])}
        given = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
        return subprocess.Popen([sys.executable, "-c", SERVE], cwd=self._folder.name, start_new_session=True, **given)

    def _end(self) -> None:
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.communicate()
            self._process = None

    def close(self) -> None:
        self._end()
        self._folder.cleanup()
