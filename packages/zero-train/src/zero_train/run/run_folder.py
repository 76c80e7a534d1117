"""Locks the run folder, so that one run at a time uses it, and lists the files of earlier runs there.

The kernel holds the lock on an open file and drops it when the process ends, however it ends. Only the first rank takes
it. Which runs may be continued is decided in resume.py.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from zero_train.errors import ConfigError, told

LOCK = ".lock"  # names its holder, and is never deleted: a deleted file locks nothing
RESULTS = ("config.yaml", "metrics.jsonl", "validation.jsonl", "checkpoints", "pretrained")


def results(folder: Path) -> list[str]:
    """Returns the names of a run's results in `folder`. A folder without any is free for a new run."""
    return [name for name in RESULTS if (folder / name).exists()]


@contextmanager
def claimed(folder: Path) -> Iterator[str]:
    """Makes `folder` and locks it. Yields an empty string, or the reason why the filesystem could not lock it.

    Raises:
        ConfigError: another process uses the folder, or it cannot be made.
    """
    with told(f"run.dir={folder} cannot be made and locked: ", OSError, way_out="; change run.dir"):
        folder.mkdir(parents=True, exist_ok=True)
        file, reason = _locked(folder / LOCK)
    with file:
        yield reason


def _locked(path: Path) -> tuple[TextIO, str]:
    """Returns the lock file, which is locked until it is closed, and the reason if it could not be locked."""
    file, reason = path.open("a+"), ""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "another process"
        file.close()
        raise ConfigError(
            f"run.dir={path.parent}: a run is using it ({holder}); wait until that run ends, or name another folder "
            "with run.dir=…"
        ) from None
    except OSError as error:
        reason = error.strerror or str(error)
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file, reason
