"""Examples that one or two lines adapt: their losses are the stock scripts', wherever the state is kept."""

import json
import os
import subprocess
import sys

import pytest

from .launching import LINES, ROOT, run_example

pytestmark = pytest.mark.promise("accelerate", "trainer-example", "sft-example")

STEPS = 24
ADAPTED = {
    "accelerate_loop.py": ["from zero_hf import Accelerator"],
    "trainer.py": ["import zero_hf", "Trainer = zero_hf.sharded(Trainer)"],
    "sft.py": ["import zero_hf", "SFTTrainer = zero_hf.sharded(SFTTrainer)"],
    "two_stages.py": [
        "import zero_hf",
        "SFTTrainer, DPOTrainer = zero_hf.sharded(SFTTrainer), zero_hf.sharded(DPOTrainer)",
    ],
}
BF16 = {"accelerate_loop.py": ["--mixed_precision", "bf16"], "trainer.py": ["--bf16"], "sft.py": ["--bf16"]}
HALF = {"accelerate_loop.py": "half", "trainer.py": f"checkpoint-{STEPS // 2}"}  # the checkpoint that it resumes


@pytest.mark.promise("two-stages-example")
@pytest.mark.parametrize("name", ADAPTED)
def test_these_lines_adapt_it(name):
    """Fails if a script needs more than the import and the line that adapts the class."""
    lines = (ROOT / "examples" / name).read_text().splitlines()
    assert [line.split("  #")[0] for line in lines if LINES in line] == ADAPTED[name]


def logged(pool, name, folder, offload, *more):
    """The numbers that the script writes, with the state on a tier, or without us."""
    zero = None
    if offload is not None:
        zero = folder.with_suffix(".yaml")
        zero.write_text(f"offload: {offload}\nnvme_paths: {folder.parent}/drive-{{local_rank}}\n")
    arguments = ["--output", str(folder), "--steps", str(STEPS), *more]
    pool.run(run_example, name, arguments, None if zero is None else str(zero))
    if name == "accelerate_loop.py":
        found = json.loads((folder / "losses.json").read_text())
        return {"loss": found["train"], "eval_loss": [found["test"]]}
    history = json.loads((folder / "trainer_state.json").read_text())["log_history"]
    return {key: [row[key] for row in history if key in row] for key in ("loss", "grad_norm", "eval_loss")}


@pytest.mark.parametrize(("size", "precision"), [(1, "bf16"), (2, "fp32")])
@pytest.mark.parametrize("name", BF16)
def test_its_losses_are_the_stock_scripts(ranks, tmp_path, name, size, precision):
    """Fails if sharding changes what a script computes, a tier changes a bit of it, or a resumed half differs."""
    if name == "sft.py":
        pytest.importorskip("trl")
    pool, more = ranks(size), BF16[name] if precision == "bf16" else []
    stock = logged(pool, name, tmp_path / "stock", None, *more)
    found = {tier: logged(pool, name, tmp_path / tier, tier, *more) for tier in ("none", "host", "nvme")}
    assert len(stock["loss"]) >= STEPS and stock["loss"][-1] < 0.9 * stock["loss"][0]
    assert found["host"] == found["nvme"]
    tolerance = 1e-2 if more else 1e-5
    for numbers in found.values():
        for key, values in numbers.items():
            assert values == pytest.approx(stock[key], rel=10 * tolerance if key == "grad_norm" else tolerance)
    if size == 1 and name in HALF:
        again = logged(pool, name, tmp_path / "again", "host", *more, "--resume", str(tmp_path / "host" / HALF[name]))
        for key, values in again.items():
            assert values and values == found["host"][key][-len(values) :]


@pytest.mark.advice("launch it with torchrun, or with accelerate launch --multi_gpu")
@pytest.mark.parametrize("name", HALF)
def test_torchrun_runs_it(tmp_path, name):
    """Fails if a process group that accelerate or the Trainer makes is not like the one of the test above."""
    script = str(ROOT / "examples" / name)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", script]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    command += ["--output", str(tmp_path), "--steps", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    if name == "trainer.py":
        assert done.stdout.count("at stage 3 on 2 ranks, of each:") == 1  # the first rank says the plan, once
        assert (tmp_path / "checkpoint-2" / "zero").is_dir() and (tmp_path / "model.safetensors").is_file()
    else:
        assert len(json.loads((tmp_path / "losses.json").read_text())["train"]) == 4
        assert "loss of training" in done.stdout and (tmp_path / "model" / "model.safetensors").is_file()
