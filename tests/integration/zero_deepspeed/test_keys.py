"""DeepSpeed itself, where it is installed (`nox -s deepspeed`): its keys, batches, schedules and loss scale."""

import itertools
import os
import random

import pytest
import torch

from tests.unit.zero_deepspeed.test_translation import RECORDED
from zero_core import LossScale
from zero_core.errors import ConfigError, GradientError
from zero_deepspeed import from_deepspeed
from zero_deepspeed.keys import KEYS, NEEDLESS, REFUSED, RENAMED
from zero_deepspeed.schedules import make

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

_NOT_KEYS = {"inference"}  # of other modes than training
MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "zero_optimization.offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
    "zero_optimization.offload_param": DeepSpeedZeroOffloadParamConfig,
    "bf16": DeepSpeedBF16Config,
    "fp16": DeepSpeedFP16Config,
}


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


@pytest.mark.promise("ds-all-keys")
def test_every_key_that_deepspeed_looks_for_is_in_the_table():
    asked = Asked({"train_batch_size": 1})
    DeepSpeedConfig(asked)
    table = {*KEYS, *NEEDLESS, *REFUSED, *RENAMED}
    assert len(asked.names) > 40
    assert asked.names | set(_REMOVED_TOP_LEVEL_CONFIG_KEYS) <= {name.split(".")[0] for name in table} | _NOT_KEYS
    wanted = {f"activation_checkpointing.{name}" for name in ACT_CHKPT_DEFAULT}
    wanted |= {f"zero_optimization.{name}" for name in _REMOVED_ZERO_CONFIG_KEYS}
    for section, model in MODELS.items():
        wanted |= {
            f"{section}.{key}" for name, made in model.model_fields.items() for key in {name, made.alias or name}
        }
    assert wanted - {f"zero_optimization.{name}" for name in ("offload_optimizer", "offload_param")} <= table


@pytest.mark.promise("ds-all-keys")
def test_defaults_are_deepspeeds():
    for section in ("zero_optimization", "bf16", "fp16"):
        for name, made in MODELS[section].model_fields.items():
            key = KEYS.get(f"{section}.{made.alias or name}")
            assert key is None or key.default == made.default, f"{section}.{name}"
    config = DeepSpeedConfig({"train_batch_size": 1})
    assert KEYS["gradient_clipping"].default == config.gradient_clipping
    assert KEYS["dataloader_drop_last"].default == config.dataloader_drop_last


@pytest.mark.promise("ds-batches")
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


LINEAR = {"warmup_type": "linear"}
MINIMUM = {"warmup_min_lr": 1e-5, **LINEAR}
CASES = [
    *((name, params) for name, params, _ in RECORDED),
    ("WarmupLR", {**MINIMUM, "warmup_max_lr": 2e-3, "warmup_num_steps": 1}),
    ("WarmupDecayLR", {**MINIMUM, "total_num_steps": 3, "warmup_num_steps": 6}),
    ("WarmupCosineLR", {**LINEAR, "total_num_steps": 25, "warmup_num_steps": 6, "warmup_min_ratio": 0.1}),
    ("WarmupCosineLR", {"total_num_steps": 5, "warmup_num_steps": 6, "cos_min_ratio": 0.2}),
]


def _optimizer():
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (2e-3, 5e-4)]
    return torch.optim.AdamW(groups)


def _numbers(optimizer):
    return [group["lr"] for group in optimizer.param_groups]


@pytest.mark.promise("ds-schedules")
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


@pytest.mark.promise("ds-loss-scale")
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
