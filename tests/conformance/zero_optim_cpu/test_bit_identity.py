"""The same bits for every instruction set, thread count, alignment and cut into tiles: one matrix."""

import functools
import itertools
import math
import struct

import pytest
import torch

import zero_optim_cpu
from tests.unit.zero_optim_cpu.tiles import BF16, FP16, FP32, Segment, Tile, adamw, make_tile, same, shifted
from zero_optim_cpu import LAYOUTS, CpuStep, available_isas

pytestmark = pytest.mark.promise("kernel-bits")

NUMEL = 2 * (32 << 10) + 1234  # two bundles of a thread and a piece of a third
MATRIX = list(itertools.product(available_isas(), (1, 3), (0, 1, 7)))


@functools.cache
def wild(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Normals over many magnitudes, with zeros, denormals, infinities and NaN among them."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * 10 ** (torch.rand(numel, generator=generator) * 12 - 9)
    values[::1009] = 1e-41
    values[5::2003] = float("inf")
    values[6::2003] = float("-inf")
    values[7::2003] = float("nan")
    values[8::101] = 0.0
    return values.to(dtype)


@functools.cache
def masters() -> torch.Tensor:
    master = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    master[3::997] = 1e-40
    return master


def run(layout: str, dtype: torch.dtype, optimizer: torch.optim.Optimizer, isa: str, threads: int, shift: int) -> Tile:
    step = CpuStep(layout, threads=threads, isa=isa)
    step.bind(optimizer)
    tile = make_tile(step, masters(), dtype, dtype, shift)
    options = dict(optimizer.param_groups[0])
    for number in (1, 2):
        tile.gradient.copy_(wild(NUMEL, dtype, number))
        segments = [Segment(0, 40_001, options, number), Segment(40_010, NUMEL, options | {"lr": 0.02}, number)]
        step.update(tile, segments, 0.7)
    return tile


RULES = {
    "AdamW": adamw(lr=0.01),
    "Adagrad": torch.optim.Adagrad([torch.nn.Parameter(torch.zeros(1))]),
    "Lion": zero_optim_cpu.Lion([torch.nn.Parameter(torch.zeros(1))]),
    "SGD": torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], momentum=0.9),
}
OTHERS = [("split", BF16, rule) for rule in RULES if rule != "AdamW"]


@pytest.mark.parametrize(
    ("layout", "dtype", "rule"), [*itertools.product(LAYOUTS, (FP32, BF16, FP16), ("AdamW",)), *OTHERS]
)
def test_update_matrix(layout: str, dtype: torch.dtype, rule: str) -> None:
    optimizer = RULES[rule]
    expected = run(layout, dtype, optimizer, "scalar", 1, 0)
    assert expected.parameter.isnan().any() and not expected.parameter.isnan().all()
    for isa, threads, shift in MATRIX:
        tile = run(layout, dtype, optimizer, isa, threads, shift)
        assert same(tile.parameter, expected.parameter), (isa, threads, shift)
        for name, values in expected.states.items():
            assert same(tile.states[name], values), (name, isa, threads, shift)


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16])
def test_reductions(dtype: torch.dtype) -> None:
    numel = (2 << 20) + 12345
    values = torch.randn(numel, generator=torch.Generator().manual_seed(3)).to(dtype)
    start = torch.randn(numel, generator=torch.Generator().manual_seed(4))
    norms, sums = set(), []
    for isa, threads, shift in MATRIX:
        step = CpuStep(isa=isa, threads=threads)
        moved = shifted(numel, dtype, shift).copy_(values)
        norms.add(struct.pack("d", sum(step.chunk_norms_squared(moved))))
        into = shifted(numel, FP32, shift).copy_(start)
        step.accumulate(into, moved)
        sums.append(into)
        moved[17::100_003] = float("nan")
        moved[18::100_003] = float("inf")
        parameter = torch.nn.Parameter(torch.zeros(numel, dtype=dtype))
        parameter.grad = moved
        optimizer = zero_optim_cpu.AdamW([parameter], isa=isa, threads=threads)
        assert optimizer.count_nonfinite() == 2 * len(range(17, numel, 100_003))
    assert len(norms) == 1
    assert math.isclose(struct.unpack("d", norms.pop())[0], values.double().square().sum().item(), rel_tol=1e-12)
    assert all(same(total, start + values.float()) for total in sums)


def test_flush_to_zero_of_the_caller_is_not_inherited() -> None:
    optimizer = adamw(lr=0.01)
    expected = run("split", FP32, optimizer, "scalar", 1, 0)
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        tiles = [run("split", FP32, optimizer, isa, threads, 0) for isa in available_isas() for threads in (1, 3)]
    finally:
        torch.set_flush_denormal(False)
    assert all(same(tile.parameter, expected.parameter) for tile in tiles)
