"""Builds the extension with a sanitizer and runs the conformance suites on it.

    python packages/zero-nvme/scripts/sanitize.py address        # with UndefinedBehaviorSanitizer
    python packages/zero-nvme/scripts/sanitize.py thread -k TestSlab

From any folder of a checkout, with cmake, pybind11, pytest and the package's dependencies installed. Further arguments
go to pytest. Exit status 0: the tests passed and the sanitizer said nothing.
"""

from __future__ import annotations

import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
import tempfile

PACKAGE = pathlib.Path(__file__).resolve().parents[1]
ROOT = PACKAGE.parents[1]
RUNTIME = {"address": "libasan.so", "thread": "libtsan.so"}
OPTIONS = {
    # The interpreter keeps what it allocated; a leak report would be about that.
    "address": {"ASAN_OPTIONS": "detect_leaks=0:abort_on_error=0:exitcode=66", "UBSAN_OPTIONS": "print_stacktrace=1"},
    "thread": {"TSAN_OPTIONS": "exitcode=66:halt_on_error=0:second_deadlock_stack=1"},
}
# Not a finding: now and then (one run in six, or two) libtsan of GCC 12 asks the kernel for 541 TB of its own shadow
# memory while a test starts many threads, and ends the process. Everything is then run once more.
RUNTIME_FAILED = "ThreadSanitizer failed to allocate"
ATTEMPTS = 4


def build(sanitizer: str, folder: pathlib.Path) -> pathlib.Path:
    """The package with an extension of its own, sanitized if `sanitizer` is not empty, in a folder for PYTHONPATH."""
    python = sys.executable
    pybind11 = subprocess.check_output([python, "-m", "pybind11", "--cmakedir"], text=True).strip()
    subprocess.run(
        [
            tool("cmake"),
            *("-S", str(PACKAGE), "-B", str(folder / "build")),
            f"-DPython_EXECUTABLE={python}",
            f"-Dpybind11_DIR={pybind11}",
            f"-DZERO_NVME_SANITIZE={sanitizer}",
            "-DCMAKE_BUILD_TYPE=None",
        ],
        check=True,
        stdout=subprocess.DEVNULL,
    )
    subprocess.run([tool("cmake"), "--build", str(folder / "build"), "--parallel", "2"], check=True)
    site = folder / "site"
    ignored = shutil.ignore_patterns("*.so", "__pycache__")
    shutil.copytree(PACKAGE / "src" / "zero_nvme", site / "zero_nvme", ignore=ignored)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    shutil.copy(folder / "build" / f"_native{suffix}", site / "zero_nvme")
    return site


def tool(name: str) -> str:
    beside = pathlib.Path(sys.executable).with_name(name)
    return str(beside) if beside.exists() else name


def runtime(sanitizer: str) -> str:
    """The sanitizer's library, which an interpreter built without it must load first."""
    compiler = os.environ.get("CXX", "c++")
    return subprocess.check_output([compiler, f"-print-file-name={RUNTIME[sanitizer]}"], text=True).strip()


def steady(sanitizer: str) -> list[str]:
    """ThreadSanitizer's fixed address space does not go with a kernel that randomises generously."""
    command = ["setarch", "-R"]
    if sanitizer != "thread" or not shutil.which("setarch"):
        return []
    return [] if subprocess.run([*command, "true"], stderr=subprocess.DEVNULL).returncode else command


def main(sanitizer: str, *pytest_arguments: str) -> int:
    with tempfile.TemporaryDirectory(prefix="zero-nvme-sanitize-") as folder:
        site = build(sanitizer, pathlib.Path(folder))
        for attempt in range(ATTEMPTS):
            reports = pathlib.Path(folder) / f"reports-{attempt}"
            reports.mkdir()
            status, texts = run(sanitizer, site, reports, pytest_arguments)
            sys.stdout.write("\n".join(texts))
            if not texts or not all(RUNTIME_FAILED in text and "WARNING" not in text for text in texts):
                break
            sys.stdout.write("The sanitizer itself failed, and found nothing until then: once more.\n")
        return status or (66 if texts else 0)


def run(
    sanitizer: str, site: pathlib.Path, reports: pathlib.Path, pytest_arguments: tuple[str, ...]
) -> tuple[int, list[str]]:
    """Exit status of the tests, and what the sanitizer said: in files, because pytest captures stderr."""
    options = {name: f"{text}:log_path={reports}/{name}" for name, text in OPTIONS[sanitizer].items()}
    environment = {**os.environ, **options, "PYTHONPATH": str(site)}
    preloaded = ["env", f"LD_PRELOAD={runtime(sanitizer)}"]  # in the interpreter, and not in what starts it
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/conformance/zero_nvme"]
    whole = [*steady(sanitizer), *preloaded, *command, *pytest_arguments]
    status = subprocess.run(whole, cwd=ROOT, env=environment).returncode
    return status, [report.read_text(errors="replace") for report in sorted(reports.iterdir())]


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in RUNTIME:
        raise SystemExit(__doc__)
    raise SystemExit(main(*sys.argv[1:]))
