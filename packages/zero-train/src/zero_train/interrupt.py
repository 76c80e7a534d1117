"""Handles Ctrl-C and SIGTERM: the first signal asks the loop to stop, the second ends the process.

    before the loop   the first signal raises KeyboardInterrupt, because there is nothing to keep. Where the process is
                      still there after START_SECONDS, because it waits for other ranks outside of Python, it ends
    in the loop       the first signal sets `signal`, which the loop reads after the current step or validation batch
    any time later    a second signal, more than REPEAT_SECONDS after the first, ends the process at once

The terminal sends Ctrl-C to every rank, and torchrun then sends it again. These two signals count as one.
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

from zero_train.errors import chain

REPEAT_SECONDS = 1.0  # signals nearer than this are one press
START_SECONDS = 1.5
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupt:
    """Remembers the signal that asked the run to stop; `signal` is its number, or 0."""

    def __init__(self) -> None:
        self.signal = 0
        self._since = 0.0
        self._gentle = False
        self._begun = False  # the loop has
        self._over = threading.Event()

    @contextmanager
    def gentle(self) -> Iterator[None]:
        """Inside this context, which is the training loop, a first signal is only noted."""
        self._gentle = self._begun = True
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

    def end_start(self, received: int) -> None:
        """On a thread of its own: ends the process where a signal comes before the loop and does not end the run.

        Python calls a signal's handler between two of its instructions, so not while torch waits for other ranks.
        received: a file descriptor from which each signal's number comes as a byte.
        """
        while number := os.read(received, 1):
            if number[0] in _SIGNALS and not self._begun and not self._over.wait(START_SECONDS) and not self._begun:
                sys.stderr.write("interrupted before the first step; nothing was trained\n")
                sys.stderr.flush()
                os._exit(128 + number[0])


@contextmanager
def handled() -> Iterator[Interrupt]:
    """Installs the handlers, even if the parent process ignores SIGINT, and restores the earlier ones at the end.

    Installs nothing outside the main thread, where Python allows no handlers.
    """
    interrupt = Interrupt()
    if threading.current_thread() is not threading.main_thread():
        yield interrupt
        return
    before = {number: signal.signal(number, interrupt.receive) for number in _SIGNALS}
    received, sent = os.pipe()
    os.set_blocking(sent, False)
    wakes = signal.set_wakeup_fd(sent, warn_on_full_buffer=False)
    watcher = threading.Thread(target=interrupt.end_start, args=(received,), name="zero-train signals", daemon=True)
    watcher.start()
    try:
        yield interrupt
    finally:
        interrupt._over.set()
        signal.set_wakeup_fd(wakes)
        os.close(sent)  # which ends the watcher
        watcher.join()
        os.close(received)
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def unhidden() -> Iterator[None]:
    """Raises KeyboardInterrupt again if a library that was interrupted by it raised an error of its own instead."""
    try:
        yield
    except Exception as error:
        if any(isinstance(cause, KeyboardInterrupt) for cause in chain(error)):
            raise KeyboardInterrupt from error
        raise
