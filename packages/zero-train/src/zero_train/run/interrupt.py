"""Handles Ctrl-C and SIGTERM: the first signal asks the loop to stop, the second ends the process.

    before the loop   Ctrl-C raises KeyboardInterrupt, because there is nothing to keep. SIGTERM ends the process as the
                      system does, also where it waits for other ranks outside of Python
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

REPEAT_SECONDS = 1.0  # signals nearer than this are one press


class Interrupt:
    """Remembers the signal that asked the run to stop; `signal` is its number, or 0."""

    def __init__(self, handles: bool = True) -> None:
        self.signal = 0
        self._since = 0.0
        self._gentle = False
        self._handles = handles

    @contextmanager
    def gentle(self) -> Iterator[None]:
        """Only notes a first signal inside the `with` block, which is the training loop."""
        self._gentle = True
        if self._handles:
            signal.signal(signal.SIGTERM, self.receive)
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
    """Installs the handlers, even if the parent process ignores SIGINT, and restores the earlier ones at the end.

    Installs nothing outside the main thread, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield Interrupt(handles=False)
        return
    interrupt = Interrupt()
    before = {signal.SIGINT: signal.signal(signal.SIGINT, interrupt.receive)}
    before[signal.SIGTERM] = signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
