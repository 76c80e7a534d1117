"""Compiles the C++ sources against the torch that runs, once, and loads the result as `native`.

torch's C++ interface is internal and changes with every release, so a wheel could serve one release only; and a
requirement on torch at build time would make pip fetch another torch than the one in use. The result is kept in
`ZERO_SIM_BUILD_DIR`, or `~/.cache/zero_sim`, under the versions of torch and Python and a hash of the sources.

Also reads the other `ZERO_SIM_` variables, before it compiles anything.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch

NAME = "zero_sim_native"
SOURCES = Path(__file__).parent / "csrc"
FLAGS = ["-O1", "-DNDEBUG", "-g0", "-w", "-fvisibility=hidden", "-DUSE_DISTRIBUTED", "-DUSE_C10D_GLOO"]
JOBS = 2  # of g++: one needs up to 1.2 GB
# Files that are compiled as one: most of the time goes into torch's headers. The two longest take about as long.
TOGETHER = {
    "unit_torch": [
        f"torch_{part}"
        for part in "device memory generator tensors operators dispatch copies kernels autocast watch".split()
    ],
    "unit_python": ["torch_collectives", "bindings", "bind_runtime"],
}


class ZeroSimError(ImportError):
    """The simulated accelerator cannot be built or loaded here, or one of its variables has an unknown value."""


@dataclass(frozen=True)
class Settings:
    """The settings from the `ZERO_SIM_` environment variables."""

    devices: int
    memory: int  # bytes a device
    options: dict[str, int]  # by their names in `configure`


T = TypeVar("T")
SEGMENT = 2 << 20  # bytes: the allocator's smallest
BOOLEANS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)


def _read(name: str, default: T, parse: Callable[[str], T], accepted: str) -> T:
    text = os.environ.get(name, "").strip()
    try:
        return parse(text) if text else default
    except (ValueError, KeyError):
        raise ZeroSimError(f"{name} is {text!r}, and must be {accepted}") from None


def _whole(text: str, least: int, most: int) -> int:
    if not least <= int(text) <= most:
        raise ValueError
    return int(text)


def _gib(text: str) -> int:
    if not 0 < float(text) <= 2**14:
        raise ValueError
    return max(1, round(float(text) * 2**30 / SEGMENT)) * SEGMENT


def _latency(text: str) -> tuple[int, int]:
    fixed, _, jitter = text.partition(":")
    return _whole(fixed, 0, 10**9), _whole(jitter or "0", 0, 10**9)


def settings() -> Settings:
    """Reads the `ZERO_SIM_` variables. Raises ZeroSimError for a value that its variable may not have."""
    latency, jitter = _read(
        "ZERO_SIM_LATENCY", (0, 0), _latency, "microseconds, FIXED or FIXED:JITTER, such as 500 or 500:2000"
    )
    options = {"latency_us": latency, "jitter_us": jitter}
    options["seed"] = _read("ZERO_SIM_SEED", 0, lambda text: _whole(text, 0, 2**64 - 1), "a whole number from 0")
    for name, default in (("races", True), ("strict", False)):
        options[name] = _read(
            f"ZERO_SIM_{name.upper()}", default, lambda text: BOOLEANS[text.lower()], f"one of {', '.join(BOOLEANS)}"
        )
    return Settings(
        devices=_read("ZERO_SIM_DEVICES", 2, lambda text: _whole(text, 1, 64), "a whole number from 1 to 64"),
        memory=_read("ZERO_SIM_MEMORY_GIB", 8 << 30, _gib, "a number of GiB above 0 and up to 16384, such as 0.5"),
        options=options,
    )


def folder() -> Path:
    """Returns the folder of the compiled extension for this torch, this Python and these sources."""
    root = os.environ.get("ZERO_SIM_BUILD_DIR")
    kept = Path(root) if root else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zero_sim"
    digest = hashlib.sha256(" ".join(FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    python = f"{sys.implementation.cache_tag}-{sys.platform}"
    return kept / f"torch-{torch.__version__}-{python}-{digest.hexdigest()[:16]}"


def load() -> Any:
    """Returns the extension, compiled first if it is not there. Ranks that start together compile it once.

    Raises ZeroSimError without a compiler, and where the sources do not compile against this torch.
    """
    if not sys.platform.startswith("linux"):
        raise ZeroSimError(f"zero-sim runs on Linux, not on {sys.platform}: device memory is mapped twice with memfd")
    library = folder() / f"{NAME}.so"
    if not library.exists():
        library.parent.parent.mkdir(parents=True, exist_ok=True)
        with open(f"{library.parent}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # freed with the process, however it ends
            if not library.exists():
                return _compile(library)
    return _import(library)


def _import(library: Path) -> ModuleType:
    spec: Any = importlib.util.spec_from_file_location(NAME, library)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise ZeroSimError(f"{library} does not load: {error}. Delete {library.parent} to compile it again") from error
    return module


def _compile(library: Path) -> Any:
    """Compiles in a folder of its own, imports the result and moves it into place."""
    _check_tools()
    sys.stderr.write(f"zero-sim compiles its extension for torch {torch.__version__}, a minute or two, once\n")
    work = Path(tempfile.mkdtemp(prefix="building-", dir=library.parent.parent))
    before = os.environ.get("MAX_JOBS")
    os.environ.setdefault("MAX_JOBS", str(min(JOBS, len(os.sched_getaffinity(0)))))
    try:
        from torch.utils import cpp_extension

        units = [str(path) for path in _units(work)]
        made = cpp_extension.load(NAME, units, extra_cflags=FLAGS, build_directory=str(work))
        shutil.rmtree(library.parent, ignore_errors=True)
        library.parent.mkdir()
        os.replace(work / library.name, library)
        return made
    except (RuntimeError, OSError) as error:
        log = Path(f"{library.parent}.log")
        log.write_text(str(error), encoding="utf-8")
        raise ZeroSimError(
            f"zero-sim does not compile against torch {torch.__version__}: {_first_error(str(error))}. "
            f"It has been compiled with torch 2.13 and 2.15; the compiler's output is in {log}"
        ) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if before is None:
            del os.environ["MAX_JOBS"]


def _units(work: Path) -> list[Path]:
    """Returns the files to compile: the sources, except that one new file includes each group of TOGETHER."""
    left, made = {path.stem: path for path in sorted(SOURCES.glob("*.cpp"))}, []
    for name, parts in TOGETHER.items():
        included = [left.pop(part) for part in parts if part in left]
        if included:
            unit = work / f"{name}.cpp"
            unit.write_text("".join(f'#include "{path}"\n' for path in included), encoding="utf-8")
            made.append(unit)
    return made + list(left.values())


def _check_tools() -> None:
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler.split()[0]) is None:
        raise ZeroSimError(f"zero-sim needs a C++ compiler and {compiler!r} is not on PATH: install g++, or set CXX")
    if shutil.which("ninja") is None:  # the environment's own programs are not on PATH
        os.environ["PATH"] = os.pathsep.join([importlib.import_module("ninja").BIN_DIR, os.environ.get("PATH", "")])


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower()]
    return next((line for line in lines if "error:" in line), lines[0] if lines else text.strip()[-300:])


def _start() -> Any:
    given = settings()
    started = load()
    options = started.Options()
    for name, value in given.options.items():
        setattr(options, name, value)
    started.begin_with(given.devices, given.memory, options)
    return started


native: Any = _start()
