"""The update beside a device: on the cores that are chosen for it, over memory that the device copies from.

Fails if a core is chosen that the kernel does not grant, or if registered memory or pinned threads change a bit.
"""

import os

import pytest
import torch

from tests.unit.zero_optim_cpu.tiles import BF16, Segment, Tile, adamw, make_tile, same
from zero_optim_cpu import CpuStep, cores

NUMEL = 1 << 20


def updated(step: CpuStep, pinned: bool) -> Tile:
    optimizer = adamw(lr=0.01)
    step.bind(optimizer)
    tile = make_tile(step, torch.randn(NUMEL, generator=torch.Generator().manual_seed(0)), BF16)
    tile.gradient.copy_(torch.randn(NUMEL, generator=torch.Generator().manual_seed(1)))
    if pinned:
        tile.parameter, tile.gradient = tile.parameter.pin_memory(), tile.gradient.pin_memory()
        tile.states = {name: state.pin_memory() for name, state in tile.states.items()}
    step.update(tile, [Segment(0, NUMEL, optimizer.param_groups[0])], 0.5)
    return tile


def test_the_cores_of_this_device_are_ours_and_leave_one_to_launch(device):
    """Rehearsed on the CPU with a seat whose node is not known."""
    seat = cores.seat_of(device) if device.type != "cpu" else cores.Seat(None, tuple(sorted(os.sched_getaffinity(0))))
    found = cores.beside_gpus([seat], 0)
    assert set(found.pool) | set(found.rest) <= set(seat.allowed) == os.sched_getaffinity(0)
    assert cores.granted(found.pool) == set(found.pool)
    assert len(seat.allowed) == 1 or not set(found.pool) & set(found.rest)
    assert CpuStep(cores=found.pool).threads == len(found.pool)


@pytest.mark.parametrize("layout", ["split", "fp32"])
def test_the_same_bits_while_the_device_computes(device, layout):
    expected = updated(CpuStep(layout, threads=1), pinned=False)
    pool = sorted(os.sched_getaffinity(0))
    if device.type != "cpu":
        pool = cores.beside_gpus([cores.seat_of(device)], 0).pool
    a = torch.randn(512, 512, device=device)
    for _ in range(50):
        a = (a @ a).tanh()
    found = updated(CpuStep(layout, cores=pool), pinned=device.type != "cpu")
    assert bool(a.isfinite().all())
    assert same(found.parameter, expected.parameter)
    assert all(same(found.states[name], expected.states[name]) for name in expected.states)
