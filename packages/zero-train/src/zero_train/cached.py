"""The folder in which converted data are kept, for all runs: each conversion is made once, whole or not at all.

What is converted, and into what, is the caller's matter.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zero_train.errors import ConfigError

__all__ = ["folder", "kept"]


def folder() -> Path:
    """Returns where converted data are kept, for all runs."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero-train"


def kept(
    cache: Path, kind: str, source: str, what: str, room: str, identity: list[Any], make: Callable[[Path], Any]
) -> tuple[Path, Any]:
    """Returns the folder in `cache` that `make` filled for `identity`, now or in another run, and what it returned.

    The folder appears when it is complete, and the JSON of what `make` returned is written last, to the disk itself.

    Raises:
        ConfigError: the cache cannot be written. It names `source`, `what` is written, and the `room` that it needs.
    """
    made = cache / f"{kind}-{hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]}"
    partial, done = made.with_name(f"{made.name}.{os.getpid()}.partial"), f"{kind}.json"
    try:
        with _locked(cache):
            if not (made / done).is_file():
                try:
                    partial.mkdir()
                    found = make(partial)
                    with (partial / done).open("w") as file:
                        json.dump(found, file)
                        file.flush()
                        os.fsync(file.fileno())
                    if not (made / done).is_file():  # it is there if another process was as fast, without locks
                        partial.rename(made)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)
            return made, json.loads((made / done).read_text())
    except OSError as error:
        raise ConfigError(
            f"{source}: cannot write {what} to {cache}: {error.strerror or error}; they need {room}: make room, or "
            "name a folder with more by XDG_CACHE_HOME"
        ) from error


@contextmanager
def _locked(cache: Path) -> Iterator[None]:
    """Lets one process at a time write into `cache`. What a killed conversion left is deleted by the next."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # this filesystem has no locks: two processes may convert the same, in folders of their own
            pass
        else:
            for left in cache.glob("*.partial"):
                shutil.rmtree(left, ignore_errors=True)
        yield
