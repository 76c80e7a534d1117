"""Runs `python -m zero_hf`, which is the same as the console script `zero-hf`."""

import os
import signal
import sys
from types import FrameType


def console() -> None:
    """Runs the command line and exits with its code, which is 130 for Ctrl-C."""
    signal.signal(signal.SIGINT, _end)
    from .commands import main

    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        _end(signal.SIGINT)


def _end(number: int, frame: FrameType | None = None) -> None:
    """Ends the process at once: some libraries catch a KeyboardInterrupt while they import others, and go on."""
    os.write(1, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    console()
