"""The update beside a device, on the cores that are chosen for it. Fails if the kernel does not grant one of them."""

import os

from zero_optim_cpu import CpuStep, cores


def test_the_cores_of_this_device_are_ours_and_leave_one_to_launch(device):
    """Rehearsed on the CPU with a seat whose node is not known."""
    seat = cores.seat_of(device) if device.type != "cpu" else cores.Seat(None, tuple(sorted(os.sched_getaffinity(0))))
    found = cores.beside_gpus([seat], 0)
    assert set(found.pool) | set(found.rest) <= set(seat.allowed) == os.sched_getaffinity(0)
    assert cores.granted(found.pool) == set(found.pool)
    assert len(seat.allowed) == 1 or not set(found.pool) & set(found.rest)
    assert CpuStep(cores=found.pool).threads == len(found.pool)
