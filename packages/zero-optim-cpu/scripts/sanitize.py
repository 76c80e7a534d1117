"""Tests kernels with sanitizers, emulators and clang: ``python scripts/sanitize.py [address|thread|neon|old|clang]``.

Each step builds ``cpp/selftest.cpp`` (every kernel against the scalar one, and the pool) in a temporary folder and runs
it. ``address`` also runs the Python tests of threads, bad input and the roofline on a sanitized module. ``neon`` needs
a cross compiler and qemu (Debian: ``apt-get install g++-aarch64-linux-gnu qemu-user``) and is skipped, with a message,
if they are missing. Its digest of all results must equal the native one, so that both architectures give the same bits.
``old`` runs the x86 build on an emulated CPU without AVX2, and on one with AVX2 and no AVX-512. ``clang`` compares the
build of that compiler. A step takes one to five minutes on two cores, mostly in the compiler. ``--work FOLDER`` keeps
the build.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent.parent
ROOT = PACKAGE.parent.parent
CROSS, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64"
PROGRAM_ONLY = ("ZERO_OPTIM_MODULE=OFF", "ZERO_OPTIM_TEST_PROGRAM=ON")
SMALL = 5001  # elements, where an emulator computes


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def build(folder: Path, *definitions: str) -> None:
    """Configure and build in ``folder``; raises CalledProcessError."""
    generator = ["-G", "Ninja"] if shutil.which("ninja") else []
    options = [f"-D{definition}" for definition in definitions]
    subprocess.run(
        ["cmake", "-S", str(PACKAGE), "-B", str(folder), *generator, *options], check=True, stdout=sys.stderr
    )
    subprocess.run(["cmake", "--build", str(folder), "--parallel", "2"], check=True, stdout=sys.stderr)


def selftest(folder: Path, *launcher: str, numel: int = 70_001, **environment: str) -> str:
    """Run the built self-test; its digest."""
    command = [*launcher, str(folder / "zero_optim_selftest"), str(numel)]
    done = subprocess.run(command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=False)
    say(done.stdout.rstrip())
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}")
    return done.stdout.split("digest ")[-1].strip()


def address(work: Path) -> None:
    """AddressSanitizer and UBSan: the self-test, then the Python module under some of its tests."""
    import pybind11

    build(
        work,
        "ZERO_OPTIM_SANITIZE=address,undefined",
        "ZERO_OPTIM_TEST_PROGRAM=ON",
        "ZERO_OPTIM_ROOFLINE=ON",
        f"Python_EXECUTABLE={sys.executable}",
        f"pybind11_DIR={pybind11.get_cmake_dir()}",
    )
    selftest(work, UBSAN_OPTIONS="halt_on_error=1")
    site = work / "site" / "zero_optim_cpu"
    shutil.rmtree(site, ignore_errors=True)
    shutil.copytree(PACKAGE / "src" / "zero_optim_cpu", site, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    for module in work.glob("_native*.so"):
        shutil.copy(module, site)
    compiler = os.environ.get("CXX", "g++")
    names = ("libasan.so", "libstdc++.so")  # without the second ASan finds no __cxa_throw to call
    find = [[compiler, f"-print-file-name={name}"] for name in names]
    runtime = ":".join(subprocess.run(each, capture_output=True, text=True, check=True).stdout.strip() for each in find)
    environment = {
        "PYTHONPATH": os.pathsep.join([str(work / "site"), str(ROOT)]),
        "LD_PRELOAD": runtime,
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own
        "UBSAN_OPTIONS": "halt_on_error=1",
    }
    tests = [f"tests/unit/zero_optim_cpu/test_{name}.py" for name in ("bad_input", "step", "threads")]
    tests.append(
        "tests/conformance/zero_optim_cpu/test_kernels.py::test_the_roofline_moves_every_stream_and_changes_none"
    )
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests]
    subprocess.run(command, cwd=ROOT, env=os.environ | environment, check=True)


def thread(work: Path) -> None:
    """ThreadSanitizer: the self-test."""
    build(work, "ZERO_OPTIM_SANITIZE=thread", *PROGRAM_ONLY)
    selftest(work, TSAN_OPTIONS="halt_on_error=1")


def neon(work: Path) -> None:
    """The AArch64 build under an emulator, its digest compared with the native build's."""
    if lacks("neon", "g++-aarch64-linux-gnu qemu-user", CROSS, EMULATOR):
        return
    cross = ("CMAKE_SYSTEM_NAME=Linux", "CMAKE_SYSTEM_PROCESSOR=aarch64", f"CMAKE_CXX_COMPILER={CROSS}")
    build(work / "native", *PROGRAM_ONLY)
    build(work / "neon", *PROGRAM_ONLY, *cross, "CMAKE_EXE_LINKER_FLAGS=-static")
    same("neon", selftest(work / "native", numel=SMALL), selftest(work / "neon", EMULATOR, numel=SMALL))


def old(work: Path) -> None:
    """CPUs without AVX2 and without AVX-512, emulated: no instruction that they lack, and the same bits."""
    emulator = "qemu-x86_64"
    if platform.machine() != "x86_64" or lacks("old", "qemu-user", emulator):
        return
    build(work, *PROGRAM_ONLY)
    here = selftest(work, numel=SMALL)
    for cpu in ("Nehalem", "Haswell"):
        same(cpu, here, selftest(work, emulator, "-cpu", cpu, numel=SMALL))


def clang(work: Path) -> None:
    """Another compiler's build, its digest compared."""
    if lacks("clang", "clang", "clang++"):
        return
    build(work / "here", *PROGRAM_ONLY)
    build(work / "clang", *PROGRAM_ONLY, "CMAKE_CXX_COMPILER=clang++")
    same("clang", selftest(work / "here", numel=SMALL), selftest(work / "clang", numel=SMALL))


def lacks(step: str, packages: str, *tools: str) -> bool:
    """Whether one of these programs is not there; says so."""
    missing = [tool for tool in tools if shutil.which(tool) is None]
    if missing:
        say(f"{step}: skipped, no {' and no '.join(missing)}; apt-get install {packages}")
    return bool(missing)


def same(step: str, here: str, there: str) -> None:
    if here != there:
        raise SystemExit(f"{step}: digest {there}, this machine's {here}: the bits differ")
    say(f"{step}: the same bits as here")


STEPS = {"address": address, "thread": thread, "neon": neon, "old": old, "clang": clang}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help=f"of {', '.join(STEPS)}; all without it")
    parser.add_argument("--work", type=Path, default=None, help="folder that keeps the builds for the next time")
    chosen = parser.parse_args()
    unknown = [name for name in chosen.steps if name not in STEPS]
    if unknown:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(STEPS)}")
    for name in chosen.steps or STEPS:
        say(f"== {name}")
        start = time.monotonic()
        with tempfile.TemporaryDirectory(prefix=f"zero_optim_{name}_") as scratch:
            work = Path(scratch) if chosen.work is None else chosen.work.resolve() / name
            work.mkdir(parents=True, exist_ok=True)
            STEPS[name](work)
        say(f"{name}: {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
