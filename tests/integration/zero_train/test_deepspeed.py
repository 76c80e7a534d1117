"""A run that a DeepSpeed JSON describes: its rates are DeepSpeed's, also after it was resumed."""

import json

import pytest

pytest.importorskip("transformers")
pytest.importorskip("zero_deepspeed")
pytest.importorskip("zero_optim_cpu")

from tests.integration.zero_train.helpers import COMMON, trained
from zero_train import app

# Printed by DeepSpeed 0.19.8's WarmupDecayLR over lr=2e-3, of 7 steps, 3 of them warm-up.
RATES = [0.0, 0.0, 0.0006309297535714573, 0.001, 0.001]
SCHEDULE = "optim.schedule={type: WarmupDecayLR, params: {total_num_steps: 7, warmup_num_steps: 3}}"


def test_a_file_is_followed_and_its_table_stands_before_the_plan(capsys, tmp_path):
    file = {
        "train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 3, "cpu_offload": True},
        "optimizer": {"type": "Adam", "params": {"lr": 2e-3}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 7, "warmup_num_steps": 3}},
    }
    (tmp_path / "ds.json").write_text(json.dumps(file))
    run = tmp_path / "run"
    words = [word for word in COMMON if not word.startswith("precision")]
    code = app.main([*words, f"run.dir={run}", f"deepspeed={tmp_path / 'ds.json'}", "run.sample_bytes=0"])
    text = capsys.readouterr().out
    assert code == 0
    order = ["zero_optimization.cpu_offload", "run.accumulate=2", "in fp32; stage 3 on 1 rank", "plan\n", "step 5/5"]
    positions = [text.index(word) for word in order]
    assert positions == sorted(positions)
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["learning_rate"] for step in steps] == RATES


def test_a_run_that_is_resumed_has_the_same_rates_and_bits(tmp_path):
    words = ("offload=host", SCHEDULE, "optim.lr=2e-3", "run.sample_bytes=0", "run.evaluate_every=0")
    straight = trained(tmp_path / "a", *words)
    trained(tmp_path / "b", *words, "run.steps=3", "run.checkpoint_every=3")
    resumed = trained(tmp_path / "b", *words, "run.resume=auto")
    assert [step.learning_rate for step in straight.steps] == RATES
    assert [step.learning_rate for step in resumed.steps] == RATES[3:]
    assert resumed.digest == straight.digest
