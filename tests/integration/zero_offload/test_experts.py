"""Experts on slower tiers, in groups of a stack or as modules of a list: the same bits on host and NVMe, as planned.

Fails if the planner has other units than `shard`, or if what a forward does not call is stepped or resumed wrongly.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

pytest.importorskip("zero_optim_cpu")

import zero_core
import zero_offload
from tests import kit
from tests.integration.zero_core import mixtures
from tests.integration.zero_core.mixtures import GROUP, LISTED, Listed, adamw, close, grouped, loss_of, share, tokens
from tests.integration.zero_offload import training
from tests.unit.zero_offload.simulated import simulated_device, streams
from zero_offload import MemoryByteStore, TieredStore, TorchStep, plan
from zero_optim_cpu import CpuStep

NVME = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
SMALL = {"expert_bytes": 1}  # each module of a list is a unit, on one rank
MAKE: dict[str, Callable[[], Any]] = {
    "stacked": lambda: mixtures.qwen(use_cache=False),
    "listed": Listed,
    "listed again": lambda: Listed(again=True),
}


tiered = partial(training.tiered, step=TorchStep())


def run(kind, store, policy=None, prefetch_bytes=0, rows=None, **options):
    """Losses of three steps and the masters after them."""
    torch.manual_seed(0)
    model = MAKE[kind]()
    options = (SMALL if kind != "stacked" else {"expert_bytes": GROUP}) | options
    optimizer = zero_core.shard(model, adamw(model.parameters()), store=store, prefetch_bytes=prefetch_bytes, **options)
    if kind == "stacked":
        assert len(grouped(model)) > 2
    else:
        assert {unit.name for unit in zero_core.units(model)} >= set(LISTED)
    if policy is not None:
        zero_offload.offload_activations(model, store, policy, rows=rows)
    losses = []
    for step in range(3):
        loss = loss_of(model, share(step)[0]) if kind == "stacked" else model(tokens(step))
        losses.append(float(kit.step(optimizer, loss)))
    found = losses, kit.named_values(model, master=True)
    optimizer.close()
    return found


OPTIONS = {
    "plain": {},
    "clipped": {"max_grad_norm": 0.05},
    "bf16": {"param_dtype": torch.bfloat16},
    "in backward": {"update_in_backward": True},
    "ahead": {"prefetch_bytes": 1 << 20},
}
ON_RANKS = [("stacked", 1), ("stacked", 2), ("listed", 1)]


@pytest.mark.promise("experts-same-bits", "experts-listed")
@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind, size", [*ON_RANKS, ("listed again", 1)])
@kit.on_ranks()
def test_host_and_nvme_give_the_same_bits(kind, size, option):
    (losses, host), (again, nvme) = (run(kind, tiered(tier), **OPTIONS[option]) for tier in ("host", "nvme"))
    assert losses == again
    for name, value in host.items():
        assert torch.equal(value, nvme[name]), name


@pytest.mark.promise("experts-same-bits", "experts-listed")
@pytest.mark.parametrize("policy", ["recompute", "host", "nvme"])
@pytest.mark.parametrize("kind, size", ON_RANKS)
@kit.on_ranks()
def test_activations_away_from_the_device_change_nothing(kind, size, policy):
    (losses, kept), (again, away) = run(kind, tiered("nvme")), run(kind, tiered("nvme"), policy)
    assert losses == pytest.approx(again, rel=1e-6)
    for name, value in kept.items():
        close(away[name], value)


PLACES = {
    "all on nvme": ("nvme",),
    "parameters on the device": ("device", "host", "nvme"),
    "mixed": ({"device": 0.4, "host": 0.6}, {"device": 0.4, "host": 0.6}, {"device": 0.4, "nvme": 0.6}),
}


@pytest.mark.promise("experts-same-bits")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("ahead", [0, 1 << 20])
def test_a_discrete_device_gets_the_bits_of_host_memory(place, ahead):
    """Blocks hold a landing buffer for their gradient, while those of their groups come and go."""
    wanted, host = run("stacked", tiered("host"), prefetch_bytes=ahead)
    with simulated_device():
        losses, found = run("stacked", tiered(*PLACES[place], streams=streams()), prefetch_bytes=ahead)
    assert losses == pytest.approx(wanted, rel=0 if place != "mixed" else 1e-6)
    for name, value in host.items():
        if place == "mixed":  # what the device updates it may round otherwise
            close(value, found[name])
        else:
            assert torch.equal(value, found[name]), name


@pytest.mark.promise("experts-same-bits")
def test_a_step_that_recomputes_reads_what_is_planned():
    """Twice a step, as groups are run again one at a time, and in updates, which have all run before the next forward,
    those that are in no slot."""
    model = mixtures.qwen(use_cache=False)
    options = {"expert_bytes": GROUP, "prefetch_bytes": 0}
    planned = zero_offload.plan(model, activations="recompute", parameter_dtype=torch.float32, **NVME, **options)
    store = TieredStore(**NVME, nvme=MemoryByteStore(), step=CpuStep(), slots=planned.slots)
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters()), store=store, **options)
    zero_offload.offload_activations(model, store, "recompute")
    for step in range(8):
        if step == 2:
            before = store.stats()["nvme_read_bytes"]
        kit.step(optimizer, loss_of(model, mixtures.share(step)[0]))
        store.wait()
    own_reads = (store.stats()["nvme_read_bytes"] - before) / 6 - planned.read_bytes_per_step
    assert 0 <= own_reads <= planned.account.moved["nvme"]["forward_read"] / 2
    optimizer.close()


@pytest.mark.promise("experts-listed")
def test_rows_are_refused_where_experts_are_units_and_computed_where_they_are_not():
    with pytest.raises(zero_offload.ActivationError, match=r"contains .*has experts, shard with expert_bytes=None"):
        run("listed", tiered("nvme"), "recompute", rows=1)
    model, optimizer = kit.sharded(Listed, adamw, store=tiered("nvme"), expert_bytes=None)
    zero_offload.offload_activations(model, None, "recompute", rows=1, row_modules=["*"])
    kit.step(optimizer, model(tokens(0)))
    optimizer.close()


@pytest.mark.promise("experts-listed")
def test_several_ranks_are_planned_with_the_experts_in_their_blocks():
    sizes = [plan(Listed(), shard_count=1, replicas=n, **SMALL).store.runs for n in (1, 2)]
    assert [sum(run.count for run in runs) for runs in sizes] == [3 + len(LISTED), 3]
