"""What every stage of the GPU benchmark is given and keeps: one JSON file, complete or absent at any time.

`main` runs the function `run` of a module of this package, and says at the end what failed. Owns these files, and what
a part that fails leaves in one. Imports no torch: stages that only start others stay light.
"""

import importlib
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

GIB = 1 << 30


class Missing(Exception):
    """Something that a part needs is not here; the text says what."""


class Piece:
    """What one stage has found so far. Written anew with each addition, as the process may be killed at any time."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options, self.dry, self._begun = options, bool(options["dry"]), time.monotonic()
        self.found: dict[str, Any] = {}
        self.failed: list[str] = []  # sentences

    def keep(self, **found: Any) -> None:
        """Add to what is known."""
        self.found |= found
        write(Path(self.options["out"], f"{self.options['stage']}.json"), self.found)

    def attempt(self, name: str, part: Callable[[], Any]) -> Any:
        """Keep what `part` returns under `name`, or why it returns nothing: then the others still have their turn."""
        begun = time.monotonic()
        try:
            answer = part()
        except Missing as reason:
            answer = {"missing": str(reason)}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"[:600]}
            self.failed.append(f"{name}: {' '.join(answer['failed'].split())}")
        self.keep(**{name: answer})
        print(f"{name}, {time.monotonic() - begun:.1f} s: {json.dumps(answer, default=str)}", flush=True)
        return answer

    def left(self) -> float:
        """Seconds until this stage is stopped."""
        return self.options["limit"] - (time.monotonic() - self._begun)

    def known(self, stage: str) -> dict[str, Any]:
        """What another stage found; empty if it was not run."""
        return read(Path(self.options["out"], f"{stage}.json"))


def write(path: Path, value: Any) -> None:
    new = path.with_suffix(".new")
    new.write_text(json.dumps(value, indent=1, default=str) + "\n")
    new.replace(path)


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}


def main() -> None:
    module, piece = sys.argv[1], Piece(json.loads(sys.argv[2]))
    importlib.import_module(f"tests.benchmarks.gpu.{module}").run(piece)
    if piece.failed:
        sys.exit("; ".join(piece.failed))
