"""CpuStep as a filler of the UpdateStep protocol: fields, segments, reading and writing, reductions."""

import pytest
import torch

from tests.unit.zero_optim_cpu.tiles import BF16, FP16, FP32, Segment, adamw, make_tile
from zero_optim_cpu import LAYOUTS, CpuStep, available_isas


def test_fields_and_bytes_of_each_layout() -> None:
    swapped = {}
    for name in LAYOUTS:
        step = CpuStep(name, threads=1)
        step.bind(adamw())
        fields = step.layout(1 << 20, BF16)
        swapped[name] = sum(f.nbytes for f in fields) / (1 << 20)
        assert [f.name for f in step.layout(1 << 20, FP32)][0] == "exp_avg"  # an fp32 parameter is the master
        assert step.layout(8, FP16)[0].name == "master"
    assert swapped["fp32"] == 12
    assert swapped["split"] == 10
    assert swapped["split_bf16m"] == 8
    assert 4 < swapped["split_8bit"] < 4.04  # two scales of 4 bytes per 256
    assert step.state_names() == ("exp_avg", "exp_avg_sq")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_written_values_are_read_back(layout: str) -> None:
    step = CpuStep(layout, threads=2)
    step.bind(adamw())
    values = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    for dtype in (FP32, BF16, FP16):
        tile = make_tile(step, torch.zeros(3000), dtype)
        step.write(tile, "master", values)
        torch.testing.assert_close(step.read(tile, "master"), values, rtol=0, atol=0)
        step.write(tile, "exp_avg", values)
        step.write(tile, "exp_avg_sq", values.square())
        coarse = {"split_bf16m": 2**-8, "split_8bit": 0.07}.get(layout, 0.0)
        torch.testing.assert_close(step.read(tile, "exp_avg"), values, rtol=coarse, atol=4 * 2**-15 * (coarse > 0.01))
        coarse = coarse if layout == "split_8bit" else 0.0
        torch.testing.assert_close(
            step.read(tile, "exp_avg_sq"), values.square(), rtol=coarse, atol=1e-8 * (coarse > 0)
        )


@pytest.mark.promise("default-dtype")
def test_first_sums_do_not_take_the_default_dtype() -> None:
    step = CpuStep(threads=1)
    step.bind(torch.optim.Adagrad([torch.zeros(1)], initial_accumulator_value=0.1))
    torch.set_default_dtype(torch.float64)
    try:
        tile = make_tile(step, torch.zeros(300, dtype=FP32), FP32)
    finally:
        torch.set_default_dtype(FP32)
    assert torch.equal(step.read(tile, "sum"), torch.full((300,), 0.1))


@pytest.mark.parametrize("isa", available_isas())
def test_what_is_not_finite_leaves_the_rest_of_its_8_bit_block_alone(isa: str) -> None:
    values = torch.randn(600, generator=torch.Generator().manual_seed(3))
    read = {}
    for wild in (False, True):
        step = CpuStep("split_8bit", threads=1, isa=isa)
        step.bind(adamw())
        tile = make_tile(step, values, BF16)
        tile.gradient.copy_(values)
        if wild:
            tile.gradient[5], tile.gradient[300], tile.gradient[590] = float("nan"), float("inf"), float("-inf")
        step.update(tile, [Segment(0, 600, dict(adamw().param_groups[0]))], 1.0)
        read[wild] = {name: step.read(tile, name) for name in ("exp_avg", "exp_avg_sq")}
    for name, usual in read[False].items():
        kept = torch.ones(600, dtype=torch.bool)
        kept[[5, 300, 590]] = False
        assert torch.equal(read[True][name][kept], usual[kept]), name
        assert read[True][name].isfinite().all(), name
    assert read[True]["exp_avg"][300] > 0 > read[True]["exp_avg"][590]
    assert read[True]["exp_avg"][300] >= read[True]["exp_avg"][256:512].max()
