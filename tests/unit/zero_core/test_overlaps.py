"""Which tensors have memory in common."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from zero_core.model.aliases import overlaps_of

pytestmark = pytest.mark.promise("shared-memory")


def _slices(count: int, *, of_meta: bool = False) -> nn.ParameterList:
    memory = torch.zeros(count, 3, device="meta" if of_meta else "cpu")
    return nn.ParameterList([nn.Parameter(row) for row in memory])


def test_slices_of_one_memory_share_nothing() -> None:
    for of_meta in (False, True):
        model = _slices(300, of_meta=of_meta)
        followers, _, extents = overlaps_of(model, set(map(id, model.parameters())))
        assert not followers and len(extents) == 300


def test_followers_are_found_in_containers_and_one_object_below() -> None:
    """The tensors are found once each, and what goes round in a circle ends."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Module())
    weight: Any = model[0].weight
    made = [weight.detach() for _ in range(5)]
    circle: list[Any] = [made[1]]
    circle.append(circle)
    model.a, model.b = {"x": (made[0], circle)}, made[0]
    model[1].c = SimpleNamespace(d=[made[2]], below=SimpleNamespace(e=weight.data))
    weight.of_it = made[3]
    model.d, model.same, model.back, model.apart = [{made[4]}], [weight], [model], weight.data.clone()
    found = overlaps_of(model, {id(weight)}).followers
    assert {id(each.tensor) for each in found} == set(map(id, made)) and len(found) == len(made)
    assert all(each.lead is weight for each in found)


def test_a_follower_of_a_transposed_parameter_is_all_of_it() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model.w = model.weight.detach()
    (follower,) = overlaps_of(model, set()).followers
    assert follower.tensor is model.w and follower.lead is model.weight
