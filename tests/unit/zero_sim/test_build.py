"""The extension is compiled once for a torch, by whoever comes first; where it cannot be, the error says what to do."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

zero_sim = pytest.importorskip("zero_sim", exc_type=ImportError)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The build module with nothing built yet."""
    monkeypatch.setenv("ZERO_SIM_BUILD_DIR", str(tmp_path))
    return zero_sim.build


def test_the_folder_names_torch_and_the_sources(empty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Fails if another torch or an edited source would load what was compiled for the old one."""
    first = empty.folder()
    assert first.parent == tmp_path and first.name.startswith(
        f"torch-{torch.__version__}-{sys.implementation.cache_tag}"
    )
    edited = tmp_path / "csrc"
    shutil.copytree(empty.SOURCES, edited)
    monkeypatch.setattr(empty, "SOURCES", edited)
    assert empty.folder() == first
    (edited / "sites.cpp").write_text("// other", encoding="utf-8")
    assert empty.folder() != first


def test_what_is_built_is_loaded_without_a_compiler():
    program = "import zero_sim, sys; print('torch.utils.cpp_extension' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], env=_bare(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr


def _bare() -> dict[str, str]:
    import os

    return {**os.environ, "PATH": "/nowhere", "CXX": "/nowhere/c++", "PYTHONPATH": ":".join(filter(None, sys.path))}


def test_ranks_that_start_together_compile_once(empty: Any, monkeypatch: pytest.MonkeyPatch):
    built = Path(zero_sim.build.native.__file__)
    compiled = []

    def compile_slowly(library: Path) -> None:
        compiled.append(library)
        time.sleep(0.2)
        library.parent.mkdir()
        shutil.copy(built, library)

    monkeypatch.setattr(empty, "_compile", compile_slowly)
    monkeypatch.setattr(empty, "_import", lambda library: library)
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(empty.load())) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(compiled) == 1 and found == compiled * 4


def test_without_a_compiler_the_error_says_so(empty: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(zero_sim.ZeroSimError, match=r"'no-such-compiler' is not on PATH: install g\+\+, or set CXX"):
        empty.load()


def test_another_torch_is_named_with_the_compilers_first_error(
    empty: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
):
    """As where torch's internal interface has changed: the compiler fails, and nothing half built is left."""
    sources = tmp_path / "csrc"
    sources.mkdir()
    (sources / "old.cpp").write_text("#error torch has changed\n", encoding="utf-8")
    monkeypatch.setattr(empty, "SOURCES", sources)
    with pytest.raises(
        zero_sim.ZeroSimError, match="does not compile against torch .*torch has changed.*output is in"
    ) as e:
        empty.load()
    log = Path(str(e.value).rsplit(" ", 1)[1])
    assert "torch has changed" in log.read_text(encoding="utf-8")
    assert not empty.folder().exists() and not list(tmp_path.glob("building-*"))
    assert "zero-sim compiles its extension for torch" in capfd.readouterr().err


def test_the_module_prints_what_there_is_as_the_variables_say():
    given = {"DEVICES": "3", "MEMORY_GIB": "0.5", "LATENCY": "5:7", "SEED": "11", "STRICT": "Yes", "RACES": "off"}
    environment = _bare() | {f"ZERO_SIM_{name}": value for name, value in given.items()}
    done = subprocess.run(
        [sys.executable, "-m", "zero_sim"], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert f"torch {torch.__version__}, extension in " in done.stdout and "us of host time" in done.stdout
    assert "3 devices of 0.5 GiB" in done.stdout
    assert "latency 5 us, jitter 7 us, seed 11, strict True, races False" in done.stdout


@pytest.mark.parametrize(
    ("name", "value", "accepted"),
    [
        ("RACES", "raise", "one of 1, true, yes, on, 0, false, no, off"),
        ("DEVICES", "two", "a whole number from 1 to 64"),
        ("MEMORY_GIB", "0", "a number of GiB above 0 and up to 16384"),
        ("LATENCY", "1.5:2", "microseconds, FIXED or FIXED:JITTER"),
        ("SEED", "-1", "a whole number from 0"),
    ],
)
def test_an_unknown_value_of_a_variable_is_refused_before_anything_is_compiled(
    empty: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: str, accepted: str
):
    monkeypatch.setenv(f"ZERO_SIM_{name}", value)
    monkeypatch.setattr(empty, "load", lambda: pytest.fail("compiled first"))
    with pytest.raises(zero_sim.ZeroSimError, match=f"ZERO_SIM_{name} is '{value}', and must be {accepted}"):
        empty._start()
