"""What the planner reads from a model is what `shard` gives a store."""

import torch
from torch import nn

import zero_core
from zero_core.device_store import DeviceStore
from zero_offload.sizes import ModelSizes


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


def test_the_units_that_enclose_the_others_are_those_of_the_model_itself_whatever_their_names() -> None:
    """By name, "root:bfloat16" would be missed, and a child called "root" taken for the model."""
    model, store = Mixed(), Watched()
    planned = [(unit.name, unit.encloses) for unit in ModelSizes.of(model).units]
    zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store).close()
    assert planned == [(spec.name, spec.encloses) for spec in store.specs]
    assert sorted(planned)[-3:] == [("root", False), ("root", True), ("root:bfloat16", True)]
