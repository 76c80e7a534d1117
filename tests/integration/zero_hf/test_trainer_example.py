"""examples/trainer.py, which two lines adapt: its losses are the stock script's, wherever the state is kept."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState, GradientState
from transformers import AutoModelForCausalLM

from tests.integration.zero_hf.trainers import launched

pytestmark = pytest.mark.promise("trainer-example")

SCRIPT = Path(__file__).parents[3] / "examples" / "trainer.py"
STEPS = 24


def _run(output, zero, *arguments):
    """What the script logged. `zero` is its configuration; with None the two lines are taken out."""
    lines = SCRIPT.read_text().splitlines()
    text = "\n".join(line for line in lines if zero is not None or "zero_hf" not in line)
    file = Path(output).parent / f"{Path(output).name}-{os.getpid()}.json"  # not one that another rank is writing
    file.write_text(json.dumps(zero or {}))
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    argv = [str(SCRIPT), "--output", str(output), "--steps", str(STEPS), *arguments]
    with contextlib.ExitStack() as stack:
        if torch.distributed.is_initialized():
            stack.enter_context(launched())
        stack.enter_context(mock.patch.object(sys, "argv", argv))
        stack.enter_context(mock.patch.dict(os.environ, {"ZERO_HF_CONFIG": str(file)}))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        exec(compile(text, str(SCRIPT), "exec"), {"__name__": "__main__", "__file__": str(SCRIPT)})
    history = json.loads((Path(output) / "trainer_state.json").read_text())["log_history"]
    return {name: [entry[name] for entry in history if name in entry] for name in ("loss", "grad_norm", "eval_loss")}


def test_two_lines_adapt_it():
    """Fails if the example needs more than the import and the line that adapts the class."""
    lines = [line.split("  #")[0] for line in SCRIPT.read_text().splitlines() if "zero_hf" in line]
    assert lines == ["import zero_hf", "Trainer = zero_hf.sharded(Trainer)"]


@pytest.mark.parametrize(("world", "precision"), [(1, "bf16"), (2, "fp32")])
def test_its_losses_are_the_stock_scripts(ranks, tmp_path, world, precision):
    """Fails if sharding changes what the Trainer computes in 24 steps, or a tier changes a bit of it."""
    run, more = ranks(world).run, ["--bf16"] if precision == "bf16" else []
    stock = run(_run, tmp_path / "stock", None, *more)[0]
    found = {
        offload: run(_run, tmp_path / offload, {"offload": offload, "nvme_paths": [f"{tmp_path}/drive"]}, *more)[0]
        for offload in ("none", "host", "nvme")[1 if more else 0 :]
    }
    assert len(stock["loss"]) == STEPS and stock["loss"][-1] < 0.9 * stock["loss"][0]
    assert found["host"] == found["nvme"]
    tolerance = 1e-2 if more else 1e-5
    for logged in found.values():
        assert logged["loss"] == pytest.approx(stock["loss"], rel=tolerance)
        assert logged["eval_loss"] == pytest.approx(stock["eval_loss"], rel=tolerance)
        assert logged["grad_norm"] == pytest.approx(stock["grad_norm"], rel=10 * tolerance)
    if world > 1:
        return
    checkpoint = f"{tmp_path}/host/checkpoint-{STEPS // 2}"
    again = run(_run, tmp_path / "again", {"offload": "host"}, *more, "--resume", checkpoint)[0]
    assert again["loss"] == found["host"]["loss"] and again["grad_norm"] == found["host"]["grad_norm"]
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "again").config.hidden_size == 48


@pytest.mark.advice("launch it with torchrun, or with accelerate launch --multi_gpu")
def test_torchrun_runs_it(tmp_path):
    """Fails if the process group that the Trainer makes is not like the one of the tests above."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    done = subprocess.run(
        [*command, "--output", str(tmp_path), "--steps", "2"],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.count("at stage 3 on 2 ranks, of each:") == 1  # the first rank says the plan, once
    assert (tmp_path / "checkpoint-2" / "zero").is_dir() and (tmp_path / "model.safetensors").is_file()
