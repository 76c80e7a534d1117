"""Ctrl-C and SIGTERM, made polite: the first asks the loop to stop, the second ends the process.

    before the loop   the first signal raises KeyboardInterrupt: there is nothing to keep
    in the loop       the first sets `signal`; the loop reads it after the step or validation batch under way
    any time later    the second, more than REPEAT_SECONDS after the first, ends the process at once

torchrun passes a terminal's Ctrl-C on to ranks that the terminal has interrupted already: those two count as one.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_SECONDS = 1.0  # signals nearer than this are one press
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """What has been asked so far. `signal` is 0 or the number of the signal that asked the run to stop."""

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0
        self._gentle = False

    def __bool__(self) -> bool:
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """128 + signal, as a shell reports it: 130 for Ctrl-C, 143 for SIGTERM; 0 where nothing was asked."""
        return 128 + self.signal if self.signal else 0

    @contextmanager
    def gentle(self) -> Iterator[None]:
        """The loop: a first signal is only noted."""
        self._gentle = True
        try:
            yield
        finally:
            self._gentle = False

    def receive(self, number: int, frame: FrameType | None = None) -> None:
        """The signal handler."""
        now = time.monotonic()
        if not self.signal:
            self.signal, self._since = number, now
            if not self._gentle:
                raise KeyboardInterrupt
        elif now - self._since > REPEAT_SECONDS:
            sys.stderr.write("stopped at once\n")
            sys.stderr.flush()
            os._exit(128 + number)


@contextmanager
def handled() -> Iterator[Interrupt]:
    """Installs the handlers, also where the parent left SIGINT ignored, and puts back what was there.

    Outside the main thread, where Python allows no handlers, nothing is installed.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.receive) for number in _SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def unhidden() -> Iterator[None]:
    """An interruption stays one where a library that it met fell over it: its error becomes KeyboardInterrupt again."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyboardInterrupt):
            cause = cause.__cause__ or cause.__context__
        if cause is not None:
            raise KeyboardInterrupt from error
        raise
