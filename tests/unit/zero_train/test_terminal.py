"""Lines of other libraries: in the file, not on the terminal; errors on both; nothing is swallowed by a crash."""

from __future__ import annotations

import logging
import sys

import pytest

from zero_train import terminal
from zero_train.errors import ConfigError


def test_lines_of_libraries_are_in_the_file_and_errors_on_the_terminal_as_well(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    with terminal.aside() as libraries:
        print("before there is a file")
        terminal.out().write("ours\n")
        libraries.keep_in(tmp_path / "libraries.log")
        logging.getLogger("trl.trainer").warning("a remark")
        logging.getLogger("trl.trainer").error("a failure")
        sys.stderr.write("a bar\n")
    print("after")
    shown, kept = capsys.readouterr(), (tmp_path / "libraries.log").read_text()
    assert shown.out == "ours\nafter\n" and shown.err == "trl.trainer: a failure\n"
    assert all(text in kept for text in ("before there is", "a remark", "a failure", "a bar"))


def test_a_handler_that_a_library_makes_meanwhile_prints_to_the_terminal_later(tmp_path, capsys):
    with terminal.aside() as libraries:
        handler = logging.StreamHandler()
        libraries.keep_in(tmp_path / "libraries.log")
    handler.emit(logging.makeLogRecord({"msg": "later"}))
    assert capsys.readouterr().err == "later\n"


@pytest.mark.parametrize(("error", "shown"), [(RuntimeError, "held\n"), (ConfigError, "")])
def test_what_was_held_back_is_told_after_a_crash_and_not_after_a_refusal(capsys, error, shown):
    with pytest.raises(error), terminal.aside():
        print("held")
        raise error("why")
    assert capsys.readouterr().err == shown
