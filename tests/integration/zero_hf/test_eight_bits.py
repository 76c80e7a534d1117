"""`optim="adamw_8bit"` of a Trainer: 8-bit moments on the host and on NVMe, without bitsandbytes; refused elsewhere."""

import pytest

from tests.integration.zero_hf.trainers import Sharded, train
from zero_hf import ConfigError


@pytest.mark.promise("hf-adamw-8bit")
@pytest.mark.parametrize("name", ["adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"])
def test_the_usual_names_are_adamw_with_8_bit_moments(tmp_path, name):
    """Equal to the layout by its own name, at less than a third of the bytes of fp32 ones."""
    made, logs = train(Sharded, tmp_path / "named", zero={"offload": "host"}, optim=name)
    assert made.args.optim == name and made.zero_run.config.states == "split_8bit"
    zero = {"offload": "host", "states": "split_8bit"}
    other, expected = train(Sharded, tmp_path / "plain", zero=zero, optim="adamw_torch")
    assert logs.losses == expected.losses
    exact, _ = train(Sharded, tmp_path / "exact", zero={"offload": "host"}, optim="adamw_torch")
    few, many = (each.zero_run.plan.bytes_of("host", "optimizer") for each in (made, exact))
    assert few < many / 3
    for each in (made, other, exact):
        each.end()


@pytest.mark.advice('write optimizer: host (or offload: host), or optim="adamw_torch"')
@pytest.mark.promise("hf-adamw-8bit")
def test_states_on_the_device_and_other_layouts_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"optim='adamw_8bit' keeps moments in 8 bits on the host .* optimizer: host"):
        train(Sharded, tmp_path, zero={"stage": 3}, optim="adamw_8bit")
    train(Sharded, tmp_path, zero={"stage": 3, "optimizer": "host"}, optim="adamw_8bit")[0].end()
    train(Sharded, tmp_path, zero={"stage": 3}, optim="adamw_torch")[0].end()
    narrow = {"offload": "host", "states": "split_bf16m", "param_dtype": "bf16"}
    with pytest.raises(ConfigError, match=r"both say how states are kept: leave states out, or write .*adamw_torch"):
        train(Sharded, tmp_path, zero=narrow, optim="adamw_8bit")
    train(Sharded, tmp_path, zero=narrow, optim="adamw_torch")[0].end()
    train(Sharded, tmp_path, zero={**narrow, "states": "fp32"}, optim="adamw_8bit")[0].end()


@pytest.mark.promise("hf-adamw-8bit")
def test_a_later_stage_of_the_same_trainer_may_ask_for_exact_moments(tmp_path):
    made, _ = train(Sharded, tmp_path, zero={"offload": "host"}, optim="adamw_8bit")
    made.end()
    made.args.optim, made.optimizer, made.lr_scheduler = "adamw_torch", None, None
    made.train()
    assert made.zero_run.config.states == "fp32"
    made.end()
