"""A run folder belongs to one process at a time, and only while that process lives."""

import errno
import fcntl
import os
import signal

import pytest

from zero_train.errors import ConfigError
from zero_train.run import run_folder


@pytest.mark.promise("folder-in-use")
def test_a_killed_run_leaves_no_lock(tmp_path):
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            with run_folder.claimed(tmp_path / "run"):
                os.write(write, b"x")
                signal.pause()
        finally:
            os._exit(1)
    os.read(read, 1)
    try:
        with pytest.raises(ConfigError, match=f"process {child}"), run_folder.claimed(tmp_path / "run"):
            pass
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with run_folder.claimed(tmp_path / "run"):
        pass


def test_a_filesystem_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_folder.claimed(tmp_path / "run") as reason:
        assert reason == "No locks available"
