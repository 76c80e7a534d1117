"""Memory of a device that is nobody's state, by hand. Fails if a unit or a gradient on its way is forgotten."""

import re

import pytest
import torch

from tests.unit.zero_offload.sizes import unit
from zero_offload import Hardware, ModelSizes, plan
from zero_offload.planning.accounting import Shape
from zero_offload.planning.budgets import PlanError, unsharded_bytes
from zero_offload.planning.sizes import ParameterSizes, UnitSizes

MI = 1 << 20
GPU = Hardware(device="cuda", device_gib=80, host_gib=512, nvme_gib=1000)
HOST = dict.fromkeys(("parameters", "gradients", "optimizer"), "host")


def block(i, numel=4 * MI, largest=3 * MI):
    return UnitSizes(f"layers.{i}", (ParameterSizes("a", largest), ParameterSizes("b", numel - largest)))


ROOT = UnitSizes(
    "root", (ParameterSizes("embedding", 2 * MI), ParameterSizes("head", 2 * MI)), is_block=False, encloses=True
)
NORM = UnitSizes("norm", (ParameterSizes("weight", 1000),), is_block=False)


def unsharded(sizes, shape):
    whole = [unit.nbytes(shape.parameter_dtype) for unit in sizes.units]
    return unsharded_bytes(whole, [unit.encloses for unit in sizes.units], shape)


@pytest.mark.parametrize(
    ("prefetch_bytes", "units"), [(0, 2), (8 * MI - 1, 2), (8 * MI, 2), (16 * MI, 3), (24 * MI, 4), (1 << 40, 6)]
)
def test_the_unit_in_use_and_those_that_are_fetched_ahead(prefetch_bytes, units):
    sizes = ModelSizes(tuple(block(i) for i in range(6)))
    assert unsharded(sizes, Shape(prefetch_bytes=prefetch_bytes)) == units * 8 * MI


def test_what_encloses_the_others_is_open_beside_them():
    sizes = ModelSizes((ROOT, *(block(i) for i in range(4)), NORM))
    assert unsharded(sizes, Shape()) == 2 * 8 * MI + 8 * MI + 2000


def test_the_largest_two_in_a_row_count_not_the_largest_twice():
    sizes = ModelSizes((block(0), block(1, 16 * MI), block(2), block(3)))
    assert unsharded(sizes, Shape()) == (16 + 4) * 2 * MI


def test_what_may_stay_is_added_up_to_the_whole_model():
    sizes = ModelSizes(tuple(block(i) for i in range(6)))
    assert unsharded(sizes, Shape(resident_bytes=8 * MI)) == 3 * 8 * MI
    assert unsharded(sizes, Shape(resident_bytes=1 << 40)) == 6 * 8 * MI


def test_a_discrete_device_has_two_units_two_landing_buffers_and_the_gradient_just_made():
    sizes = ModelSizes(tuple(block(i) for i in range(6)))
    found = plan(sizes, GPU, **HOST, shard_count=1, prefetch_bytes=0)
    assert found.bytes_of("device", "buffers") == 2 * 8 * MI + 2 * 8 * MI + 6 * MI
    wide = plan(sizes, GPU, **HOST, shard_count=1, prefetch_bytes=0, reduce_dtype=torch.float32)
    assert wide.bytes_of("device", "buffers") == 2 * 8 * MI + 2 * 16 * MI + 6 * MI


def test_what_gradients_pass_through_on_the_host_is_counted_once():
    sizes = ModelSizes(tuple(block(i) for i in range(6)))
    discrete, here = (plan(sizes, machine, **HOST, shard_count=1) for machine in (GPU, Hardware(host_gib=512)))
    assert discrete.bytes_of("host", "buffers") - here.bytes_of("host", "buffers") == 4 * 8 * MI


def test_frozen_units_have_no_gradient():
    frozen = ModelSizes(tuple(unit(f"u{i}", 4 * MI, trained=False) for i in range(3)))
    assert plan(frozen, GPU, **HOST, shard_count=1, prefetch_bytes=0).bytes_of("device", "buffers") == 2 * 8 * MI


def test_everything_on_the_device_is_not_held_twice():
    sizes = ModelSizes(tuple(block(i) for i in range(6)))
    found = plan(sizes, GPU, **dict.fromkeys(HOST, "device"), shard_count=1)
    assert found.bytes_of("device", "buffers") == 8 * MI + 16 * MI  # a unit's gradient, and that widened
    assert found.bytes_of("host", "buffers") == 0


@pytest.mark.parametrize("reserved", [None, 1.5, {"context": 0.5, "fragments": 1.0}])
def test_a_device_that_its_reserve_fills_is_refused_with_the_size_that_would_do(reserved):
    """Also where more memory reserves more."""
    sizes = ModelSizes(tuple(block(i) for i in range(4)))

    def planned(gib):
        return plan(sizes, Hardware(device="cuda", device_gib=gib, device_reserved_gib=reserved, host_gib=8), **HOST)

    with pytest.raises(PlanError, match=r"device_gib=1 leaves nothing beside hardware.device_reserved_gib=") as refused:
        planned(1)
    least = float(re.search(r"([\d.]+) would do", str(refused.value))[1])
    assert planned(least).total("device") <= planned(least).budgets.of("device")
    with pytest.raises(PlanError):
        planned(least - 0.02)
