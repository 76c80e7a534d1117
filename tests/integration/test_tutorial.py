"""docs/tutorial.md: its Python blocks run in order as they stand, and print what stands below them."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")
for needed in ("zero_nvme", "zero_optim_cpu", "zero_offload"):
    pytest.importorskip(needed)

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"\d+\.?\d*")


def test_its_blocks_run_and_print_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Numbers may differ by 3 %, because processors round differently."""
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall(PAGE.read_text(encoding="utf-8"))
    assert len(blocks) == PAGE.read_text(encoding="utf-8").count("```python") > 8
    names: dict[str, Any] = {}
    for code, shown in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(code, names)
        expected, found = shown.splitlines(), printed.getvalue().splitlines()
        assert [NUMBER.sub("#", line).split() for line in found] == [NUMBER.sub("#", line).split() for line in expected]
        for line, wanted in zip(found, expected, strict=True):
            if "waited" not in line:  # nobody can promise that number
                values = [float(number) for number in NUMBER.findall(line)]
                assert values == pytest.approx([float(number) for number in NUMBER.findall(wanted)], rel=0.03), line
    assert names["plain"] == pytest.approx(names["sharded"], rel=1e-3)
    assert {path.name for path in tmp_path.iterdir()} == {"steps.json", "checkpoint", "trained"}
