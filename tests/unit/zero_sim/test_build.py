"""The extension is compiled for a torch and its sources; where it cannot be, the error says what to do."""

import shutil
import sys
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


def test_without_a_compiler_the_error_says_so(empty: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(zero_sim.ZeroSimError, match=r"'no-such-compiler' is not on PATH: install g\+\+, or set CXX"):
        empty.load()


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
