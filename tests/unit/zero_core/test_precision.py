"""Rounding to bf16 is to nearest, ties away; the sum of squares is a double's."""

import math
import struct

import pytest
import torch

from zero_core.precision import chunk_squares, mean_of_rows, round_to
from zero_core.store import CHUNK_NUMEL


def slow_round(value: float) -> int:
    """bf16 bits of an fp32 value by the definition, in integers."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    sign, magnitude = bits & 0x80000000, bits & 0x7FFFFFFF
    if magnitude > 0x7F800000:
        return -1  # NaN, any
    return (sign | (magnitude + 0x8000 if magnitude < 0x7F800000 else magnitude)) >> 16


FINITE = [0.0, -0.0, 1.0, 1.0 + 2**-8, -1.0 - 2**-8, 1.0 + 3 * 2**-8, 1.0 + 2**-8 - 2**-23, 1e-40, -1e-45, 2.0**-126]
SPECIAL = [math.inf, -math.inf, math.nan, 3.4028234663852886e38, -3.3961775292304957e38]
HALVES = torch.arange(1 << 16) | 0x3F800000
EVERY_LOW_HALF = torch.cat([HALVES, HALVES + 0x10000]).to(torch.int32).view(torch.float32)


@pytest.mark.parametrize("values", [*map(torch.tensor, (FINITE, FINITE + SPECIAL, SPECIAL)), EVERY_LOW_HALF])
def test_rounding_is_ties_away(values):
    out = torch.empty(values.numel(), dtype=torch.bfloat16)
    round_to(values, out)
    bits = [int(b) & 0xFFFF for b in out.view(torch.int16)]
    found = [-1 if math.isnan(v) else b for v, b in zip(out.float().tolist(), bits, strict=True)]
    assert found == [slow_round(v) for v in values.tolist()]


@pytest.mark.parametrize("poison", [math.inf, -math.inf, math.nan])
def test_a_chunk_that_is_not_finite_says_so_and_the_others_are_untouched(poison):
    values = torch.ones(2 * CHUNK_NUMEL + 4)
    values[CHUNK_NUMEL + 1] = poison
    first, second, third = chunk_squares(values).tolist()
    assert (first, third) == (CHUNK_NUMEL, 4.0) and not math.isfinite(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_mean_of_rows_rounds_once(dtype):
    numel = (1 << 18) + 77  # more than one piece of scratch
    rows = torch.randn(3, numel, generator=torch.Generator().manual_seed(1)).to(dtype)
    out = torch.empty(numel, dtype=dtype)
    mean_of_rows(rows, out)
    expected = ((rows[0].float() + rows[1].float()) + rows[2].float()) / 3
    assert torch.equal(out, expected.to(dtype))
