"""Keeps what other libraries print away from the terminal: into a file of the run folder, once there is one.

Errors that they log are on the terminal as well, and so are our own warnings and the traceback of a thread. What a
refused run has held back is gone with it. What a library writes past Python's text streams, as C++ code and child
processes do, is on the terminal.
"""

from __future__ import annotations

import io
import logging
import sys
import threading
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from zero_train.errors import ConfigError

__all__ = ["Libraries", "aside", "err", "out"]

_LOGGERS = ("transformers", "datasets", "trl", "accelerate", "peft", "huggingface_hub", "torch")
_OURS = "zero_"  # what the names of our packages begin with
_ours: list[tuple[TextIO, TextIO]] = []  # the terminal's output and errors, while sys has the libraries'


def out() -> TextIO:
    """Returns where zero-train itself prints."""
    return _ours[-1][0] if _ours else sys.stdout


def err() -> TextIO:
    """Returns where zero-train itself prints errors."""
    return _ours[-1][1] if _ours else sys.stderr


class Libraries(io.TextIOBase):
    """What libraries print. A library that keeps it after the run prints to the terminal again."""

    def __init__(self) -> None:
        self._terminal = sys.stderr
        self._held: list[str] = []
        self._path: Path | None = None
        self._file: io.FileIO | None = None
        self.over = False

    encoding = property(lambda self: self._terminal.encoding)
    errors = property(lambda self: self._terminal.errors)
    buffer = property(lambda self: self._terminal.buffer)  # its bytes are on the terminal

    def fileno(self) -> int:
        """Returns the terminal's file descriptor, which a child process may be given as its output."""
        return self._terminal.fileno()

    def write(self, text: str) -> int:
        """Keeps `text`. Returns its length. What the disk has no room for is on the terminal."""
        if self.over:
            return (self._terminal if sys.stderr is self else sys.stderr).write(text)
        if self._path is None:
            self._held.append(text)
        elif text:
            try:
                self._file = self._file or io.FileIO(self._path, "a")
                self._file.write(text.encode(errors="replace"))
            except OSError:
                self._terminal.write(text)
        return len(text)

    def keep_in(self, path: Path) -> None:
        """Writes what was held back, and all that comes, to the end of a file, which is made for the first line."""
        self._path = path
        self.write("".join(self._held))

    def finish(self, error: BaseException | None) -> str:
        """Closes the file. Returns what should be on the terminal after `error`."""
        self.over = True
        if self._file is not None:
            with suppress(OSError):  # of a full disk
                self._file.close()
        if self._path is not None:
            return ""
        return "".join(self._held) if isinstance(error, Exception) and not isinstance(error, ConfigError) else ""


class _Logged(logging.Handler):
    """Gives records to the libraries' file, and errors and our own warnings to the terminal, each once."""

    def __init__(self, kept: Libraries, terminal: TextIO, root_is_ours: bool) -> None:
        super().__init__(logging.WARNING)
        self._kept, self._terminal, self._root_is_ours, self._last = kept, terminal, root_is_ours, None
        self.setFormatter(logging.Formatter("%(name)s: %(message)s"))

    def emit(self, record: Any) -> None:
        """Writes a record that no other logger has brought here."""
        if record is self._last:
            return
        self._last = record
        if self._root_is_ours:
            self._kept.write(self.format(record) + "\n")
        if record.levelno >= logging.ERROR or record.name.startswith(_OURS):
            self._terminal.write(self.format(record) + "\n")


@contextmanager
def _told(terminal: TextIO) -> Iterator[None]:
    """Inside, our own warnings and the traceback of a thread are on the terminal as well."""
    show, ended = warnings.showwarning, threading.excepthook

    def warned(message: Any, *rest: Any) -> None:
        if _warns(sys._getframe(1)).startswith(_OURS):
            terminal.write(f"warning: {message}\n")
        show(message, *rest)

    def raised(thrown: Any) -> None:
        if thrown.exc_type is not SystemExit:
            name = thrown.thread.name if thrown.thread else "?"
            shown = traceback.format_exception(thrown.exc_type, thrown.exc_value, thrown.exc_traceback)
            terminal.write(f"Exception in thread {name}:\n{''.join(shown)}")
        ended(thrown)

    warnings.showwarning, threading.excepthook = warned, raised  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning, threading.excepthook = show, ended


def _warns(frame: Any) -> str:
    """Returns the name of the module that called warnings.warn, whatever stacklevel it gave."""
    while frame and frame.f_globals.get("__name__") in ("warnings", "_py_warnings"):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")) if frame else ""


@contextmanager
def aside() -> Iterator[Libraries]:
    """Inside, standard output and standard error are the libraries'; `out` is the terminal."""
    kept, terminals = Libraries(), (sys.stdout, sys.stderr)
    _ours.append(terminals)
    loggers = [logging.getLogger(name) for name in (None, *_LOGGERS)]
    logged = _Logged(kept, sys.stderr, not logging.getLogger().handlers)
    moved = [
        (handler, handler.setStream(kept))
        for logger in loggers
        for handler in logger.handlers
        if isinstance(handler, logging.StreamHandler) and handler.stream in terminals
    ]
    for logger in loggers:
        logger.addHandler(logged)
    sys.stdout = sys.stderr = kept
    failed: BaseException | None = None
    try:
        with _told(terminals[1]):
            yield kept
    except BaseException as error:
        failed = error
        raise
    finally:
        sys.stdout, sys.stderr = terminals
        _ours.pop()
        for logger in loggers:
            logger.removeHandler(logged)
        for handler, stream in moved:
            handler.setStream(stream)
        sys.stderr.write(kept.finish(failed))
