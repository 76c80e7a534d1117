"""Every kernel x layout x instruction set against the slow twin, bit for bit, over several steps and odd segments."""

from typing import Any

import pytest
import torch

import zero_optim_cpu
from tests.conformance.zero_optim_cpu.reference import ReferenceStep
from tests.unit.zero_optim_cpu.tiles import BF16, FP16, FP32, Segment, Tile, make_tile, same
from zero_optim_cpu import LAYOUTS, CpuStep, _native, available_isas

pytestmark = pytest.mark.promise("kernel-bits")

NUMEL = 3 * 4096 + 517  # several blocks of 256, a ragged end

OPTIMIZERS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "adamw": (torch.optim.AdamW, [{}, {"lr": 0.1, "betas": (0.5, 0.99999), "weight_decay": 0.3, "eps": 1e-3}]),
    "adam": (torch.optim.Adam, [{}, {"weight_decay": 0.1, "maximize": True, "betas": (0.0, 0.0)}]),
    "lion": (zero_optim_cpu.Lion, [{}, {"lr": 0.01, "weight_decay": 0.2, "maximize": True}]),
    "adagrad": (torch.optim.Adagrad, [{}, {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1}]),
    "sgd": (torch.optim.SGD, [{"lr": 0.1}, {"lr": 0.01, "weight_decay": 0.1}]),
    "momentum": (torch.optim.SGD, [{"momentum": 0.9}, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.1}]),
    "nesterov": (torch.optim.SGD, [{"momentum": 0.8, "nesterov": True}, {"momentum": 0.0, "dampening": 0.5}]),
}


def gradients(steps: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Magnitudes from 1e-6 to 1e2, with exact zeros."""
    generator = torch.Generator().manual_seed(7)
    result = []
    for _ in range(steps):
        size = 10 ** (torch.rand(NUMEL, generator=generator) * 8 - 6)
        values = torch.randn(NUMEL, generator=generator) * size
        values[torch.rand(NUMEL, generator=generator) < 0.05] = 0.0
        result.append(values.to(dtype))
    return result


def optimizer_of(kind: str) -> torch.optim.Optimizer:
    cls, groups = OPTIMIZERS[kind]
    return cls([{"params": [torch.nn.Parameter(torch.zeros(1))], **group} for group in groups])


def segments_at(optimizer: torch.optim.Optimizer, step: int) -> list[Segment]:
    first, second = optimizer.param_groups
    return [Segment(0, 700, first, step), Segment(703, 4096, second, step), Segment(4200, NUMEL - 3, first, step + 4)]


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.skipif(not hasattr(_native.Batch, "run_roofline"), reason="built without ZERO_OPTIM_ROOFLINE=ON")
def test_the_roofline_moves_every_stream_and_changes_none(layout: str, isa: str) -> None:
    step = CpuStep(layout, threads=2, isa=isa)
    optimizer = optimizer_of("adamw")
    step.bind(optimizer)
    for dtype in (FP32, BF16, FP16):
        tile = make_tile(step, torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)), dtype, dtype)
        tile.gradient.fill_(0.5)
        step.update(tile, segments_at(optimizer, 1), 1.0)
        before = {name: value.clone() for name, value in tile.states.items()} | {"parameter": tile.parameter.clone()}
        step._batch(tile, segments_at(optimizer, 2)).run_roofline(step._kernels.pool)
        for name, value in before.items():
            assert same(value, tile.states.get(name, tile.parameter)), name


def assert_same(a: Tile, b: Tile) -> None:
    assert same(a.parameter, b.parameter)
    for name in a.states:
        assert same(a.states[name], b.states[name]), name


@pytest.mark.parametrize("isa", available_isas())
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_kernel_has_the_reference_bits(kind: str, layout: str, isa: str) -> None:
    optimizer = optimizer_of(kind)
    step, reference = CpuStep(layout, threads=1, isa=isa), ReferenceStep(layout)
    step.bind(optimizer)
    reference.bind(optimizer)
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    for dtype, gradient_dtype in ((FP32, FP32), (BF16, BF16), (BF16, FP32), (FP16, FP16)):
        fast, slow = (make_tile(step, master, dtype, gradient_dtype) for _ in range(2))
        for number, gradient in enumerate(gradients(3, gradient_dtype), start=1):
            for tile, by in ((fast, step), (slow, reference)):
                tile.gradient.copy_(gradient)
                by.update(tile, segments_at(optimizer, number), 0.37)
            assert_same(fast, slow)
        assert torch.isfinite(fast.parameter).all()
        assert not same(step.read(fast, "master"), master)
