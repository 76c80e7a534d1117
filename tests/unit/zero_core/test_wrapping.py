"""Which parameters form a unit: blocks, large leaves, ties, experts inside their block."""

import pytest
import torch
from torch import nn

from tests.integration.zero_core import toys
from zero_core.model.unit_plan import plan_units


def names(model: nn.Module, **options) -> dict[str, set[str]]:
    return {plan.name: set(plan.modules) for plan in plan_units(model, **options)}


def test_blocks_large_leaves_and_the_rest():
    model = toys.Stack(40)
    plans = plan_units(model)
    assert [p.name for p in plans][:3] == ["root", "blocks.0", "blocks.1"]  # embed and head are below a hundredth
    assert set(plans[0].parameters) == {"embed.weight", "embed.bias", "head.weight", "head.bias"}
    assert {"embed", "head"} <= set(names(toys.Stack(2)))


@pytest.mark.promise("ties-merge-units")
def test_ties_merge_units():
    merged = names(toys.Tied())
    assert merged["blocks.0"] == {"blocks.0", "blocks.2"}
    assert "blocks.2" not in merged


def test_a_class_list_overrides():
    assert set(names(toys.Stack(2), classes=[toys.Block])) == {"root", "blocks.0", "blocks.1"}
    inside = nn.Sequential(toys.Block(), nn.Linear(3, 3))
    assert set(names(inside, classes=[toys.Block])) == {"0", "root"}


def test_a_unit_has_one_dtype():
    model = toys.Stack(1)
    model.blocks[0].norm.bfloat16()
    plans = {p.name: p for p in plan_units(model)}
    dtypes = {name: {q.dtype for q in plan.parameters.values()} for name, plan in plans.items()}
    assert all(len(found) == 1 for found in dtypes.values())
    assert dtypes["blocks.0"] == {torch.bfloat16} and dtypes["blocks.0:float32"] == {torch.float32}
