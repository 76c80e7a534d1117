"""examples/accelerate_loop.py, which one line adapts: its losses are the stock script's, wherever the state is kept."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch.distributed as dist

from .accelerated import launched

pytestmark = pytest.mark.promise("accelerate")

SCRIPT = Path(__file__).parents[3] / "examples" / "accelerate_loop.py"
STEPS = 24
OURS, STOCK = "from zero_hf import Accelerator", "from accelerate import Accelerator"


def _run(output, zero, *arguments):
    """What the script writes: `zero` is its configuration, and None runs it without us."""
    text = SCRIPT.read_text()
    text = text if zero is not None else text.replace(OURS, STOCK, 1)
    file = Path(output).parent / f"{Path(output).name}-{os.getpid()}.json"  # not one that another rank is writing
    file.write_text(json.dumps(zero or {}))
    argv = [str(SCRIPT), "--output", str(output), "--steps", str(STEPS), *arguments]
    with launched(), mock.patch.object(sys, "argv", argv):
        with mock.patch.dict(os.environ, {"ZERO_HF_CONFIG": str(file)}):
            exec(compile(text, str(SCRIPT), "exec"), {"__name__": "__main__", "__file__": str(SCRIPT)})
    if dist.is_initialized() and dist.get_rank():
        return None  # rank 0 writes the losses, and may still be about to
    return json.loads((Path(output) / "losses.json").read_text())


def test_one_line_adapts_it():
    """Fails if the script needs more than another import."""
    lines = [line for line in SCRIPT.read_text().splitlines() if "zero" in line.split("#")[0] and "ZERO_HF" not in line]
    assert [line.split("  #")[0] for line in lines if "zero_grad" not in line] == [OURS]


@pytest.mark.parametrize("world", [1, 2])
def test_its_losses_are_the_stock_scripts(ranks, tmp_path, world):
    """Fails if sharding changes what the script computes in 24 steps, or a tier changes a bit of it."""
    run = ranks(world).run
    stock = run(_run, tmp_path / "stock", None)[0]
    found = {
        offload: run(_run, tmp_path / offload, {"offload": offload, "nvme_paths": [str(tmp_path / "drive")]})[0]
        for offload in ("none", "host", "nvme")
    }
    assert len(stock["train"]) == 2 * STEPS and stock["train"][-1] < 0.9 * stock["train"][0]
    assert found["host"] == found["nvme"]
    for losses in found.values():
        assert losses["train"] == pytest.approx(stock["train"], rel=1e-5)
        assert losses["test"] == pytest.approx(stock["test"], rel=1e-5)


def test_it_resumes_and_computes_in_bf16(ranks, tmp_path):
    """Fails if the second half of a run depends on the process that ran the first, or autocast is not as in stock."""
    run, steps = ranks(1).run, ["--mixed_precision", "bf16"]
    stock = run(_run, tmp_path / "stock", None, *steps)[0]
    whole = run(_run, tmp_path / "whole", {"offload": "host"}, *steps)[0]
    assert whole["train"] == pytest.approx(stock["train"], rel=1e-2)
    half = run(_run, tmp_path / "again", {"offload": "host"}, *steps, "--resume", str(tmp_path / "whole" / "half"))[0]
    assert half["train"] == whole["train"][STEPS:] and half["test"] == whole["test"]


def test_torchrun_runs_it(tmp_path):
    """Fails if a process group that accelerate makes, or one that ends, is not like the one of the tests above."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", str(SCRIPT)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [*command, "--output", str(tmp_path), "--steps", "2"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert len(json.loads((tmp_path / "losses.json").read_text())["train"]) == 4 and "loss of training" in done.stdout
    assert (tmp_path / "model" / "model.safetensors").is_file()
