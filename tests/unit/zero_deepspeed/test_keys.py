"""The table of keys: what values they take, and what is said of a key or a type that there is not."""

import itertools

import pytest

from zero_core.errors import ConfigError
from zero_deepspeed.keys import KEYS, NEEDLESS, REFUSED, RENAMED, SECTIONS
from zero_deepspeed.translation import translate

ZERO, PARAMS = "zero_optimization.", "optimizer.params"


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def only(key, value, **given):
    rows = {row.key: row for row in translate(nested(key, value), **given).rows}
    return rows[key]


MEANT = {
    "zero_optimisation": "zero_optimization",
    "gradient_accumulation_step": "gradient_accumulation_steps",
    "train_micro_batch_size": "train_micro_batch_size_per_gpu",
    f"{ZERO}stage3_prefetch_bucket": f"{ZERO}stage3_prefetch_bucket_size",
    "stage": f"{ZERO}stage",
    "overlap_comm": f"{ZERO}overlap_comm",
    "bf16.loss_scale_window": "fp16.loss_scale_window",
    f"{ZERO}offload_optimiser": f"{ZERO}offload_optimizer",
}
REFUSALS = [  # the key, its value, what the refusal says, and the key that is refused if it is another one
    ("train_batch_size", "16", "'16' is not an integer of at least 1"),
    ("train_micro_batch_size_per_gpu", 0, "0 is not an integer of at least 1"),
    ("gradient_accumulation_steps", True, "True is not an integer"),
    (f"{ZERO}stage3_prefetch_bucket_size", 1.5, "1.5 is not an integer of at least 0"),
    ("gradient_clipping", float("nan"), "nan is not a number of at least 0"),
    (f"{ZERO}offload_optimizer.ratio", 1.5, "1.5 is not a number from 0 to 1"),
    (f"{ZERO}stage", "3", "'3' is not one of 0, 1, 2, 3"),
    (f"{ZERO}offload_optimizer.device", "gpu", "'gpu' is not one of 'none', 'cpu', 'nvme'"),
    (f"{ZERO}cpu_offload", "yes", "'yes' is not one of 'none', 'cpu', 'nvme'"),
    ("bf16.enabled", 1, "1 is not one of True, False"),
    ("fp16", True, "it is a section: give an object of keys"),
    *((key, 1, f"DeepSpeed has no such key: did you mean {meant}?") for key, meant in MEANT.items()),
    ("qwertz", 1, "DeepSpeed has no such key: leave it out"),
    ("optimizer", {"type": "AdamW", "params": {"betas": [0.9, 1.5]}}, "Invalid beta parameter", "optimizer.type"),
    ("optimizer", {"type": "Adam", "params": {"beta": 1}}, "did you mean optimizer.params.betas", f"{PARAMS}.beta"),
    ("optimizer", {"type": "SGD", "params": {"lr": "x"}}, "'x' is not a number", f"{PARAMS}.lr"),
    ("optimizer", {"type": "Adam", "params": {"amsgrad": "no"}}, "is not one of", f"{PARAMS}.amsgrad"),
    ("scheduler", {"type": "StepLR", "params": {"step_size": 0}}, "StepLR cannot be made", "scheduler.type"),
    ("scheduler", {"type": "WarmupLR", "params": {"warmup_type": "exp"}}, "write log or linear", "scheduler.type"),
    ("scheduler.type", "WarmupDecayLR", "missing a required argument: 'total_num_steps'"),
    *(
        ("optimizer.type", name, "take one of Adadelta, Adagrad, Adam, ")
        for name in ("Lamb", "OneBitAdam", "ZeroOneAdam", "Muon", "LBFGS", "Adafactor", "Optimizer")
    ),
]


@pytest.mark.promise("ds-unsupported")
@pytest.mark.parametrize("row", REFUSALS)
def test_what_cannot_be_is_refused_with_what_can(row):
    """What a refusal says to write is followed in test_json_advice.py."""
    key, value, said, *other = row
    [found] = translate(nested(key, value)).refused
    assert found.key == (other or [key])[0] and said in found.remark


@pytest.mark.promise("ds-older-names")
@pytest.mark.parametrize(
    ("written", "value", "ours"),
    [
        ("zero_optimization", True, ("stage", 1)),
        (f"{ZERO}cpu_offload", True, ("optimizer", "host")),
        (f"{ZERO}cpu_offload", False, ("optimizer", "device")),
        (f"{ZERO}cpu_offload_params", True, ("parameters", "host")),
        (f"{ZERO}prefetch_bucket_size", 10, ("prefetch_bytes", 40)),
        ("bfloat16.enabled", True, ("param_dtype", "bf16")),
    ],
)
def test_older_names_mean_what_they_meant(written, value, ours):
    found = translate(nested(written, value))
    rows = {row.key: row for row in found.rows}
    assert getattr(found.zero, ours[0]) == ours[1] and ours[0] in rows[written].ours
    assert rows[written].remark.startswith("an older name of ")


def test_a_refused_key_that_asks_for_nothing_is_needless():
    for key, value in (
        ("tensor_parallel", {"autotp_size": 1}),
        ("compile", {"deepcompile": False, "backend": "inductor"}),
        ("data_efficiency", {"enabled": False}),
        (f"{ZERO}zero_quantized_weights", False),
        ("gradient_allreduce_op", "mean"),
        ("sparse_attention", None),
        ("zero_optimization", {}),
        (f"{ZERO}offload_param", None),
    ):
        assert only(key, value).kind == "needless", key


@pytest.mark.promise("ds-any-value")
def test_no_value_of_any_key_raises_anything_but_a_refusal():
    """A table is made of whatever a file holds; what cannot be is in it as refused, or has a ConfigError's sentence."""
    values = (None, True, 0, 1, -1, 1.5, 1e400, "x", "auto", [], [1, 2], {}, {"a": 1})
    refused = 0
    for key, value in itertools.product(
        [*KEYS, *NEEDLESS, *REFUSED, *RENAMED, *SECTIONS, "optimizer.params.lr", "x.y"], values
    ):
        try:
            found = translate(nested(key, value))
        except ConfigError as error:
            assert key in str(error)
            continue
        assert found.table()
        refused += bool(found.refused)
    assert refused > 800
