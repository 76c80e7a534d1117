"""What the planner reads from a model is what `shard` gives a store."""

from dataclasses import replace

import torch
from torch import nn

import zero_core
import zero_offload
from zero_core.optim.device_store import DeviceStore
from zero_offload.planning.sizes import ModelSizes


class Mixed(nn.Module):
    """Its own unit has parameters of two dtypes, so it is two; and one of its children is called "root"."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2))
        self.half_scale = nn.Parameter(torch.ones(2, dtype=torch.bfloat16))
        self.root = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))


class Watched(DeviceStore):
    def attach(self, shards, *arguments, **options) -> None:
        self.specs = shards
        super().attach(shards, *arguments, **options)


class Quantised(nn.Module):
    """A linear layer with a table of integers, as quantised weights are kept, and a scale."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.table = nn.Parameter(torch.arange(4 << 20).remainder(8).to(torch.int8), requires_grad=False)
        self.flag = nn.Parameter(torch.tensor(True), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.table[:8] * self.flag


def test_parameters_that_are_not_sharded_are_counted_and_named_wherever_the_others_are_put() -> None:
    """They are 4 MiB that a plan with everything on nvme would not know of."""
    model = Quantised()
    twin = replace(ModelSizes.of(model), not_sharded={})
    everything = {"parameters": "nvme", "gradients": "nvme", "optimizer": "nvme"}
    planned, without = (zero_offload.plan(each, parameter_dtype=torch.float32, **everything) for each in (model, twin))
    expected = {"table": 4 << 20, "flag": 1}
    assert planned.not_sharded == expected and without.not_sharded == {}
    assert planned.total("device") - without.total("device") == sum(expected.values())
    assert ("not sharded", planned.told_of_not_sharded) in planned.facts()
    assert "4.0 MiB (table, flag)" in planned.told_of_not_sharded and without.told_of_not_sharded == ""
    small = {"hardware": zero_offload.Hardware(host_gib=8, nvme_gib=1), "host_bytes": 3 << 20}
    assert zero_offload.fits(twin, **small, **everything) and not zero_offload.fits(model, **small, **everything)

    nvme = zero_offload.MemoryByteStore()
    store = zero_offload.TieredStore("nvme", "nvme", "nvme", nvme)
    trained = [p for p in model.parameters() if p.requires_grad]
    sharded = zero_core.shard(model, torch.optim.SGD(trained, lr=0.1), store=store)
    assert store.describe().not_sharded == expected
    sharded.close()


def test_the_units_that_enclose_the_others_are_those_of_the_model_itself_whatever_their_names() -> None:
    """By name, "root:bfloat16" would be missed, and a child called "root" taken for the model."""
    model, store = Mixed(), Watched()
    planned = [(unit.name, unit.encloses) for unit in ModelSizes.of(model).units]
    zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store).close()
    assert planned == [(spec.name, spec.encloses) for spec in store.specs]
    assert sorted(planned)[-3:] == [("root", False), ("root", True), ("root:bfloat16", True)]
