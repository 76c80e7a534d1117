"""plan_store: bytes per tier and kind, slots, and refusals with fact, values and way out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zero_core.store import Segment, ShardSpec
from zero_offload import BudgetError, PlacementError, TorchStep, plan_store
from zero_offload.tiles.footprint import StorePlan

MI = 1 << 20


def bound_step() -> TorchStep:
    step = TorchStep()
    step.bind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    return step


def plan(units: int = 4, numel: int = 8 * MI, **arguments: Any) -> StorePlan:
    specs = [ShardSpec(f"u{i}", numel, torch.bfloat16, (Segment(0, numel, 0, "w"),)) for i in range(units)]
    return plan_store(specs, bound_step(), **arguments)


def test_slots_are_a_quarter_and_at_least_three() -> None:
    assert plan(units=32, optimizer="nvme").state_slots == 16
    assert plan(units=2, optimizer="nvme").state_slots == 3
    assert plan(units=1, numel=MI, optimizer="nvme").state_slots == 1  # there is one tile
    assert plan(optimizer="host").state_slots == 0
    assert plan(units=32, optimizer="nvme", gradients="nvme", slots=5).gradient_slots == 5


def test_a_short_budget_takes_slots_first() -> None:
    full = plan(units=32, optimizer="nvme")
    less = plan(units=32, optimizer="nvme", host_bytes=full.arena_bytes - 5 * full.state_slot_bytes)
    assert less.state_slots == full.state_slots - 5
    least = plan(units=32, optimizer="nvme", slots=3)
    assert plan(units=32, optimizer="nvme", host_bytes=least.arena_bytes) == least


def test_below_the_least_is_refused_with_the_way_out() -> None:
    least = plan(units=32, optimizer="nvme", slots=3)
    with pytest.raises(BudgetError) as caught:
        plan(units=32, optimizer="nvme", host_bytes=least.arena_bytes - 1)
    text = str(caught.value)
    assert "budget is 1.6 GiB" in text and "missing" in text and 'gradients="nvme"' in text and "buffers" in text
    with pytest.raises(BudgetError, match="slots=3"):
        plan(units=32, optimizer="nvme", slots=8, host_bytes=least.arena_bytes)


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(PlacementError, match="slots=2: at least 3"):
        plan(optimizer="nvme", slots=2)
    with pytest.raises(PlacementError, match="use 1048576"):
        plan(tile_numel=1000)
    with pytest.raises(KeyError, match="momentum"):
        plan().bytes_of("host", "momentum")
