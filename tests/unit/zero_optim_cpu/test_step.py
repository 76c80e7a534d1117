"""CpuStep as a filler of the UpdateStep protocol: fields, segments, reading and writing, reductions."""

from __future__ import annotations

import pytest
import torch

from tests.unit.zero_optim_cpu.tiles import BF16, FP16, FP32, Segment, adamw, make_tile, same
from zero_optim_cpu import LAYOUTS, CpuStep, available_isas


def test_fields_and_bytes_of_each_layout() -> None:
    swapped = {}
    for name in LAYOUTS:
        step = CpuStep(name, threads=1)
        step.bind(adamw())
        fields = step.layout(1 << 20, BF16)
        swapped[name] = sum(f.nbytes for f in fields) / (1 << 20)
        assert [f.name for f in step.layout(1 << 20, FP32)][0] == "exp_avg"  # an fp32 parameter is the master
    assert swapped["fp32"] == 12
    assert swapped["split"] == 10
    assert swapped["split_bf16m"] == 8
    assert 4 < swapped["split_8bit"] < 4.04  # two scales of 4 bytes per 256
    assert step.state_names() == ("exp_avg", "exp_avg_sq")


def test_an_fp16_parameter_has_an_fp32_master_in_every_layout() -> None:
    for name in LAYOUTS:
        step = CpuStep(name, threads=1)
        step.bind(adamw())
        assert step.layout(8, FP16)[0].name == "master"


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_one_step_moves_the_parameter_by_lr_against_the_gradient(dtype: torch.dtype) -> None:
    optimizer = adamw(lr=0.5, weight_decay=0.0)
    step = CpuStep(threads=2)
    step.bind(optimizer)
    tile = make_tile(step, torch.ones(1000), dtype)
    tile.gradient.fill_(3.0)
    step.update(tile, [Segment(0, 1000, optimizer.param_groups[0])], 1.0)
    torch.testing.assert_close(tile.parameter.float(), torch.full((1000,), 0.5), rtol=0, atol=1e-6)
    torch.testing.assert_close(step.read(tile, "exp_avg"), torch.full((1000,), 0.3))
    torch.testing.assert_close(step.read(tile, "exp_avg_sq"), torch.full((1000,), 9e-3))


def test_scale_multiplies_the_gradient() -> None:
    optimizer = adamw()
    step = CpuStep(threads=1)
    step.bind(optimizer)
    tiles = [make_tile(step, torch.ones(100), BF16) for _ in range(2)]
    tiles[0].gradient.fill_(0.5)
    tiles[1].gradient.fill_(64.0)
    for tile, scale in zip(tiles, (1.0, 1 / 128), strict=True):
        step.update(tile, [Segment(0, 100, optimizer.param_groups[0])], scale)
    assert same(step.read(tiles[0], "exp_avg_sq"), step.read(tiles[1], "exp_avg_sq"))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_elements_outside_segments_are_not_touched(layout: str, dtype: torch.dtype) -> None:
    optimizer = adamw()
    step = CpuStep(layout, threads=2)
    step.bind(optimizer)
    options = dict(optimizer.param_groups[0])
    generator = torch.Generator().manual_seed(0)
    tile = make_tile(step, torch.randn(5000, generator=generator), dtype)
    tile.gradient.copy_(torch.randn(5000, generator=generator))
    before = {name: step.read(tile, name) for name in ("master", "exp_avg", "exp_avg_sq")}
    segments = [
        Segment(7, 300, options),
        Segment(301, 1000, options | {"lr": 0.1}, step=3),
        Segment(4000, 4999, options),
    ]
    step.update(tile, segments, 1.0)
    inside = torch.zeros(5000, dtype=torch.bool)
    for segment in segments:
        inside[segment.start : segment.stop] = True
    for name, old in before.items():
        new = step.read(tile, name)
        # A block of 8-bit codes has one scale: next to an updated element the second moment's zero is 2^-32 of it.
        zero = 2**-31 * new.max() if (layout, name) == ("split_8bit", "exp_avg_sq") else 0.0
        assert ((new - old)[~inside].abs() <= zero).all(), name
        assert torch.equal(new[1024:3840], old[1024:3840]), name
    assert (step.read(tile, "exp_avg")[inside] != 0).all()


def test_segments_have_their_own_options_and_steps() -> None:
    optimizer = adamw()
    options = optimizer.param_groups[0]
    step = CpuStep(threads=1)
    step.bind(optimizer)
    generator = torch.Generator().manual_seed(0)
    master, gradient = torch.randn(600, generator=generator), torch.randn(600, generator=generator)
    other = options | {"lr": 0.3, "weight_decay": 0.0, "betas": (0.5, 0.9), "eps": 1e-3}
    together = make_tile(step, master, BF16)
    together.gradient.copy_(gradient)
    step.update(together, [Segment(250, 600, other, step=9), Segment(0, 250, options, step=2)], 0.5)
    for start, stop, group, count in ((0, 250, options, 2), (250, 600, other, 9)):
        alone = make_tile(step, master[start:stop].clone(), BF16)
        alone.gradient.copy_(gradient[start:stop])
        step.update(alone, [Segment(0, stop - start, group, step=count)], 0.5)
        assert same(step.read(alone, "master"), step.read(together, "master")[start:stop])


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
