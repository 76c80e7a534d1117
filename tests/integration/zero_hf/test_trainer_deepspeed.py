"""A Trainer script with `--deepspeed ds_config.json`: the sharded Trainer follows the JSON, without DeepSpeed."""

import copy
import dataclasses
import importlib.util
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import HfArgumentParser, Trainer, TrainingArguments

import zero_hf

from .trainers import Sharded, llama, train

pytestmark = pytest.mark.promise("ds-trainer")

Arguments = zero_hf.sharded(TrainingArguments)
ZERO = {"stage": 3, "offload_optimizer": {"device": "cpu"}, "offload_param": {"device": "cpu"}}
AUTO = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto"),
    },
    "zero_optimization": ZERO,
}


def without(*keys):
    return {key: value for key, value in AUTO.items() if key not in keys}


def ours(folder, config, cls=Sharded, **more):
    return train(cls, folder, arguments_class=Arguments, deepspeed=config, **more)


def test_auto_is_what_the_arguments_say(tmp_path):
    """Fails if a loss or a norm differs from the stock Trainer's. The stock schedule is used where there is none."""
    more = dict(gradient_accumulation_steps=2, max_grad_norm=0.5, adam_beta2=0.95)
    _, stock = train(Trainer, tmp_path / "stock", **more)
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(without("scheduler")))
    made, logs = ours(tmp_path / "ours", str(file), **more)
    assert logs.losses == pytest.approx(stock.losses, rel=1e-5)
    assert logs.norms == pytest.approx(stock.norms, rel=1e-4)
    assert made.zero_config.placements == dict.fromkeys(("parameters", "gradients", "optimizer"), "host")
    made.end()


def test_the_files_schedule_is_used_and_resumed(tmp_path):
    """Fails if the steps of "auto" are not the Trainer's, or the schedule starts again when a run is resumed."""
    options = dict(warmup_steps=2, max_steps=6, save_strategy="steps", save_steps=3)
    made, logs = ours(tmp_path, AUTO, **options)
    rates = [row["learning_rate"] for row in made.state.log_history if "learning_rate" in row]
    assert rates[-1] == pytest.approx(1e-2 / 2) and max(rates) == pytest.approx(1e-2)
    made.end()
    again, resumed = ours(tmp_path, AUTO, resume=str(tmp_path / "checkpoint-3"), **options)
    assert resumed.losses == logs.losses[3:]
    again.end()


@pytest.mark.parametrize(("config", "clipped"), [({}, 1.0), ({"gradient_clipping": 0.0}, 0.0)])
def test_without_a_key_for_it_gradients_are_clipped_at_1_as_in_deepspeed(tmp_path, config, clipped):
    _, stock = train(Trainer, tmp_path / "stock", max_grad_norm=clipped)
    made, logs = ours(tmp_path / "ours", without("scheduler", "gradient_clipping") | config, max_grad_norm=0.0)
    assert logs.losses == pytest.approx(stock.losses, rel=1e-5)
    made.end()


def test_bf16_computes_in_bf16_parameters_and_not_under_autocast(tmp_path):
    """Also where the file has no section for it, which transformers adds."""
    for name, config in (("auto", AUTO), ("none", without("bf16"))):
        made, logs = ours(tmp_path / name, config, bf16=True, max_steps=2)
        assert {p.dtype for p in made.model.parameters()} == {torch.bfloat16}
        assert made.accelerator.mixed_precision == "no" and len(logs.losses) == 2
        made.end()


@pytest.mark.promise("ds-contradictions")
def test_what_contradicts_or_cannot_be_followed_is_refused_before_anything_is_allocated(tmp_path):
    def refused(match, config=AUTO, **more):
        with pytest.raises(zero_hf.ConfigError, match=match):
            ours(tmp_path, config, **more)

    refused("gradient_clipping=0.5: the TrainingArguments have max_grad_norm=1.0", AUTO | {"gradient_clipping": 0.5})
    refused("both set the ZeRO stage: leave one out", cls=zero_hf.sharded(Trainer, zero={"stage": 2}))
    refused("There is no|No such file", str(tmp_path / "missing.json"))


@pytest.mark.usefixtures("process_group_ends")
def test_what_the_refusal_of_fp16_says_to_do_works(tmp_path):
    """Fails if the Trainer or the loop that the error names is refused, too."""
    half = AUTO | {"fp16": {"enabled": True}}
    with pytest.raises(zero_hf.ConfigError, match="cannot be used with zero_hf.sharded") as refused:
        ours(tmp_path, half)
    assert '"bf16": {"enabled": true} in its place' in str(refused.value) and "bf16=True" in str(refused.value)
    _, logs = ours(tmp_path, AUTO | {"bf16": {"enabled": True}}, bf16=True)
    assert len(logs.losses) == 6
    assert "zero_hf.deepspeed.initialize" in str(refused.value)
    model = llama()
    config = {"train_batch_size": 1, "optimizer": {"type": "AdamW"}, "zero_optimization": {"stage": 2}}
    engine, *_ = zero_hf.deepspeed.initialize(model=model, config=config | {"fp16": {"enabled": True}})
    engine.backward(engine(input_ids=torch.ones(1, 4).long(), labels=torch.ones(1, 4).long()).loss)
    engine.step()
    engine.destroy()


def test_the_class_of_arguments_is_read_by_parsers_and_pickles_as_the_stock_one(tmp_path):
    """Fails if training_args.bin needs this package, or stock code sees that deepspeed was given."""
    assert Arguments is zero_hf.sharded(TrainingArguments) is zero_hf.sharded(Arguments)
    line = ["--output_dir", str(tmp_path), "--deepspeed", "ds.json", "--use_cpu", "--report_to", "none"]
    (given,) = HfArgumentParser(Arguments).parse_args_into_dataclasses(line)
    assert given.deepspeed == "ds.json" and given.deepspeed_plugin is None
    for copied in (dataclasses.replace(given), copy.deepcopy(given), copy.copy(given), Arguments(**given.to_dict())):
        assert type(copied) is Arguments and copied.deepspeed == "ds.json" and copied.deepspeed_plugin is None
    read = pickle.loads(pickle.dumps(given))
    assert type(read) is TrainingArguments and read.output_dir == given.output_dir


def by_json(tmp_path, which, world, precision, config=AUTO, *more):
    """The losses of 20 steps, by the Trainer of transformers with DeepSpeed ("stock"), or by the sharded one."""
    file = tmp_path / "ds_config.json"
    file.write_text(json.dumps(config))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(world)]
    command += ["-m", "tests.integration.zero_hf.trained_by_json", which, str(file), str(tmp_path), precision, *more]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    root = Path(__file__).parents[3]
    found = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
    return json.loads((tmp_path / f"{which}.json").read_text())


needs_deepspeed = pytest.mark.skipif(
    importlib.util.find_spec("deepspeed") is None, reason="DeepSpeed is not installed: nox -s deepspeed"
)


@needs_deepspeed
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_losses_are_those_of_the_trainer_with_deepspeed(tmp_path, world, precision):
    """Fails if a loss of 20 steps differs by more than 1e-5 (relative) in fp32, or 1e-2 in bf16."""
    stock, sharded = (by_json(tmp_path, which, world, precision) for which in ("stock", "ours"))
    assert len(stock) == 20
    assert sharded == pytest.approx(stock, rel=1e-5 if precision == "fp32" else 1e-2)


@pytest.mark.promise("ds-goes-on")
@needs_deepspeed
@pytest.mark.parametrize("schedule", ["files", "trainers"])
def test_what_the_trainer_with_deepspeed_saved_is_resumed(tmp_path, schedule):
    """Fails if the sharded Trainer has other losses than the run that saved goes on with."""
    config = AUTO if schedule == "files" else without("scheduler")
    stock = by_json(tmp_path, "stock", 1, "fp32", config)
    sharded = by_json(tmp_path, "ours", 1, "fp32", config, str(tmp_path / "stock" / "checkpoint-10"))
    assert len(stock) == 20 and len(sharded) == 10
    assert sharded == pytest.approx(stock[10:], rel=1e-5)
