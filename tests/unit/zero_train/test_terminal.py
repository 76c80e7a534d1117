"""Lines of other libraries: in the file, not on the terminal; errors on both; nothing is swallowed by a crash."""

from __future__ import annotations

import faulthandler
import logging
import os
import subprocess
import sys
import threading
import warnings

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


def test_our_own_warnings_and_the_traceback_of_a_thread_are_on_the_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # pytest's
    monkeypatch.setattr(threading, "excepthook", lambda thrown: None)  # pytest's
    monkeypatch.setattr(warnings, "showwarning", lambda *warned: None)
    ours = {"__name__": "zero_hf.trainer"}
    exec("import warnings\ndef warn(): warnings.warn('adapter may be lost', stacklevel=2)", ours)
    with warnings.catch_warnings(), terminal.aside() as libraries:
        warnings.simplefilter("always")
        libraries.keep_in(tmp_path / "libraries.log")
        logging.getLogger("zero_core").warning("rank 0 of 2 has waited 30 s for other ranks")
        ours["warn"]()
        warnings.warn("no matter", stacklevel=1)
        thread = threading.Thread(target=lambda: 1 / 0, name="reader")
        thread.start()
        thread.join()
    shown = capsys.readouterr().err
    assert shown.startswith("zero_core: rank 0 of 2 has waited 30 s for other ranks\n")
    assert "adapter may be lost" in shown and "no matter" not in shown
    assert "Exception in thread reader:\nTraceback" in shown and shown.endswith("ZeroDivisionError: division by zero\n")


def test_a_library_may_ask_for_what_a_text_stream_has(capfd):
    with terminal.aside():
        enabled = faulthandler.is_enabled()
        faulthandler.enable()
        if not enabled:
            faulthandler.disable()
        subprocess.run(["echo", "child"], stdout=sys.stdout, check=True)
        sys.stdout.buffer.write(b"bytes\n")
        sys.stdout.buffer.flush()
        assert sys.stdout.encoding.lower() == "utf-8" and sys.stdout.errors
        assert os.fstat(sys.stdout.fileno())
    assert capfd.readouterr().err == "child\nbytes\n"


def test_a_full_disk_does_not_end_a_run_whose_library_prints(capsys):
    with terminal.aside() as libraries:
        libraries.keep_in("/dev/full")
        print("a bar")
    assert capsys.readouterr().err == "a bar\n"
