"""examples/sft.py, a TRL script that two lines adapt: its losses are the stock script's, wherever the state is kept."""

import json
from pathlib import Path

import pytest

from .launching import LINES, ROOT, run_example

pytestmark = pytest.mark.promise("sft-example")

pytest.importorskip("trl")

STEPS = 20


def logged(pool, folder: Path, zero: str | None, *arguments: str) -> tuple[list[float], list[float]]:
    """Losses and norms of the gradients that the script logged, step by step."""
    pool.run(run_example, "sft.py", ["--output", str(folder), "--steps", str(STEPS), *arguments], zero)
    state = json.loads((folder / "trainer_state.json").read_text())
    rows = [row for row in state["log_history"] if "loss" in row]
    return [row["loss"] for row in rows], [row["grad_norm"] for row in rows]


def settings(tmp_path: Path, offload: str) -> str:
    file = tmp_path / f"{offload}.yaml"
    file.write_text(f"offload: {offload}\nnvme_paths: {tmp_path}/drive-{{local_rank}}\n")
    return str(file)


def test_two_lines_adapt_it():
    """Fails when the example needs more than the import and the line that adapts the class."""
    lines = [line for line in (ROOT / "examples" / "sft.py").read_text().splitlines() if LINES in line]
    assert len(lines) == 2, lines


@pytest.mark.parametrize(("size", "precision"), [(1, "bf16"), (2, "fp32")])
def test_its_losses_are_the_stock_scripts(ranks, tmp_path, size, precision):
    """Fails when sharding changes what the Trainer computes, or a tier changes one bit of it."""
    more = ["--bf16"] if precision == "bf16" else []
    stock = logged(ranks(size), tmp_path / "stock", None, *more)
    runs = {}
    for offload in ("none", "host", "nvme"):
        runs[offload] = logged(ranks(size), tmp_path / offload, settings(tmp_path, offload), *more)
    assert len(stock[0]) == STEPS
    assert runs["host"] == runs["nvme"]
    tolerance = 1e-2 if more else 1e-5
    for losses, norms in runs.values():
        assert losses == pytest.approx(stock[0], rel=tolerance)
        assert norms == pytest.approx(stock[1], rel=10 * tolerance)
