"""Locks the run folder, so that one run at a time uses it, and says what earlier runs have left there.

The kernel holds the lock on an open file and drops it when the process ends, however it ends. Only the first rank takes
it. Which runs may be continued is decided in resume.py.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from zero_train.errors import ConfigError, told

if TYPE_CHECKING:
    from zero_train.ranks import Ranks  # imports torch, which a mistyped command should not wait for

LOCK = ".lock"  # names its holder, and is never deleted: a deleted file locks nothing
RESULTS = ("config.yaml", "metrics.jsonl", "validation.jsonl", "checkpoints", "pretrained")


def results(folder: Path) -> list[str]:
    """Returns the names of a run's results in `folder`. A folder without any is free for a new run."""
    return [name for name in RESULTS if (folder / name).exists()]


def replace(path: Path, text: str) -> None:
    """Writes a file so that after a kill it holds either all of `text` or its earlier content."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def records(path: Path) -> list[dict[str, Any]]:
    """Returns the complete records of a file. A killed run may have left half a line at the end."""
    found = []
    for line in path.read_text().splitlines() if path.is_file() else ():
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


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


def shared(folder: Path, ranks: Ranks) -> None:
    """Raises ConfigError unless `folder`, which the first rank has made, is the same one on every machine. Collective.

    Each rank makes a file with a new name: where nobody has asked for a name, a network filesystem asks the server.
    """
    mark = ranks.agree(f".seen-{uuid.uuid4().hex}")
    files = [folder / f"{mark}-{rank}" for rank in range(ranks.world_size)]
    own, made = files[ranks.rank], not folder.exists()
    with suppress(OSError):  # the first rank will not see it
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()
    hosts = ranks.gather(socket.gethostname())
    unseen = ranks.gather([rank for rank, file in enumerate(files) if not file.exists()] if ranks.leader else [])[0]
    with suppress(OSError):
        own.unlink()
        if made:
            folder.rmdir()
    if unseen:
        raise ConfigError(
            f"run.dir={folder} is not one folder for all ranks: what rank {unseen[0]} on {hosts[unseen[0]]} writes "
            f"there is not there on {hosts[0]}, so no checkpoint would be whole; name a folder that all machines share "
            "with run.dir=…, and with offload.nvme_paths=[…] one on each machine's own disk"
        )


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
