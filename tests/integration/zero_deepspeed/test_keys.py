"""DeepSpeed itself, where it is installed (`nox -s deepspeed`): its keys, batches, schedules, loss scale and "auto"."""

from __future__ import annotations

import itertools
import json
import os
import random
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, TrainingArguments

from zero_core import LossScale
from zero_core.errors import ConfigError, GradientError
from zero_deepspeed import from_deepspeed
from zero_deepspeed.keys import KEYS, RENAMED
from zero_deepspeed.reading import Reading, known
from zero_deepspeed.schedules import make
from zero_deepspeed.translation import translate

os.environ.setdefault("DS_ACCELERATOR", "cpu")
deepspeed = pytest.importorskip("deepspeed", reason="DeepSpeed is not installed: nox -s deepspeed")
from deepspeed.runtime import lr_schedules  # noqa: E402
from deepspeed.runtime.activation_checkpointing.config import ACT_CHKPT_DEFAULT  # noqa: E402
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS, DeepSpeedConfig  # noqa: E402
from deepspeed.runtime.fp16 import loss_scaler  # noqa: E402
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config  # noqa: E402
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig  # noqa: E402
from deepspeed.runtime.zero.offload_config import (  # noqa: E402
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)

CONFIGS = Path(__file__).parents[2] / "unit" / "zero_deepspeed" / "configs"
_NOT_KEYS = {"inference"}  # of other modes than training


class Asked(dict):
    """A configuration that remembers which keys DeepSpeed looked for in it."""

    def __init__(self, *given):
        super().__init__(*given)
        self.names = set()

    def get(self, key, default=None):
        self.names.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.names.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


def test_every_key_that_deepspeed_looks_for_is_in_the_table():
    asked = Asked({"train_batch_size": 1})
    DeepSpeedConfig(asked)
    known = {name.split(".")[0] for name in (*KEYS, *RENAMED)}
    assert len(asked.names) > 40
    assert asked.names | set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) <= known | _NOT_KEYS
    for section, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("zero_optimization.offload_optimizer", DeepSpeedZeroOffloadOptimizerConfig),
        ("zero_optimization.offload_param", DeepSpeedZeroOffloadParamConfig),
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
    ):
        for name, made in model.model_fields.items():
            for key in {name, made.alias or name} - {"offload_optimizer", "offload_param"}:
                assert f"{section}.{key}" in {*KEYS, *RENAMED}, f"{section}.{key}"
    assert {f"activation_checkpointing.{name}" for name in ACT_CHKPT_DEFAULT} <= set(KEYS)
    assert {f"zero_optimization.{name}" for name in _REMOVED_ZERO_CONFIG_KEYS} <= set(KEYS)


def test_defaults_are_deepspeeds():
    for section, model in (
        ("zero_optimization", DeepSpeedZeroConfig),
        ("bf16", DeepSpeedBF16Config),
        ("fp16", DeepSpeedFP16Config),
    ):
        for name, made in model.model_fields.items():
            key = KEYS.get(f"{section}.{made.alias or name}")
            if key is not None and key.kind == "mapped":
                assert key.default == made.default, f"{section}.{name}"
    config = DeepSpeedConfig({"train_batch_size": 1})
    assert KEYS["gradient_clipping"].default == config.gradient_clipping
    assert KEYS["dataloader_drop_last"].default == config.dataloader_drop_last


@pytest.mark.parametrize("name", ["stage1", "stage2_cpu", "stage3_cpu", "stage3_nvme", "fp16", "zeropp", "zenflow"])
def test_files_of_the_unit_tests_are_deepspeeds_language(name):
    """mics is of versions before 0.19.8, tensor_parallel needs two ranks, auto the TrainingArguments."""
    config = json.loads((CONFIGS / f"{name}.json").read_text())
    config.pop("train_batch_size", None)  # it is checked against the ranks that there are
    DeepSpeedConfig(config | {"train_micro_batch_size_per_gpu": 1})


def test_batches_resolve_and_are_refused_as_in_deepspeed():
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    for values in itertools.product((None, 12, 7), (None, 1, 3, 5), (None, 1, 4)):
        config = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        try:
            theirs = DeepSpeedConfig(dict(config))
        except AssertionError:
            if any(values[:2]):  # where neither is given, the caller's loop says
                with pytest.raises(ConfigError):
                    from_deepspeed(config, world_size=1)
            continue
        ours = from_deepspeed(config, world_size=1)
        assert (ours.train_batch_size, ours.micro_batch_size, ours.accumulate) == (
            theirs.train_batch_size,
            theirs.train_micro_batch_size_per_gpu,
            theirs.gradient_accumulation_steps,
        )


CYCLE = {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3, "cycle_first_step_size": 5}
MINIMUM = {"warmup_min_lr": 1e-5, "warmup_type": "linear"}
RANGES = {"lr_range_test_min_lr": [1e-4, 1e-5], "lr_range_test_step_size": 5, "lr_range_test_staircase": True}
DECAYS = {"decay_step_size": 4, "decay_lr_rate": 0.3, "decay_mom_rate": 0.01}
STAIRS = {"cycle_first_step_size": 8, "cycle_first_stair_count": 4, "cycle_second_stair_count": 3}
CASES = [
    ("WarmupLR", {"warmup_num_steps": 7}),
    ("WarmupLR", {**MINIMUM, "warmup_max_lr": [1e-3, 2e-3], "warmup_num_steps": 1}),
    ("WarmupLR", {**MINIMUM, "warmup_max_lr": 1e-3, "warmup_num_steps": 10}),
    ("WarmupDecayLR", {"total_num_steps": 25, "warmup_num_steps": 6}),
    ("WarmupDecayLR", {**MINIMUM, "total_num_steps": 3, "warmup_num_steps": 6}),
    ("WarmupCosineLR", {"total_num_steps": 25, "warmup_num_steps": 6}),
    (
        "WarmupCosineLR",
        {"total_num_steps": 25, "warmup_num_steps": 6, "warmup_type": "linear", "warmup_min_ratio": 0.1},
    ),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 6, "cos_min_ratio": 0.2}),
    ("LRRangeTest", {}),
    ("LRRangeTest", RANGES),
    ("OneCycle", CYCLE),
    (
        "OneCycle",
        {**CYCLE, **DECAYS, "cycle_second_step_size": 9, "cycle_min_mom": 0.85, "cycle_max_mom": [0.95, 0.99]},
    ),
    ("OneCycle", {**CYCLE, **DECAYS, **STAIRS, "cycle_second_step_size": 12}),
    ("OneCycle", {**CYCLE, **DECAYS, "cycle_second_step_size": 0, "cycle_momentum": False}),
]


def _optimizer():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (2e-3, 5e-4)]
    return torch.optim.AdamW(groups)


def _numbers(optimizer):
    return [(group["lr"], tuple(group["betas"])) for group in optimizer.param_groups]


@pytest.mark.parametrize(("name", "params"), CASES)
def test_schedules_are_deepspeeds_bit_for_bit_and_go_on_from_its_state(name, params):
    theirs_over, ours_over = _optimizer(), _optimizer()
    theirs, ours = getattr(lr_schedules, name)(theirs_over, **params), make(name, ours_over, params)
    for _ in range(40):
        assert _numbers(ours_over) == _numbers(theirs_over)
        assert ours.state_dict() == theirs.state_dict()
        again = _optimizer()
        make(name, again, params).load_state_dict(theirs.state_dict())
        assert _numbers(again) == _numbers(theirs_over)
        ours_over.step()
        theirs.step()
        ours.step()


@pytest.mark.parametrize("seed", range(20))
def test_the_loss_scale_is_deepspeeds_step_for_step(seed, monkeypatch):
    monkeypatch.setattr(loss_scaler.dist, "get_rank", lambda: 1)
    draw = random.Random(seed)
    fp16 = {
        "enabled": True,
        "initial_scale_power": draw.choice([6, 10]),
        "loss_scale_window": draw.choice([1, 2, 5]),
        "hysteresis": draw.choice([1, 2, 3]),
        "consecutive_hysteresis": draw.random() < 0.5,
        "min_loss_scale": draw.choice([1, 16]),
    }
    config = {"train_batch_size": 1, "fp16": fp16, "zero_optimization": {"stage": 2}}
    theirs = loss_scaler.CreateLossScaler(
        torch.half, 0, True, DeepSpeedConfig(dict(config)).float16_config.dynamic_loss_scale_args()
    )
    ours = from_deepspeed(config, world_size=1).loss_scale
    assert isinstance(ours, LossScale)
    for _ in range(200):
        assert ours.value == theirs.loss_scale
        overflow = draw.random() < 0.3
        try:
            theirs.update_scale(overflow)
        except Exception as error:
            assert "minimum" in str(error)
            with pytest.raises(GradientError, match="its minimum"):
                ours.overflowed()
            return
        ours.overflowed() if overflow else ours.succeeded()


def test_auto_is_what_transformers_makes_of_it(tmp_path):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    args = TrainingArguments(
        str(tmp_path), use_cpu=True, report_to=[], per_device_train_batch_size=3, gradient_accumulation_steps=2,
        learning_rate=2e-5, weight_decay=0.1, adam_beta2=0.95, max_grad_norm=0.3, warmup_steps=7, bf16=True,
    )  # fmt: skip
    model = torch.nn.Linear(1, 1)
    model.config = LlamaConfig(hidden_size=96, num_attention_heads=4)
    written = json.loads((CONFIGS / "auto.json").read_text())
    theirs = HfTrainerDeepSpeedConfig(json.loads(json.dumps(written)))
    try:
        theirs.trainer_config_process(args)
        theirs.trainer_config_finalize(args, model, 50)
    finally:
        unset_hf_deepspeed_config()
    ours = Reading(written, known(args, model, 1, 50))
    assert not [row for row in ours.rows.values() if row.kind == "refused"]
    for key, value in ours.values.items():
        wanted = theirs.get_value(key)
        assert wanted != "auto" and value == (tuple(wanted) if isinstance(wanted, list) else wanted), key


def test_values_that_contradict_the_arguments_are_those_that_transformers_names(tmp_path):
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig, unset_hf_deepspeed_config

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], max_steps=9)
    written = {
        "train_micro_batch_size_per_gpu": 4, "train_batch_size": 4, "gradient_clipping": 0.5, "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.99], "eps": 1e-8, "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_max_lr": 1, "total_num_steps": 8}},
    }  # fmt: skip
    theirs = HfTrainerDeepSpeedConfig(json.loads(json.dumps(written)))
    try:
        theirs.trainer_config_process(args)
        with pytest.raises(ValueError):
            theirs.trainer_config_finalize(args, torch.nn.Linear(1, 1), 9)
    finally:
        unset_hf_deepspeed_config()
    named = {line.split()[2].split("=")[0] for line in theirs.mismatches}
    assert {row.key for row in translate(written, arguments=args).refused} == named
