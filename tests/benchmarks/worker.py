"""Asks a process of step_worker.py for its turns, and says why it is gone where it is. Imports no torch."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("step_worker.py")


class Worker:
    """One configuration's process. `missing`: why it is not there; `told`: its first word, which `ready` waits for."""

    def __init__(
        self, name: str, options: dict[str, Any], limit_seconds: float | None = None, checkout: str | None = None
    ) -> None:
        """checkout: of another version, with its native modules built in place, whose packages it measures."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        sources = [str(each) for each in Path(checkout).resolve().glob("packages/*/src")] if checkout else []
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in (*sources, *sys.path) if path)}
        self.name: str = name
        self.answers: list[dict[str, Any]] = []
        self.missing: str | None = None
        self.told: dict[str, Any] = {}
        self._limit_seconds = limit_seconds  # for an answer
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM), json.dumps({"name": name, "port": port, **options})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if os.environ.get("STEP_DEBUG") else self._errors,
            text=True,
            env=environment,
        )

    def ready(self) -> Worker:
        """Waits for its first word."""
        self.told = self._answer()
        self.missing = self.told.get("missing")
        return self

    def turn(self, count: int, rows: int | None = None) -> None:
        self.answers.append(self.ask(f"turn {count}" + ("" if rows is None else f" {rows}")))

    def ask(self, line: str) -> dict[str, Any]:
        """Its answer to a line; {"missing": …} where it is gone."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # its end is what it answers
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], self._limit_seconds)[0]:
            self._process.kill()
            return {"missing": f"no answer within {self._limit_seconds} s{self._last_words()}"}
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        return {"missing": f"the process ended ({self._process.wait()}){self._last_words()}"}

    def _last_words(self) -> str:
        """The end of what it wrote to stderr."""
        self._errors.seek(0)
        words = self._errors.read()[-600:].strip()
        return f": {words}" if words else ""

    def leave(self) -> None:
        """Tell it to end; do not wait."""
        assert self._process.stdin is not None
        if self._process.poll() is None and self.missing is None:
            self._process.stdin.write("end\n")
            self._process.stdin.flush()
        self.missing = self.missing or "it was told to leave"

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self.leave()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()
