"""DeepSpeed's types of optimizers as torch's, with DeepSpeed's defaults."""

import pytest
import torch

from zero_deepspeed.translation import translate


@pytest.mark.parametrize(
    ("kind", "params", "made", "some"),
    [
        ("Adam", {}, torch.optim.AdamW, {"lr": 1e-3, "weight_decay": 0.0}),  # DeepSpeed's Adam is AdamW
        ("Adam", {"adam_w_mode": False, "weight_decay": 0.1}, torch.optim.Adam, {"weight_decay": 0.1}),
        ("AdamW", {"adam_w_mode": False}, torch.optim.AdamW, {"weight_decay": 0.0}),
        ("adamw", {"torch_adam": True}, torch.optim.AdamW, {"weight_decay": 0.01}),  # torch's own default
        ("Adagrad", {}, torch.optim.Adagrad, {"lr": 1e-2, "eps": 1e-10}),
        ("SGD", {"lr": 0.1, "momentum": 0.9}, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        ("RMSprop", {"alpha": 0.5}, torch.optim.RMSprop, {"alpha": 0.5}),
    ],
)
def test_a_type_is_made_with_deepspeeds_defaults(kind, params, made, some):
    found = translate({"optimizer": {"type": kind, "params": params}})
    assert not found.refused
    optimizer = found.optimizer([torch.nn.Parameter(torch.zeros(2))])
    assert type(optimizer) is made
    assert {key: optimizer.param_groups[0][key] for key in some} == some


@pytest.mark.promise("ds-unsupported")
@pytest.mark.parametrize("name", ["Lamb", "OneBitAdam", "ZeroOneAdam", "Muon", "LBFGS", "Adafactor", "Optimizer"])
def test_what_cannot_be_followed_is_refused_by_name(name):
    [row] = translate({"optimizer": {"type": name, "params": {"lr": 1e-3}}}).refused
    assert row.key == "optimizer.type" and "take one of Adadelta, Adagrad, Adam, " in row.remark
