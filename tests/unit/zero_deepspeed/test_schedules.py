"""DeepSpeed's schedules: its own numbers, and states that go both ways.

The numbers of RECORDED were printed by DeepSpeed 0.19.8's classes (deepspeed.runtime.lr_schedules), over AdamW with
lr=2e-3: the rates of the first steps. `nox -s deepspeed` compares all of them with the real ones.
"""

from __future__ import annotations

import pytest
import torch

from zero_deepspeed.schedules import make

RECORDED = [
    ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.001, 0.0015849625007211563, 0.002, 0.002], None),
    (
        "WarmupLR",
        {"warmup_max_lr": 0.001, "warmup_min_lr": 1e-05, "warmup_num_steps": 4, "warmup_type": "linear"},
        [1e-05, 1e-05, 0.0002575, 0.000505, 0.0007525, 0.001, 0.001],
        None,
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 7, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0006309297535714573, 0.001, 0.001, 0.00075, 0.0005, 0.00025, 0.0, 0.0],
        None,
    ),
    (
        "WarmupCosineLR",
        {"cos_min_ratio": 0.1, "total_num_steps": 7, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0012618595071429146, 0.002, 0.0017363961030678928, 0.0011, 0.0004636038969321073, 0.0002, 0.0002],
        None,
    ),
    (
        "LRRangeTest",
        {"lr_range_test_min_lr": 0.0001, "lr_range_test_step_rate": 3, "lr_range_test_step_size": 2},
        [0.0001, 0.00025, 0.0004, 0.00055, 0.0007, 0.0008500000000000001],
        None,
    ),
    (
        "OneCycle",
        {"cycle_first_step_size": 3, "cycle_max_lr": 0.001, "cycle_min_lr": 0.0001}
        | {"decay_lr_rate": 0.3, "decay_mom_rate": 0.01, "decay_step_size": 4},
        [0.0001, 0.00040000000000000013, 0.0006999999999999999, 0.001, 0.0007000000000000003, 0.0003999999999999997]
        + [0.0001, 9.30232558139535e-05, 8.695652173913044e-05, 8.163265306122449e-05],
        [0.8, 0.8666666666666667, 0.8333333333333334, 0.8, 0.8333333333333334, 0.8666666666666667]
        + [0.9, 0.90225, 0.9045, 0.9067500000000001],
    ),
]


@pytest.mark.parametrize("saved", [None, 2])
@pytest.mark.parametrize(("name", "params", "rates", "momenta"), RECORDED)
def test_rates_and_momenta_are_deepspeeds(name, params, rates, momenta, saved):
    """From the beginning, and from a state of DeepSpeed's."""
    over = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    schedule = make(name, over, params)
    if saved is not None:
        schedule.load_state_dict({"last_batch_iteration": saved})
    start, found = 0 if saved is None else saved + 1, []
    for _ in rates[start:]:
        found.append((over.param_groups[0]["lr"], over.param_groups[0]["betas"][0]))
        over.step()
        schedule.step()
    assert [rate for rate, _ in found] == rates[start:]
    assert momenta is None or [momentum for _, momentum in found] == momenta[start:]
    assert schedule.state_dict() == {"last_batch_iteration": start - 1 + len(found)}
