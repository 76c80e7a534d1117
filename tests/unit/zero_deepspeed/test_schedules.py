"""DeepSpeed's schedules: its own numbers, and states that go both ways.

The numbers of RECORDED were printed by DeepSpeed 0.19.8's classes (deepspeed.runtime.lr_schedules), over AdamW with
lr=2e-3: the rates of the first steps. `nox -s deepspeed` compares all of them with the real ones.
"""

import pytest
import torch

from zero_deepspeed.schedules import make

RECORDED = [
    ("WarmupLR", {"warmup_num_steps": 4}, [0.0, 0.0, 0.001, 0.0015849625007211563, 0.002, 0.002]),
    (
        "WarmupLR",
        {"warmup_max_lr": 0.001, "warmup_min_lr": 1e-05, "warmup_num_steps": 4, "warmup_type": "linear"},
        [1e-05, 1e-05, 0.0002575, 0.000505, 0.0007525, 0.001, 0.001],
    ),
    (
        "WarmupDecayLR",
        {"total_num_steps": 7, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0006309297535714573, 0.001, 0.001, 0.00075, 0.0005, 0.00025, 0.0, 0.0],
    ),
    (
        "WarmupCosineLR",
        {"cos_min_ratio": 0.1, "total_num_steps": 7, "warmup_num_steps": 3},
        [0.0, 0.0, 0.0012618595071429146, 0.002, 0.0017363961030678928, 0.0011, 0.0004636038969321073, 0.0002, 0.0002],
    ),
]


@pytest.mark.promise("ds-schedules")
@pytest.mark.parametrize("saved", [None, 2])
@pytest.mark.parametrize(("name", "params", "rates"), RECORDED)
def test_rates_are_deepspeeds(name, params, rates, saved):
    """From the beginning, and from a state of DeepSpeed's."""
    over = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=2e-3)
    schedule = make(name, over, params)
    if saved is not None:
        schedule.load_state_dict({"last_batch_iteration": saved})
    start, found = 0 if saved is None else saved + 1, []
    for _ in rates[start:]:
        found.append(over.param_groups[0]["lr"])
        over.step()
        schedule.step()
    assert found == rates[start:]
    assert schedule.state_dict() == {"last_batch_iteration": start - 1 + len(found)}
