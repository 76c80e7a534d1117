"""A run folder belongs to one process at a time, and only while that process lives."""

import errno
import fcntl
import os
import signal

import pytest

from zero_train import run_folder
from zero_train.errors import ConfigError


def test_a_second_run_is_refused_while_the_first_has_it(tmp_path):
    with run_folder.claimed(tmp_path / "run") as reason:
        assert reason == ""
        with (
            pytest.raises(ConfigError, match=rf"a run is using it \(process {os.getpid()} on .*run\.dir=…"),
            run_folder.claimed(tmp_path / "run"),
        ):
            pass
        assert (tmp_path / "run" / run_folder.LOCK).exists(), "the refused run took the first one's lock away"
    with run_folder.claimed(tmp_path / "run"):
        pass


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


@pytest.mark.parametrize("error", [ConfigError("refused"), KeyboardInterrupt()])
def test_a_refused_run_takes_away_what_it_made(tmp_path, error):
    (tmp_path / "there").mkdir()
    for run in (tmp_path / "a" / "b", tmp_path / "there"):
        with pytest.raises(type(error)), run_folder.claimed(run):
            raise error
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


def test_results_are_never_taken_away(tmp_path):
    with pytest.raises(KeyboardInterrupt), run_folder.claimed(tmp_path / "run"):
        (tmp_path / "run" / "metrics.jsonl").touch()
        raise KeyboardInterrupt
    assert run_folder.results(tmp_path / "run") == ["metrics.jsonl"]


def test_a_filesystem_without_locks_is_told(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with run_folder.claimed(tmp_path / "run") as reason:
        assert reason == "No locks available"
