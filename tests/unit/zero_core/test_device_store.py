"""What `DeviceStore` reads and writes off the CPU is what `step_traffic` says, which planners count with."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zero_core
from zero_core.errors import StoreError
from zero_core.memory import ElementBytes, step_traffic
from zero_core.optim.device_store import DeviceStore
from zero_core.store import GroupStep, Segment, ShardSpec, StoreContext

NUMEL = (1 << 23) + 4096  # more than one piece of scratch


class Traffic(TorchDispatchMode):
    """Counts the bytes that every operator reads and writes. Views and memory without values are free."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given, found = {**dict(enumerate(args)), **(kwargs or {})}, func(*args, **(kwargs or {}))
        schema = func._schema
        overwrites = func in (torch.ops.aten.copy_.default, torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default)
        for i, argument in enumerate(schema.arguments):
            alias = argument.alias_info
            written, only = alias is not None and alias.is_write, argument.is_out or (overwrites and i == 0)
            size = nbytes(given.get(argument.name if argument.kwarg_only else i))
            if alias is None or written:
                self.nbytes += size * (written + (not only))
        fresh = all(each.alias_info is None for each in schema.returns)
        if fresh and "empty" not in schema.name:
            self.nbytes += nbytes(found)
        return found


def nbytes(values: Any) -> int:
    return sum(value.nbytes for value in tree_leaves(values) if isinstance(value, Tensor))


@pytest.mark.promise("device-passes")
@pytest.mark.parametrize(
    ("parameters", "reduced", "accumulate", "expected"),
    [
        (torch.bfloat16, torch.bfloat16, 1, 2 + 6 + 12 + 22),
        (torch.bfloat16, torch.bfloat16, 2, 4 + 8 + 12 + 22),
        (torch.bfloat16, torch.float32, 1, 4 + 8 + 12 + 22),
        (torch.float16, torch.float16, 1, 2 + 6 + 12 + 6),
        (torch.float32, torch.float32, 1, 4 + 8 + 12),
        (torch.float32, torch.bfloat16, 1, 2 + 6 + 12),
    ],
)
def test_each_byte_is_read_and_written_as_often_as_is_counted(parameters, reduced, accumulate, expected):
    """On the device "meta" it runs what it would run on any accelerator. SGD reads and writes each value once."""
    meta = torch.device("meta")
    spec = ShardSpec("unit", NUMEL, parameters, (Segment(0, NUMEL, 0, "weight"),))
    optimizer = torch.optim.SGD([nn.Parameter(torch.empty(1, device=meta))], lr=0.1, foreach=False)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    store = DeviceStore()
    masters = torch.empty(NUMEL, device=meta)
    store.attach([spec], optimizer, lambda i: masters, context=StoreContext(meta, reduce_dtype=reduced))
    for _ in range(accumulate):
        store.accept_gradient(0, torch.empty(NUMEL, dtype=reduced, device=meta))
    with Traffic() as counted:
        store.gradient_norm_squared()
        store.update([GroupStep(options)], 0.5, [0], [[1]])
    element = ElementBytes(parameters, reduced)
    assert round(counted.nbytes / NUMEL, 2) == expected
    assert step_traffic(element, element.gradient(accumulate)) == expected


def test_an_optimizers_states_are_read_and_written_once():
    """Adam's two: 28 bytes for the update."""
    adam = ElementBytes(torch.bfloat16, torch.bfloat16, states=2)
    assert step_traffic(adam, 2) == 2 + 6 + 28 + 22


def test_a_closed_store_does_not_wake():
    store = DeviceStore()
    store.close()
    with pytest.raises(StoreError, match="the DeviceStore is closed: call the optimizer's close.* after the last"):
        store.wake()


def test_a_store_is_of_one_model():
    store = DeviceStore()
    for told in (nullcontext(), pytest.raises(StoreError, match="make a new DeviceStore for each zero_core.shard")):
        model = nn.Linear(2, 2)
        with told:
            zero_core.shard(model, torch.optim.SGD(model.parameters()), store=store)
