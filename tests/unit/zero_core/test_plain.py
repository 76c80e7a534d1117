"""Plain values keep their types and bits as bytes, and what is not plain is refused by name."""

import math
import random

import pytest
import torch

from zero_core.errors import ZeroError
from zero_core.util.tensor_json import packed, unpacked

VALUES = [
    None, True, -(2**70), 0.1, -0.0, math.inf, math.nan, "käse", b"\x00\xff", [], (), {}, [1, (2, [3])],
    {"a": {1: None, (2, "b"): [True]}, 2.5: "c"}, {"dict": 1, "tuple": (1,), "tensor": [0]},
    random.Random(1).getstate(),
]  # fmt: skip


@pytest.mark.promise("durable-no-pickle")
@pytest.mark.parametrize("value", VALUES, ids=str)
def test_values_come_back(value):
    found = unpacked(packed(value, "it"))
    assert repr(found) == repr(value) and (found == value or math.isnan(value))


@pytest.mark.promise("durable-no-pickle")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_tensors_come_back_with_their_bits(dtype):
    """Several in one value, of odd sizes, not contiguous, empty and of no dimension."""
    values = [torch.arange(7).to(dtype), torch.arange(12).view(3, 4).t().to(dtype), torch.ones((), dtype=dtype)]
    values += [torch.empty((0, 3), dtype=dtype)]
    found = unpacked(packed({"all": values, "first": torch.zeros(1, dtype=torch.uint8)}, "it"))
    for before, after in zip(values, found["all"], strict=True):
        assert after.dtype == before.dtype and after.shape == before.shape and torch.equal(after, before)


@pytest.mark.promise("durable-no-pickle")
def test_what_is_not_plain_is_named():
    with pytest.raises(ZeroError, match=r"extra\['loader'\]\[1\] is of type object. Only numbers"):
        packed({"loader": [1, object()]}, "extra")
