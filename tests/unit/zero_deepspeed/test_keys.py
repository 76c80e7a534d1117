"""The table of keys: what values they take, and what is said of a key that there is not."""

import itertools

import pytest

from zero_core.errors import ConfigError
from zero_deepspeed.keys import KEYS, NEEDLESS, REFUSED, RENAMED, SECTIONS
from zero_deepspeed.translation import translate

ZERO = "zero_optimization."


def nested(key, value):
    for name in reversed(key.split(".")):
        value = {name: value}
    return value


def only(key, value, **given):
    rows = {row.key: row for row in translate(nested(key, value), **given).rows}
    return rows[key]


@pytest.mark.promise("ds-unsupported")
@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
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
    ],
)
def test_a_value_that_cannot_be_is_refused_with_what_can(key, value, said):
    row = only(key, value)
    assert row.kind == "refused" and said in row.remark


@pytest.mark.promise("ds-unsupported")
@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("zero_optimisation", "zero_optimization"),
        ("gradient_accumulation_step", "gradient_accumulation_steps"),
        ("train_micro_batch_size", "train_micro_batch_size_per_gpu"),
        (f"{ZERO}stage3_prefetch_bucket", f"{ZERO}stage3_prefetch_bucket_size"),
        ("stage", f"{ZERO}stage"),
        ("overlap_comm", f"{ZERO}overlap_comm"),
        ("bf16.loss_scale_window", "fp16.loss_scale_window"),
        (f"{ZERO}offload_optimiser", f"{ZERO}offload_optimizer"),
        ("qwertz", None),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(key, meant):
    row = only(key, 1)
    assert row.kind == "refused" and row.remark.startswith("DeepSpeed has no such key")
    assert f"did you mean {meant}?" in row.remark if meant else "leave it out" in row.remark


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
