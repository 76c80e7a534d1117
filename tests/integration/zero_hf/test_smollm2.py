"""SmolLM2-135M-Instruct, a pretrained chat model, fine-tuned with SFTTrainer: full and LoRA, everything on NVMe."""

import json
import subprocess
import sys

import pytest

from .launching import ROOT
from .real_model import made, skip_where_missing

pytest.importorskip("trl")
skip_where_missing()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    where = tmp_path_factory.mktemp("smollm2")
    made(where / "model")
    return where


@pytest.mark.promise("smollm2")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("method", ["full", "LoRA"])
def test_it_is_fine_tuned_killed_and_resumed(folder, method):
    """Fails if a real model's losses are not the stock run's, or those after kill -9 not those without it."""
    # kill -9 comes after the second step, when the first one's checkpoint is complete
    given = "--steps 4 --batch 1 --save 1 --threads 1".split()
    command = [sys.executable, "-m", "tests.benchmarks.sft", str(folder), *given]
    command += ["--adapters"] if method == "LoRA" else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    stock, nvme, killed = [json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"variant"')]
    assert stock["steps"] == nvme["steps"] == killed["steps"] == 4
    assert nvme["farthest"] < 1e-5
    assert killed["resumed_at"] > 1
    assert killed["last_loss"] == nvme["last_loss"]
