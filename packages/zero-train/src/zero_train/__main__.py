"""Runs `python -m zero_train`, which is the same as the console script `zero-train`."""

import os
import signal
import sys
from types import FrameType


def console() -> None:
    """Runs the command line and exits with its code. Until the run handles Ctrl-C itself, it ends the process.

    Two variables are set unless the user's environment has them, because torch and its OpenMP read each of them once:
    torch asks the kernel for huge pages for its tensors of 2 MiB and more, and a thread that waits for others gives its
    core away after 1,000 turns of a loop, about 10 µs. GNU OpenMP's own 300,000 turns starve a second run.
    """
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    if "OMP_WAIT_POLICY" not in os.environ:  # which says the same in words
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")
    signal.signal(signal.SIGINT, _end)
    from zero_train.cli.app import main

    sys.exit(main())


def _end(number: int, frame: FrameType | None) -> None:
    """Ends the process at once: some libraries catch a KeyboardInterrupt while they import others, and go on."""
    if os.environ.get("RANK", "0") == "0":
        os.write(1, b"interrupted\n")
    os._exit(128 + number)


if __name__ == "__main__":
    console()
