"""Keeps what other libraries print away from the terminal: into a file of the run folder, once there is one.

Errors that they log are on the terminal as well, and what a refused run has held back is gone with it. Lines that a
library's C++ code writes to the file descriptors are not kept away.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from zero_train.errors import ConfigError

__all__ = ["Libraries", "aside", "out"]

_LOGGERS = ("transformers", "datasets", "trl", "accelerate", "peft", "huggingface_hub", "torch")
_ours: list[TextIO] = []  # the terminal, while standard output is the libraries'


def out() -> TextIO:
    """Returns where zero-train itself prints."""
    return _ours[-1] if _ours else sys.stdout


class Libraries(io.TextIOBase):
    """What libraries print. A library that keeps it after the run prints to the terminal again."""

    def __init__(self) -> None:
        self._held: list[str] = []
        self._path: Path | None = None
        self._file: TextIO | None = None
        self.over = False

    def write(self, text: str) -> int:
        """Keeps `text`. Returns its length."""
        if self.over:
            return sys.stderr.write(text) if sys.stderr is not self else len(text)
        if self._path is None:
            self._held.append(text)
        elif text:
            self._file = self._file or self._path.open("a", encoding="utf-8", errors="replace")
            self._file.write(text)
            self._file.flush()
        return len(text)

    def keep_in(self, path: Path) -> None:
        """Writes what was held back, and all that comes, to the end of a file, which is made for the first line."""
        self._path = path
        self.write("".join(self._held))

    def finish(self, error: BaseException | None) -> str:
        """Closes the file. Returns what should be on the terminal after `error`."""
        self.over = True
        if self._file is not None:
            self._file.close()
        if self._path is not None:
            return ""
        return "".join(self._held) if isinstance(error, Exception) and not isinstance(error, ConfigError) else ""


class _Logged(logging.Handler):
    """Gives records to the libraries' file, and errors to the terminal, each once."""

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
        if record.levelno >= logging.ERROR:
            self._terminal.write(self.format(record) + "\n")


@contextmanager
def aside() -> Iterator[Libraries]:
    """Inside, standard output and standard error are the libraries'; `out` is the terminal."""
    kept, terminals = Libraries(), (sys.stdout, sys.stderr)
    _ours.append(sys.stdout)
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
