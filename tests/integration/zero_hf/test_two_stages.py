"""examples/two_stages.py, SFT and then DPO in one process: the stock script's losses and its answer, on every tier."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path

import pytest

from .launching import LINES, ROOT, launched, run_example

pytest.importorskip("trl")
pytest.importorskip("datasets")
pytest.importorskip("peft")

STEPS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A folder with a chat model of 0.1 M parameters."""
    import torch

    from examples.sft import tiny

    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    found, tokenizer = tiny()
    found.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def ran(model: Path, folder: Path, offload: str | None) -> tuple[list[list[float]], str]:
    """Losses of both stages, and what the script printed last."""
    zero, out = None, io.StringIO()
    if offload is not None:
        file = folder.with_suffix(".yaml")
        file.write_text(f"offload: {offload}\nnvme_paths: {folder}-drive\n")
        zero = str(file)
    arguments = ["--model", str(model), "--output", str(folder), "--steps", str(STEPS)]
    with contextlib.redirect_stdout(out):
        run_example("two_stages.py", arguments, zero)
    states = [json.loads((folder / stage / "trainer_state.json").read_text()) for stage in ("sft", "dpo")]
    found = [[row["loss"] for row in state["log_history"] if "loss" in row] for state in states]
    return found, out.getvalue().splitlines()[-1]


def test_two_lines_adapt_it():
    lines = [line for line in (ROOT / "examples" / "two_stages.py").read_text().splitlines() if LINES in line]
    assert len(lines) == 2, lines


def test_two_stages_have_the_stock_scripts_losses_and_its_answer_on_every_tier(model, tmp_path):
    """Fails if the second stage begins from other values, or with other adapters, or a merge is lost."""
    import torch
    from transformers import AutoModelForCausalLM

    losses, answer = ran(model, tmp_path / "stock", None)
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "stock" / "tuned").state_dict()
    assert [len(stage) for stage in losses] == [STEPS, STEPS] and all(stage[-1] < stage[0] for stage in losses)
    for offload in ("none", "host", "nvme"):
        found, said = ran(model, tmp_path / offload, offload)
        for ours, theirs in zip(found, losses, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-5, abs=0)
        assert said == answer
        tuned = AutoModelForCausalLM.from_pretrained(tmp_path / offload / "tuned").state_dict()
        assert tuned.keys() == stock.keys()
        for name, value in stock.items():
            torch.testing.assert_close(tuned[name], value, rtol=1e-4, atol=1e-5)
