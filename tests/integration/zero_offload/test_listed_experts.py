"""Experts that are modules of a list, each a unit on one rank, on slower tiers: the same bits, and the slots planned.

Fails if the planner has other units than `shard`, or if what a forward does not call is stepped or resumed wrongly.
"""

import pytest
import torch

import zero_core
import zero_offload
from tests import kit
from tests.integration.zero_core.mixtures import LISTED, Listed, adamw, close, tokens
from zero_offload import MemoryByteStore, TieredStore, TorchStep, plan

pytestmark = pytest.mark.promise("experts-listed")

SMALL = {"expert_bytes": 1}


def run(store, policy=None, cut=None, kind=None, **options):
    """Losses of four steps and the masters after them."""
    torch.manual_seed(0)
    model = Listed(**(kind or {}))
    optimizer = zero_core.shard(model, adamw(model.parameters()), store=store, **SMALL, **options)
    assert {unit.name for unit in zero_core.units(model)} >= set(LISTED)
    if policy is not None:
        zero_offload.offload_activations(model, store, policy, **(cut or {}))
    losses = [float(kit.step(optimizer, model(tokens(step)))) for step in range(4)]
    found = losses, kit.named_values(model, master=True)
    optimizer.close()
    return found


def tiered(tier, **options):
    return TieredStore(tier, tier, tier, nvme=MemoryByteStore(), step=TorchStep(), **options)


def same_bits(one, other):
    assert one[0] == other[0]
    for name, value in one[1].items():
        assert torch.equal(value, other[1][name]), name


OPTIONS = {
    "plain": {"prefetch_bytes": 0},
    "clipped": {"max_grad_norm": 0.05},
    "bf16": {"param_dtype": torch.bfloat16},
    "in backward": {"update_in_backward": True},
    "ahead": {"prefetch_bytes": 1 << 20},
}


@pytest.mark.parametrize(
    ("option", "again"), [*((option, False) for option in OPTIONS), ("plain", True), ("ahead", True)]
)
def test_host_and_nvme_give_the_same_bits(option, again):
    options = {"kind": {"again": again}, **OPTIONS[option]}
    same_bits(run(tiered("host"), **options), run(tiered("nvme"), **options))


@pytest.mark.parametrize("policy", ["recompute", "host", "nvme"])
def test_activations_away_from_the_device_change_nothing(policy):
    (losses, kept), (again, away) = run(tiered("nvme")), run(tiered("nvme"), policy)
    assert losses == pytest.approx(again, rel=1e-6)
    for name, value in kept.items():
        close(away[name], value)


def test_rows_are_refused_where_experts_are_units_and_computed_where_they_are_not():
    with pytest.raises(zero_offload.ActivationError, match=r"contains the unit .* or shard with expert_bytes=None"):
        run(tiered("nvme"), "recompute", {"rows": 1})
    model, optimizer = kit.sharded(Listed, adamw, store=tiered("nvme"), expert_bytes=None)
    zero_offload.offload_activations(model, None, "recompute", rows=1, row_modules=["*"])
    kit.step(optimizer, model(tokens(0)))
    optimizer.close()


@pytest.mark.parametrize(("ahead", "expert_bytes"), [(0, 1), (4_000, 1), (1 << 20, 1), (4_000, None)])
def test_units_and_slots_are_those_that_were_planned(ahead, expert_bytes):
    torch.manual_seed(0)
    model = Listed()
    nvme = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
    options = {"expert_bytes": expert_bytes, "prefetch_bytes": ahead}
    planned = plan(model, **nvme, parameter_dtype=torch.float32, **options)
    store = TieredStore(plan=planned, nvme=MemoryByteStore(), step=TorchStep())
    optimizer = zero_core.shard(model, adamw(model.parameters()), store=store, **options)
    found = store.describe()
    assert found.unit_slots == planned.store.unit_slots and found.held == planned.store.held
    assert len(zero_core.units(model)) == 3 + (len(LISTED) if expert_bytes else 0)
    for step in range(4):
        kit.step(optimizer, model(tokens(step)))
    optimizer.close()


def test_several_ranks_are_planned_with_the_experts_in_their_blocks():
    sizes = [plan(Listed(), shard_count=1, replicas=n, **SMALL).store.runs for n in (1, 2)]
    assert [sum(run.count for run in runs) for runs in sizes] == [3 + len(LISTED), 3]
