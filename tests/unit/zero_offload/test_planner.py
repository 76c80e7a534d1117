"""`plan`: explicit and automatic placements, refusals, the printed rows. Fails if a budget is overrun unnoticed."""

import inspect
import re
from dataclasses import replace

import pytest
import torch

import zero_core
from tests.swap import needs_swap
from tests.unit.zero_offload.sizes import transformer
from zero_offload.errors import PlacementError
from zero_offload.layout.tile import device_share
from zero_offload.planning.auto_placement import choose
from zero_offload.planning.budgets import Budgets
from zero_offload.planning.hardware import GIB, Hardware
from zero_offload.planning.planner import PlanError, fits, plan

LLAMA = transformer(
    layers=8, hidden_size=1024, intermediate_size=2816, gated=True, vocab_size=8192, sequence_length=256
)
LAPTOP = Hardware(
    name="laptop",
    host_gib=24,
    nvme_gib=500,
    tflops=0.65,
    update_gbps=100,
    nvme_read_gbps=4.4,
    nvme_write_gbps=10,
    nvme_endurance_tb=600,
)
TIERS = ("device", "host", "nvme")
STATES = ("parameters", "gradients", "optimizer")


@pytest.mark.advice(
    'need the same fraction on "device"; set gradients={}', "need their parameters there too; set parameters={}"
)
def test_what_does_not_fit_on_the_device_leaves_it_from_the_end_states_and_gradients_together():
    small = Hardware(device="cuda", device_gib=3.5, host_gib=512, nvme_gib=1000)
    found = plan(LLAMA, small, tokens=2048)
    shares = {kind: found.placements[kind].get("device", 0.0) for kind in STATES}
    assert 0 < shares["optimizer"] == shares["gradients"] < shares["parameters"] == 1.0
    assert 0.9 * found.budgets.of("device") < found.total("device") <= found.budgets.of("device")
    given = plan(LLAMA, small, tokens=2048, optimizer="host")
    assert given.placements["gradients"] == {"host": 1.0}
    with pytest.raises(PlacementError, match="need the same fraction on .device.; set gradients='host'"):
        plan(LLAMA, small, optimizer="host", gradients="device")
    plan(LLAMA, small, tokens=2048, optimizer="host", gradients="host")  # as it says
    with pytest.raises(PlacementError, match="there too; set parameters='device'"):
        plan(LLAMA, small, optimizer="device", parameters="host")
    plan([1 << 20], small, **dict.fromkeys(STATES, "device"))  # as it says


def test_whole_units_leave_the_device_where_the_update_and_not_the_link_is_slow():
    rates = {"tflops": 100, "update_gbps": 20, "device_gbps": 2000, "link_gbps": 50}
    card = Hardware(device="cuda", device_gib=3.5, host_gib=512, **rates)

    def share_and_seconds(hardware, accumulate, **where):
        found = plan(LLAMA, hardware, activations="recompute", tokens=2048, accumulate=accumulate, **where)
        return [device_share(found.placements[kind]) for kind in STATES], found.step_seconds

    (parameters, gradients, optimizer), seconds = share_and_seconds(card, 1)
    assert 0 < parameters == gradients == optimizer < 1
    as_before = {"device": 1.0}, *[{"device": 0.25, "host": 0.75}] * 2
    assert seconds < share_and_seconds(card, 1, **dict(zip(STATES, as_before, strict=True)))[1]
    (parameters, *states), _ = share_and_seconds(card, 1, durable=True)  # each step writes them to disk
    assert (parameters, states) == (1, [0, 0])
    slow_link = replace(card, link_gbps=0.5, update_gbps=200)  # each micro-batch copies the parameters twice
    (parameters, gradients, optimizer), _ = share_and_seconds(slow_link, 8)
    assert 0 < gradients == optimizer < parameters == 1


@pytest.mark.parametrize("host_gib", [1.0, 1.2, 1.5, 1.8])
def test_what_is_over_goes_down_by_tiles_optimizer_first(host_gib):
    small = Hardware(host_gib=host_gib, host_reserved_gib=0, nvme_gib=500)
    found = plan(LLAMA, small)
    assert found.total("host") + found.total("device") <= host_gib * GIB
    assert sum(found.bytes_of(tier, "optimizer") for tier in TIERS) == 12 * LLAMA.numel
    assert found.bytes_of("nvme", "optimizer") > 0
    if found.bytes_of("nvme", "parameters"):
        assert found.bytes_of("host", "optimizer") == 0


@pytest.mark.promise("small-budget")
def test_a_refusal_says_which_budget_how_much_is_missing_and_what_to_change():
    with pytest.raises(PlanError) as raised:
        plan(LLAMA, LAPTOP, optimizer="host", gradients="host", parameters="host", host_bytes=GIB)
    error = raised.value
    assert error.tier == "host" and error.budget_bytes == GIB
    assert error.missing_bytes == error.needed_bytes - GIB > 0
    assert "optimizer 1.3 GiB" in str(error) and "budget is 1.0 GiB" in str(error)
    assert 'save memory with optimizer="nvme"' in str(error)


@pytest.mark.promise("small-budget")
def test_states_that_leave_a_discrete_device_take_their_gradients_along():
    small = Hardware(device="cuda", device_reserved_gib=0, device_gib=1, host_gib=64)
    whole = dict.fromkeys(("parameters", "gradients", "optimizer"), "device")
    with pytest.raises(PlanError, match='save memory with optimizer="host" and gradients="host", or'):
        plan(LLAMA, small, **whole)
    plan(LLAMA, small, **whole | {"optimizer": "host", "gradients": "host"})


@pytest.mark.promise("plan-advice")
def test_gradients_that_wait_are_told_with_the_argument_that_reduces_them():
    two = Hardware(host_gib=0.5, ranks_per_node=2, host_reserved_gib=0)
    quiet, unused = {"no_sync": True}, {"find_unused_parameters": True}
    for stage, options, way in (
        *((1, {}, "stage=2"), (0, quiet, "no_sync=False"), (3, quiet, "no_sync=False")),
        *((stage, unused, "stage=2 without find_unused_parameters") for stage in range(3)),
    ):
        with pytest.raises(PlanError, match=rf"{way} \(reduces gradients after each micro-batch\)"):
            plan(LLAMA, two, stage=stage, **options, accumulate=2, parameters="host", optimizer="host")


@pytest.mark.parametrize("missing", [1, 4096, 1 << 20])
def test_the_budget_is_exact(missing):
    needs = plan(LLAMA, LAPTOP, optimizer="nvme", slots=3)
    bytes_needed = needs.total("host") + needs.total("device")
    assert fits(LLAMA, LAPTOP, optimizer="nvme", gradients="host", parameters="host", slots=3, host_bytes=bytes_needed)
    with pytest.raises(PlanError) as raised:
        options = {"optimizer": "nvme", "gradients": "host", "parameters": "host", "slots": 3}
        plan(LLAMA, LAPTOP, **options, host_bytes=bytes_needed - missing)
    assert raised.value.missing_bytes == missing


@pytest.mark.advice("leave secondary_shards out, or set nodes=")
@pytest.mark.promise("secondary-shards")
def test_secondary_shards_take_a_part_of_the_model_and_no_network_after_a_steps_first_gather():
    cluster = Hardware(host_gib=240, tflops=0.65, update_gbps=100, network_gbps=0.1, nodes=4, ranks_per_node=8)
    plain, second = (plan(LLAMA, cluster, tokens=512, secondary_shards=each) for each in (False, True))
    more = second.bytes_of("device", "buffers") - plain.bytes_of("device", "buffers")
    assert 0 <= more - 2 * LLAMA.numel / 8 < 64 * len(LLAMA.units)  # units are padded
    assert second.step_seconds < plain.step_seconds
    counted = plan(LLAMA, secondary_shards=8, shard_count=32)
    assert counted.bytes_of("device", "buffers") == second.bytes_of("device", "buffers")
    for hardware, options in ((LAPTOP, {}), (None, {}), (cluster, {"stage": 2}), (None, {"replicas": 2})):
        with pytest.raises(ValueError, match="2 or more machines with 2 or more ranks each"):
            plan(LLAMA, hardware, secondary_shards=8 if "replicas" in options else True, **options)
        assert plan(LLAMA, hardware, **options).total("host") > 0  # left out, as it advises


TRANSFORMER = transformer(layers=24, hidden_size=2048, vocab_size=32000, heads=16, sequence_length=2048)


@pytest.mark.parametrize(
    ("tokens", "device_gib", "host_gib", "expected"),
    [
        (2048, 80, 512, {"keep"}),
        (3 * 2048, 80, 512, {"recompute", "keep"}),
        (16 * 2048, 40, 512, {"recompute"}),
        (32 * 2048, 40, 512, {"host"}),
        (32 * 2048, 40, 20, {"nvme"}),
    ],
)
def test_activations_are_kept_where_there_is_room_and_go_down_where_there_is_not(
    tokens, device_gib, host_gib, expected
):
    gpu = Hardware(device="cuda", device_gib=device_gib, host_gib=host_gib, nvme_gib=1000)
    found = plan(TRANSFORMER, gpu, optimizer="nvme", gradients="nvme", parameters="nvme", tokens=tokens)
    assert set(found.activations[1:-1]) == expected
    assert found.activations[0] == found.activations[-1] == "keep"  # embedding and head
    below = found.bytes_of("nvme", "activations")
    assert below == (24 * 2 * 2048 * tokens if expected == {"nvme"} else 0)
    assert found.write_bytes_per_step == found.account.write_bytes("nvme") + below


@needs_swap
@pytest.mark.promise("ranks-hold-plan")
@pytest.mark.parametrize("where", ["host", "device"])
def test_what_several_ranks_keep_whole_is_counted(where):
    """Parameters at stages 1 and 2; gradients at stage 1, under no_sync, and where ranks may run different units. At
    stage 0 ranks are replicas."""

    def found(stage, **options):
        kinds = dict.fromkeys(STATES, where)
        return plan(LLAMA, **kinds, stage=stage, shard_count=4, parameter_dtype=torch.bfloat16, **options)

    numel, plans = LLAMA.numel, [found(stage) for stage in range(4)]
    assert [each.bytes_of(where, "optimizer") * (4 if stage else 1) for stage, each in enumerate(plans)] == [
        12 * numel
    ] * 4
    shard, whole = (numel // 2, 2 * numel) if where == "device" else (0, 2 * numel)
    parameters = [each.bytes_of("device", "parameters") for each in plans]
    assert parameters == [2 * numel if where == "device" else 0, whole + shard, whole + shard, shard]
    assert all(each.bytes_of("host", "buffers") >= 0 for each in plans)
    assert [each.held_back for each in plans] == [0, 2 * numel, 0, 0]
    assert [found(stage, find_unused_parameters=True).held_back for stage in range(3)] == [2 * numel] * 3
    held = [found(stage, accumulate=4, no_sync=True) for stage in range(4)]
    assert [each.held_back for each in held] == [4 * numel] * 4
    assert all(each.bytes_of("device", "buffers") >= 4 * numel for each in held)
    assert [each.bytes_of(where, "gradients") * (4 if s else 1) for s, each in enumerate(held)] == [2 * numel] * 4
    assert found(3, accumulate=4).held_back == 0


def with_tier(**figures):
    return Hardware(**LAPTOP.to_dict() | {"tiers": {"cold": figures}})


@pytest.mark.promise("planner-tiers")
def test_any_tier_has_a_row_a_budget_and_a_time():
    """Fails if only nvme were counted as stored: the bytes, the slots, the table, or the seconds."""
    kinds = {"parameters": "host", "gradients": "host", "tokens": 64, "slots": 3}
    rates = {"read_gbps": 1, "write_gbps": 1}
    nvme, cold = (
        plan(LLAMA, LAPTOP, **kinds, optimizer="nvme"),
        plan(LLAMA, with_tier(**rates), **kinds, optimizer="cold"),
    )
    assert cold.bytes_of("cold", "optimizer") == nvme.bytes_of("nvme", "optimizer") > 0
    assert cold.store.arena_bytes == nvme.store.arena_bytes and cold.slots == nvme.slots
    assert cold.write_bytes_per_step == 0 < cold.account.write_bytes("cold") == nvme.write_bytes_per_step
    assert cold.step_seconds > nvme.step_seconds and cold.prediction.busy["cold"] > cold.prediction.busy["nvme"] == 0
    assert [row[0] for row in cold.table()] == ["GiB", "device", "host", "cold", "nvme"]
    assert any(name == "cold read, written per step" for name, _ in cold.facts())
    assert plan(LLAMA, with_tier(), **kinds, optimizer="cold").prediction is None  # its rates are not known
    with pytest.raises(KeyError, match="'warm'"):
        cold.bytes_of("warm", "optimizer")


@pytest.mark.promise("planner-tiers")
def test_a_tiers_budget_is_its_own_and_the_hosts_if_it_is_in_host_memory():
    kinds = {"parameters": "host", "gradients": "host", "optimizer": "cold"}
    states = plan(LLAMA, LAPTOP, optimizer="nvme").bytes_of("nvme", "optimizer") / GIB
    assert plan(LLAMA, with_tier(gib=states), **kinds).total("cold") / GIB == states
    with pytest.raises(PlanError, match=r"cold tier needs .*hardware\.tiers\.cold\.gib"):
        plan(LLAMA, with_tier(gib=0.9 * states), **kinds)
    assert fits(LLAMA, with_tier(gib=0.9 * states, ratio=1.2), **kinds)
    least = plan(LLAMA, with_tier(), **kinds, slots=3).store.arena_bytes
    room = {"slots": 3, "host_bytes": int(least + 1.05 * states * GIB)}
    assert fits(LLAMA, with_tier(in_host_memory=True, ratio=1.2), **kinds, **room)
    with pytest.raises(PlanError, match="host tier needs"):
        plan(LLAMA, with_tier(in_host_memory=True), **kinds, slots=3, host_bytes=int(least + 0.95 * states * GIB))


def test_a_plan_has_the_defaults_of_shard() -> None:
    of_plan, of_shard = (inspect.signature(each).parameters for each in (plan, zero_core.shard))
    common = (of_plan.keys() & of_shard.keys()) - {"optimizer"}
    assert "expert_bytes" in common
    assert {name: of_plan[name].default for name in common} == {name: of_shard[name].default for name in common}


def test_a_budget_that_one_kind_just_meets_moves_no_other() -> None:
    """Fails if a tile of the gradients goes down with optimizer states that are all of what was over."""

    def cost(placements):
        return {(tier, kind): int(64 * n) for kind, shares in placements.items() for tier, n in shares.items()}

    budgets = Budgets({"host": 128, "nvme": 1 << 20}, {"device": 1.0})
    chosen = choose({}, budgets, 0.25, dict.fromkeys(STATES, ()), cost)
    assert chosen == {"parameters": {"host": 1.0}, "gradients": {"host": 1.0}, "optimizer": {"nvme": 1.0}}


def test_a_model_of_fewer_tiles_than_the_least_slots_is_planned() -> None:
    planned = plan([1000], Hardware(host_gib=8, nvme_gib=10), optimizer="nvme")
    assert planned.store.state_slots == sum(len(run.unit.stored_records()) for run in planned.store.runs) == 1


@pytest.mark.advice("leaves nothing; set hardware.{}_gib={} or more")
@pytest.mark.promise("device-room")
@pytest.mark.parametrize("reserved", [None, 1.5, {"context": 0.5, "fragments": 1.0}])
def test_a_device_that_its_reserve_fills_is_refused_with_the_size_that_would_do(reserved):
    """Also where more memory reserves more."""

    def planned(gib):
        machine = Hardware(device="cuda", device_gib=gib, device_reserved_gib=reserved, host_gib=8)
        return plan([4 << 20] * 4, machine, **dict.fromkeys(STATES, "host"))

    with pytest.raises(PlanError, match="device_gib=1 leaves nothing; set hardware.device_gib=") as refused:
        planned(1)
    least = float(re.search(r"([\d.]+) or more", str(refused.value))[1])
    assert planned(least).total("device") <= planned(least).budgets.of("device")
    with pytest.raises(PlanError):
        planned(least - 0.02)


def of_literature(layers, hidden, tiles=1):
    return transformer(layers=layers, hidden_size=hidden, vocab_size=50257, sequence_length=1024, tiles=tiles)


@pytest.mark.promise("literature-figures")
def test_40b_fits_on_one_v100_with_host_memory():
    """As ZeRO-3 Offload reports."""
    found = plan(of_literature(50, 8192), Hardware(device="cuda", device_gib=32, host_gib=1536), tokens=1024)
    assert found.bytes_of("host", "optimizer") > 400e9
    assert found.bytes_of("nvme", "optimizer") == 0


@pytest.mark.promise("literature-figures")
def test_30t_fits_on_512_v100_with_nvme_and_100t_does_not():
    """ZeRO-Infinity (Rajbhandari et al. 2021) reports 32 T."""
    nvme_gib = 28e12 / GIB
    machines = Hardware(device="cuda", nodes=32, ranks_per_node=16, device_gib=32, host_gib=1536, nvme_gib=nvme_gib)
    found = plan(of_literature(315, 88 * 1024, 64), machines, tokens=1024)
    assert found.total("nvme") <= 28e12 / 16
    with pytest.raises(PlanError) as raised:
        plan(of_literature(500, 126 * 1024, 128), machines, tokens=1024)
    assert raised.value.tier == "nvme"
