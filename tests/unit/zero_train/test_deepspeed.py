"""`deepspeed=FILE`: which keys of a run the file sets, what wins over it, and what is refused."""

import json

import pytest

from zero_train import app, config, deepspeed
from zero_train.errors import ConfigError

FILE = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 0.5,
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/a b"},
        "offload_param": {"device": "cpu"},
        "stage3_max_live_parameters": 1000,
        "overlap_comm": True,
    },
    "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.8, 0.9], "eps": "auto"}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 3, "total_num_steps": "auto"}},
}


def composed(tmp_path, file, *words):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    rest, given = deepspeed.split([*words, f"deepspeed={path}"])
    said = []
    defaults = deepspeed.read(given, config.keys_of(rest), said.append)
    return config.compose([*defaults, *rest]), "\n".join(said)


def test_the_files_values_take_the_place_of_defaults(tmp_path):
    made, table = composed(tmp_path, FILE)
    assert (made.run.micro_batch, made.run.accumulate, made.optim.max_grad_norm) == (4, 2, 0.5)
    assert (made.zero.stage, made.zero.resident_bytes) == (3, 2000)
    offload = made.offload
    assert (offload.parameters, offload.gradients, offload.optimizer) == ("host", "nvme", "nvme")
    assert offload.nvme_paths == ["/a b"]
    assert (made.precision.parameters, made.precision.states) == ("bf16", "split")
    assert (made.optim.kind, made.optim.lr, made.optim.betas, made.optim.eps) == ("adamw", 1e-4, [0.8, 0.9], 1e-8)
    assert made.optim.weight_decay == 0  # DeepSpeed's default, where the file has an optimizer
    params = {"warmup_num_steps": 3, "total_num_steps": made.run.steps}
    assert made.optim.schedule == {"type": "WarmupDecayLR", "params": params}
    lines = {line.split()[0]: line for line in table.splitlines()}
    assert table.splitlines()[-1].startswith("in this run: zero.stage=3 ")
    assert "the run's own" in lines["optimizer.params.eps"]


def test_the_command_line_wins_and_the_table_says_so(tmp_path):
    words = ("zero.stage=2", "offload=host", "optim.lr=0.5", "run.accumulate=1", "optim.final_fraction=0")
    made, table = composed(tmp_path, FILE, *words)
    assert (made.zero.stage, made.optim.lr, made.run.accumulate, made.run.micro_batch) == (2, 0.5, 1, 4)
    assert (made.offload.parameters, made.offload.optimizer) == ("host", "host")
    assert made.optim.schedule is None and made.optim.betas == [0.8, 0.9]
    [line] = [line for line in table.splitlines() if line.startswith("of the command line: ")]
    assert {"zero.stage", "offload", "optim.lr", "run.accumulate"} <= set(line.partition(": ")[2].split(", "))


def test_fractions_fp16_and_what_stays_on_the_device(tmp_path):
    zero = {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.25}}
    file = {"fp16": {"enabled": True, "hysteresis": 4}, "communication_data_type": "fp32", "zero_optimization": zero}
    made, _ = composed(tmp_path, file)
    assert made.offload.optimizer == {"device": 0.75, "host": 0.25} == made.offload.gradients
    assert made.precision.reduce == "fp32" and made.precision.loss_scale["hysteresis"] == 4
    made, _ = composed(tmp_path, {"fp16": {"enabled": True, "loss_scale": 64}})
    assert (made.offload.kind, made.zero.stage, made.precision.loss_scale) == ("none", 0, 64)


@pytest.mark.parametrize(
    ("file", "key"),
    [
        (
            {"zero_optimization": {"stage": 3, "zero_quantized_weights": True}},
            "zero_optimization.zero_quantized_weights",
        ),
        ({"optimizer": {"type": "RMSprop"}}, "optimizer.type"),
        ({"optimizer": {"type": "SGD", "params": {"lr": 1, "nesterov": True, "momentum": 0.9}}}, "nesterov"),
        ({"optimizer": {"type": "AdamW", "params": {"amsgrad": True}}}, "amsgrad"),
        ({"scheduler": {"type": "StepLR", "params": {"step_size": 1}}}, "scheduler.type"),
        ({"torch_autocast": {"enabled": True}}, "torch_autocast.enabled"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": 2}}, "zero_optimization.mics_shard_size"),
        ({"zero_optimization": {"stage": 3, "mics_shard_size": "many"}}, "zero_optimization.mics_shard_size"),
        ({"gradient_cliping": "auto"}, "gradient_cliping"),
    ],
)
def test_what_cannot_be_followed_ends_with_2_after_the_table(tmp_path, capsys, file, key):
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(file))
    assert app.main([f"deepspeed={path}", "run.dry=true"]) == 2
    printed = capsys.readouterr()
    assert " REFUSED " in printed.out
    assert f"deepspeed={path} has keys that cannot be followed" in printed.err and key in printed.err


def test_groups_of_mics_are_replicas(tmp_path, monkeypatch):
    file = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3, "mics_shard_size": 2}}
    monkeypatch.setenv("WORLD_SIZE", "8")
    made, table = composed(tmp_path, file)
    assert made.zero.replicas == 4 and "zero.replicas=4" in table
    assert composed(tmp_path, file, "zero.replicas=2")[0].zero.replicas == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert composed(tmp_path, file)[0].zero.replicas == 1


def test_a_file_that_is_missing_or_named_twice_ends_with_2(tmp_path, capsys):
    assert app.main([f"deepspeed={tmp_path / 'none.json'}"]) == 2
    assert "none.json" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="names one file"):
        deepspeed.split(["deepspeed=a", "deepspeed=b"])
