"""tests/device on the GPU, or in small on the CPU. What has passed, failed and not ended is known at any time."""

import importlib.util
import time
from pathlib import Path

import pytest

from tests.benchmarks.gpu.stage import Piece

ROOT = Path(__file__).parents[3]
PROCESSES = 8  # on one GPU
FEW = ("tests/device/zero_core/test_random_state.py", "tests/device/zero_optim_cpu")  # at toy size
KEEP_SECONDS = 2


class Outcomes:
    """A pytest plugin that keeps the outcome of each test as it ends."""

    def __init__(self, piece: Piece) -> None:
        self._piece, self._kept = piece, 0.0
        self._under_way: list[str] = []
        self._counts = {"passed": 0, "skipped": 0}
        self._failed: dict[str, str] = {}

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._under_way.append(nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            told = report.longreprtext.strip().splitlines()[-1] if crash is None else f"{crash.message} {crash.lineno}"
            self._failed[report.nodeid] = f"{report.when}: {told[:600]}"
        elif report.when == "call" or report.skipped:
            self._counts[report.outcome] += 1
        if report.when == "teardown":
            self._under_way.remove(report.nodeid)
            self.keep()

    def keep(self, *, last: bool = False) -> None:
        if last or time.monotonic() - self._kept > KEEP_SECONDS:
            self._piece.keep(**self._counts, failed=self._failed, not_ended=self._under_way)
            self._kept = time.monotonic()


def run(piece: Piece) -> None:
    outcomes = Outcomes(piece)
    options = ["-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT), "--maxfail=40", "--device"]
    options.append(piece.options["device"])
    several = ["-n", str(PROCESSES), "--dist", "loadfile"] if importlib.util.find_spec("xdist") else []
    chosen = FEW if piece.dry else ("tests/device", *several)
    code = pytest.main([*chosen, *options], plugins=[outcomes])
    outcomes.keep(last=True)
    if code:
        piece.failed.append(f"{len(piece.found['failed'])} tests failed; pytest ended with {code}")
