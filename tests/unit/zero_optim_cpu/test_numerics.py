"""Distances to exact arithmetic: of one step, of a thousand, of the split."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_optim_cpu
from tests.conformance.zero_optim_cpu.reference import split, to_bf16
from tests.unit.zero_optim_cpu.tiles import BF16, FP32, Segment, adamw, make_tile, same
from zero_optim_cpu import CpuStep

pytestmark = pytest.mark.promise("kernel-exact")

NUMEL = 200_000


def wide(seed: int, low: float, high: float) -> Tensor:
    """Normals times powers of ten between `low` and `high`."""
    generator = torch.Generator().manual_seed(seed)
    size = 10 ** (torch.rand(NUMEL, generator=generator) * (high - low) + low)
    return torch.randn(NUMEL, generator=generator) * size


def ulp(x: Tensor) -> Tensor:
    """Distance of neighbours of fp32 at |x|, float64."""
    exponent = torch.frexp(x.double().abs().clamp_min(2.0**-126))[1]
    return torch.exp2((exponent - 24).double())


def adam64(o: dict[str, Any], p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    """New parameter, and the update with the terms of the moment taken at their size: what its rounding scales with."""
    beta1, beta2 = o["betas"]
    root = ((beta2 * v + (1 - beta2) * g * g) / (1 - beta2**step)).sqrt() + o["eps"]
    rate = o["lr"] / (1 - beta1**step)
    update = rate * (beta1 * m + (1 - beta1) * g) / root
    size = rate * (m.abs() + (1 - beta1) * (g.abs() + m.abs())) / root
    decay = o["lr"] * o["weight_decay"] * p
    return p - update - decay, size + decay.abs()


def lion64(o: dict[str, Any], p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    beta1, _ = o["betas"]
    update = o["lr"] * (beta1 * m + (1 - beta1) * g).sign() + o["lr"] * o["weight_decay"] * p
    return p - update, update.abs()


def adagrad64(o: dict[str, Any], p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    rate = o["lr"] / (1 + (step - 1) * o["lr_decay"])
    update = rate * g / ((v + g * g).sqrt() + o["eps"])
    return p - update, update.abs()


def momentum64(o: dict[str, Any], p: Tensor, g: Tensor, m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
    update = o["lr"] * (o["momentum"] * m + (1 - o["dampening"]) * g)
    return p - update, o["lr"] * ((o["momentum"] * m).abs() + (1 - o["dampening"]) * g.abs())


CASES: list[tuple[type, dict[str, Any], Callable[..., tuple[Tensor, Tensor]], dict[str, bool]]] = [
    (torch.optim.AdamW, {"weight_decay": 0.1}, adam64, {"exp_avg": False, "exp_avg_sq": True}),
    (torch.optim.AdamW, {"lr": 0.3, "betas": (0.99999, 0.99999)}, adam64, {"exp_avg": False, "exp_avg_sq": True}),
    (torch.optim.Adam, {"betas": (0.2, 0.5), "eps": 1e-3}, adam64, {"exp_avg": False, "exp_avg_sq": True}),
    (zero_optim_cpu.Lion, {"weight_decay": 0.1}, lion64, {"exp_avg": False}),
    (torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.01}, adagrad64, {"sum": True}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}, momentum64, {"momentum_buffer": False}),
]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_one_step_is_within_an_ulp_of_the_parameter_and_eight_of_the_update(case: int) -> None:
    cls, options, exact, states = CASES[case]
    optimizer = cls([torch.nn.Parameter(torch.zeros(1))], **options)
    group = optimizer.param_groups[0]
    step = CpuStep("split", threads=1)
    step.bind(optimizer)
    for number in (2, 1000):
        p, g, m, v = wide(1, -6, 2), wide(2, -6, 0), wide(3, -6, 0), wide(4, -6, 0).square()
        tile = make_tile(step, p, BF16)
        for name, squared in states.items():
            step.write(tile, name, v if squared else m)
        tile.gradient.copy_(g)
        step.update(tile, [Segment(0, NUMEL, group, number)], 1.0)
        got = step.read(tile, "master")
        wanted, update = exact(group, p.double(), g.double(), m.double(), v.double(), number)
        allowed = torch.maximum(ulp(p), ulp(wanted)) + 8 * 2.0**-24 * update
        excess = ((got.double() - wanted).abs() / allowed).max().item()
        assert excess <= 1.0, f"{excess} of what is allowed"
        assert (got != p).float().mean() > 0.1


def test_a_thousand_steps_are_as_exact_as_torch_fused() -> None:
    start = torch.randn(2000, generator=torch.Generator().manual_seed(0))
    ours, fused, exact = (torch.nn.Parameter(start.to(d, copy=True)) for d in (FP32, FP32, torch.float64))
    optimizers = [
        zero_optim_cpu.AdamW([ours], lr=1e-2),
        torch.optim.AdamW([fused], lr=1e-2, fused=True),
        torch.optim.AdamW([exact], lr=1e-2),
    ]
    generator = torch.Generator().manual_seed(1)
    for _ in range(1000):
        gradient = torch.randn(2000, generator=generator) + 0.3
        for p, optimizer in zip((ours, fused, exact), optimizers, strict=True):
            p.grad = gradient.to(p.dtype)
            optimizer.step()
    error, reference = ((p.double() - exact).detach().square().mean().sqrt().item() for p in (ours, fused))
    assert error <= 1.5 * reference
    assert 0 < error < 1e-4


def patterns() -> Tensor:
    """fp32 of random bits, every exact tie of a few exponents, denormals, infinities, NaN, the largest."""
    generator = torch.Generator().manual_seed(0)
    random = torch.randint(-(2**31), 2**31, (500_000,), generator=generator)
    ties = (torch.arange(-(2**15), 2**15) << 16) + 0x8000
    special = torch.tensor([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF])
    pattern = torch.cat([random, ties, ties - 1, ties + 1, special, special - 2**31])
    return pattern.to(torch.int32).view(torch.float32)


def test_the_split_rebuilds_every_pattern_and_rounds_ties_away() -> None:
    values = patterns()
    step = CpuStep("split", threads=2)
    step.bind(adamw())
    tile = make_tile(step, torch.zeros(values.numel()), BF16)
    step.write(tile, "master", values)
    back = step.read(tile, "master")
    assert torch.equal(back.view(torch.int32), values.view(torch.int32))
    high, low = split(values)
    assert torch.equal(tile.parameter.view(torch.int16), high.view(torch.int16))
    assert torch.equal(tile.states["remainder"], low)
    finite = ~values.isnan()
    assert same(tile.parameter[finite], to_bf16(values)[finite])
    quiet = torch.tensor([float("nan"), -float("nan")])
    assert split(quiet)[0].isnan().all()


def test_nan_made_by_a_step_shows_in_the_parameter() -> None:
    optimizer = adamw()
    for layout in zero_optim_cpu.LAYOUTS:
        for dtype in (FP32, BF16, torch.float16):
            step = CpuStep(layout, threads=1)
            step.bind(optimizer)
            tile = make_tile(step, torch.ones(1000), dtype)
            tile.gradient[500] = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)[0]
            step.update(tile, [Segment(0, 1000, optimizer.param_groups[0])], 1.0)
            assert tile.parameter[500].isnan()
            assert tile.parameter.isnan().sum() == 1
