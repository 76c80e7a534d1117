"""Which tensors have memory in common: by arithmetic alone, and quickly where they have none."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from zero_core.building import overlaps
from zero_core.building.overlaps import overlaps_of

strided = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 7)), max_size=3)
views = st.tuples(strided, st.integers(0, 12), st.sampled_from([torch.int8, torch.int16, torch.int32]))


def _view(memory: Tensor, spec: Any) -> Tensor:
    steps, offset, dtype = spec
    return memory.view(dtype).as_strided([n for n, _ in steps], [step for _, step in steps], offset)


def _bytes(tensor: Tensor) -> set[int]:
    places = torch.arange(256 * 4 // tensor.element_size()).as_strided(tensor.shape, tensor.stride(), 0)
    size = tensor.element_size()
    return {tensor.data_ptr() + int(place) * size + byte for place in places.reshape(-1) for byte in range(size)}


@given(views, views)
def test_two_tensors_meet_where_they_have_a_byte_in_common(one: Any, other: Any) -> None:
    memory = torch.zeros(256, dtype=torch.int32)
    pair = [_view(memory, spec) for spec in (one, other)]
    a, b = (overlaps._extent("", tensor, "attribute") for tensor in pair)
    assert a is not None and b is not None
    common = bool(_bytes(pair[0]) & _bytes(pair[1]))
    assert overlaps._meet(a, b) == overlaps._meet(b, a) == common
    assert len(overlaps._meetings([a, b])) == common


def _slices(count: int, *, of_meta: bool = False) -> nn.ParameterList:
    memory = torch.zeros(count, 3, device="meta" if of_meta else "cpu")
    return nn.ParameterList([nn.Parameter(row) for row in memory])


def test_slices_of_one_memory_are_compared_with_no_other(monkeypatch: Any) -> None:
    """Fails if the time grows with the square of the number of parameters."""
    monkeypatch.setattr(overlaps, "_meet", None)
    for of_meta in (False, True):
        model = _slices(300, of_meta=of_meta)
        followers, _, extents = overlaps_of(model, set(map(id, model.parameters())))
        assert not followers and len(extents) == 300


def test_followers_are_found_in_containers_and_one_object_below() -> None:
    """The tensors are found once each, and what goes round in a circle ends."""
    model = nn.Sequential(nn.Linear(2, 3, bias=False), nn.Module())
    weight: Any = model[0].weight
    made = [weight.data[k : k + 1] for k in range(3)] + [weight.detach(), weight.data.t()]
    circle: list[Any] = [made[1]]
    circle.append(circle)
    model.a, model.b = {"x": (made[0], circle)}, made[0]
    model[1].c = SimpleNamespace(d=[made[2]], below=SimpleNamespace(e=weight.data))
    weight.of_it = made[3]
    model.d, model.same, model.back, model.apart = [{made[4]}], [weight], [model], weight.data.clone()
    found = overlaps_of(model, {id(weight)}).followers
    assert {id(each.tensor) for each in found} == set(map(id, made)) and len(found) == len(made)
    for follower in found:
        assert torch.equal(follower.over(weight.data), follower.tensor)
        assert follower.whole == (follower.tensor is made[3])


def test_a_follower_of_a_transposed_parameter_is_all_of_it() -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.arange(6.0).view(2, 3).t())
    model.w = model.weight.detach()
    (follower,) = overlaps_of(model, set()).followers
    assert follower.whole and torch.equal(follower.over(model.weight.detach().contiguous()), model.w)
