"""The run folder: one run's at a time, and refused where another run has left its results. Owns the lock.

The lock is the kernel's, on an open file: it goes with the process however that ends. Only the first rank holds it.
What may be continued, and what differs then, is resume.py's.
"""

from __future__ import annotations

import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from zero_train.errors import ConfigError

LOCK = ".lock"  # says who holds it, and stays: a file that is removed while it is held locks nothing
RESULTS = ("config.yaml", "metrics.jsonl", "validation.jsonl", "checkpoints", "pretrained")


def results(folder: Path) -> list[str]:
    """Names of what a run has left in `folder`; empty where it is free for a new one."""
    return [name for name in RESULTS if (folder / name).exists()]


@contextmanager
def claimed(folder: Path) -> Iterator[str]:
    """Makes `folder` and locks it. What was made is taken away again where a refusal ends the run before its results.

    Yields why it could not be locked, on a filesystem that has no locks; otherwise an empty text.

    Raises:
        ConfigError: another process has it, or it cannot be made.
    """
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    new = not (folder / LOCK).exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file, reason = _locked(folder)
    except OSError as error:
        raise ConfigError(f"run.dir={folder} cannot be made and locked: {error}; change run.dir") from error
    with file:
        try:
            yield reason
        except (ConfigError, KeyboardInterrupt):
            if new and not results(folder):
                (folder / LOCK).unlink()
                for path in made:
                    if not any(path.iterdir()):
                        path.rmdir()
            raise


def _locked(folder: Path) -> tuple[TextIO, str]:
    """The lock file, held until it is closed, and why it is not locked."""
    path = folder / LOCK
    while True:
        file, reason = path.open("a+"), ""
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ConfigError(
                f"run.dir={folder}: a run is using it ({holder}); wait until it has ended, or name another folder "
                "with run.dir=…"
            ) from None
        except OSError as error:
            reason = error.strerror or str(error)
        if path.exists() and os.path.samestat(path.stat(), os.fstat(file.fileno())):
            break
        file.close()  # of a run that was refused, and has just removed it
    file.truncate(0)
    file.write(f"process {os.getpid()} on {socket.gethostname()}\n")
    file.flush()
    return file, reason
