"""TieredStore as a ShardStore: what each call promises, apart from bits (test_exactness) and faults (test_faults)."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import zero_core
from tests import kit
from zero_core.store import ShardStore, StoreContext
from zero_offload import BudgetError, ClosedError, MemoryByteStore, OffloadError, PlacementError, TieredStore
from zero_offload.planning.accounting import Shape
from zero_offload.testing import FaultyByteStore

from .harness import NUMELS, TILE, Driver, make, make_specs, same, threads
from .simulated import simulated_device

pytestmark = pytest.mark.usefixtures("small_chunks")


def test_is_a_shard_store() -> None:
    assert isinstance(TieredStore(), ShardStore)


@pytest.mark.parametrize("placement", ["host", "nvme", {"host": 0.5, "nvme": 0.5}])
def test_parameters_begin_as_the_rounded_master(placement: Any) -> None:
    driver = make(placement)
    for i in driver.units:
        parameters = driver.store.parameters(i)
        assert parameters.shape == (NUMELS[i],) and parameters.dtype == torch.bfloat16
        assert torch.allclose(parameters.float(), driver.initial[i], rtol=2**-8)
        driver.store.release(i)
        expected = driver.initial[i] if i not in driver.frozen else parameters.float()
        assert torch.equal(driver.store.read_state(i, "master", 0, NUMELS[i]), expected)
    driver.store.close()


def test_plain_sgd_in_fp32_has_no_state_at_all() -> None:
    options = {"dtype": torch.float32, "reduce_dtype": torch.float32, "optimizer_class": torch.optim.SGD}
    driver = make("nvme", driver={**options, "options": {"lr": 0.1}})
    assert driver.store.describe().bytes_of("nvme", "optimizer") == 0
    assert driver.store.state_names() == ("master",)
    before = driver.everything()
    driver.forward()
    gradient = driver.gradient(0)
    driver.store.accept_gradient(0, gradient)
    driver.update()
    after = driver.everything()
    assert torch.allclose(
        after[0][:128], before[0][:128] - 0.1 * min(1.0, 50 / driver.norms[0] ** 0.5) * gradient[:128]
    )
    assert same(before[1:4], after[1:4])
    driver.store.close()


def test_accumulation_is_the_fp32_sum() -> None:
    driver = make("host")
    one, two, three = (torch.full((NUMELS[0],), value, dtype=torch.bfloat16) for value in (1.0, 2.0**-12, 3.0))
    for gradient in (one, two, three):
        driver.store.accept_gradient(0, gradient)
    value = (1.0 + 2.0**-12) + 3.0  # exact in fp32, not in bf16
    assert float(driver.store.gradient_norm_squared()) == value * value * NUMELS[0]
    driver.store.discard_gradients()
    assert float(driver.store.gradient_norm_squared()) == 0.0
    driver.store.close()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_gradient_may_be_reused_after_accept(placement: str) -> None:
    driver = make(placement)
    gradient = torch.ones(NUMELS[1], dtype=torch.bfloat16)
    driver.store.accept_gradient(1, gradient)
    gradient.fill_(100.0)
    driver.store.accept_gradient(1, torch.ones(NUMELS[1], dtype=torch.bfloat16))
    assert float(driver.store.gradient_norm_squared()) == 4.0 * NUMELS[1]
    driver.store.close()


def test_lent_memory_is_the_gradient_itself() -> None:
    driver = make("host")
    lent = driver.store.gradient_buffer(0)
    assert lent is not None and lent.dtype == torch.bfloat16
    lent.fill_(2.0)
    driver.store.accept_gradient(0, lent)
    assert float(driver.store.gradient_norm_squared()) == 4.0 * NUMELS[0]
    assert driver.store.gradient_buffer(0) is None  # a second gradient is added to it
    assert make("nvme").store.gradient_buffer(0) is None
    driver.store.close()


def test_a_wrong_gradient_is_refused() -> None:
    driver = make("host")
    with pytest.raises(ValueError, match="u0.*float32.*bfloat16"):
        driver.store.accept_gradient(0, torch.zeros(NUMELS[0]))
    driver.store.close()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_gradients_with_updates_in_flight_change_nothing_once_discarded(bad: float) -> None:
    def run(spoiled: bool) -> list[torch.Tensor]:
        driver = make("nvme")
        driver.step()  # its update is in flight during what follows
        if spoiled:
            driver.forward()
            gradient = driver.gradient(1)
            gradient[5] = bad
            driver.store.accept_gradient(1, gradient)
            assert not torch.isfinite(driver.store.gradient_norm_squared())
            driver.store.discard_gradients()
        driver.step()
        values = driver.everything()
        driver.store.close()
        return values

    assert same(run(True), run(False))


def test_skipped_segments_keep_their_bits_and_cost_no_transfer() -> None:
    driver = make("nvme")
    before = driver.everything()
    for i in (0, 1, 3):
        driver.store.accept_gradient(i, torch.ones(NUMELS[i], dtype=torch.bfloat16))
    driver.store.wait()
    written = driver.store.stats()["nvme_write_bytes"]
    steps = [[0, 1] if i == 0 else [0, 0] for i in driver.units]
    driver.store.update(driver.groups(), 1.0, driver.units, steps)
    after = driver.everything()
    start, stop = driver.specs[0].segments[1].start, driver.specs[0].segments[1].stop
    for old, new in zip(before[:3], after[:3], strict=True):
        assert torch.equal(old[:start], new[:start]) and torch.equal(old[stop:], new[stop:])
        assert not torch.equal(old[start:stop], new[start:stop])
    assert same(before[3:-4], after[3:-4])
    records = [record.nbytes for record in driver.store.describe().units[0].records if record]
    written = driver.store.stats()["nvme_write_bytes"] - written
    assert written == sum(records) + 2 * TILE + 4096  # both tiles' states and parameters, the short one's to a page
    driver.store.close()


def test_traffic_of_a_step_is_the_layout() -> None:
    driver = make({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, tile_numel=2 * TILE)
    driver.step()
    driver.store.wait()
    before = driver.store.stats()
    for _ in range(3):
        driver.step()
    driver.store.wait()
    after = driver.store.stats()
    layout = driver.store.describe().bytes_of("nvme", "optimizer")
    trainable = sum(numel for i, numel in enumerate(NUMELS) if i not in driver.frozen)
    assert layout - 10 * trainable in range(4096 * 4)
    assert after["nvme_write_bytes"] - before["nvme_write_bytes"] == 3 * layout
    assert after["nvme_read_bytes"] - before["nvme_read_bytes"] == 3 * layout
    assert after["setup_write_bytes"] == layout
    driver.store.close()


def test_write_state_is_read_back_and_moves_the_parameter() -> None:
    for placement in ("host", "nvme"):
        driver = make(placement)
        driver.step()
        values = torch.randn(TILE // 2, generator=torch.Generator().manual_seed(5))
        start = TILE - 1000  # over a tile's edge
        driver.store.write_state(1, "master", start, values)
        driver.store.write_state(1, "exp_avg", start, values)
        driver.store.prefetch(1)
        assert torch.equal(driver.store.read_state(1, "exp_avg", start, start + len(values)), values)
        assert torch.equal(driver.store.read_state(1, "master", start, start + len(values)), values)
        parameters = driver.store.parameters(1)[start : start + len(values)]
        assert torch.allclose(parameters.float(), values, rtol=2**-8)
        driver.store.release(1)
        with pytest.raises(KeyError, match="momentum.*exp_avg"):
            driver.store.read_state(1, "momentum", 0, 1)
        with pytest.raises(ValueError, match="elements"):
            driver.store.read_state(1, "master", 0, NUMELS[1] + 1)
        driver.store.close()


def test_states_written_back_elsewhere_continue_exactly() -> None:
    """A checkpoint by hand, from nvme to host: the next steps have the same bits."""
    first, second = make("nvme"), make("host", tile_numel=2 * TILE)
    first.step()
    for i in first.units:
        for name in first.store.state_names():
            second.store.write_state(i, name, 0, first.store.read_state(i, name, 0, NUMELS[i]))
    second.step_number = first.step_number
    first.step()
    second.step()
    assert same(first.everything(), second.everything())
    first.store.close()
    second.store.close()


def test_a_plan_decides_placement_tiles_and_slots() -> None:
    class Plan:
        placements = {"parameters": "host", "gradients": {"host": 1.0}, "optimizer": "nvme"}
        tile_numel, slots = 2 * TILE, 4
        shape = Shape()

    with pytest.raises(PlacementError, match="optimizer='nvme' needs nvme="):
        TieredStore(plan=Plan())
    driver = Driver(TieredStore(plan=Plan(), nvme=MemoryByteStore(), tile_numel=TILE))
    found = driver.store.describe()
    assert (found.tile_numel, found.state_slots) == (2 * TILE, 4)
    assert found.bytes_of("nvme", "optimizer") > 0 and found.bytes_of("nvme", "parameters") == 0
    assert found.gradient_itemsize == 2  # one micro-batch was planned
    driver.store.close()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_one_micro_batch_takes_half_the_memory_of_gradients_and_has_the_same_bits(placement: Any) -> None:
    sums, alone = make(placement), make(placement, accumulate=1)
    for _ in range(3):
        sums.step()
        alone.step()
    assert same(sums.everything(), alone.everything()) and sums.norms == alone.norms
    half, whole = alone.store.describe(), sums.store.describe()
    assert 0 < 2 * half.bytes_of(placement, "gradients") == whole.bytes_of(placement, "gradients")
    assert half.arena_bytes < whole.arena_bytes and half.extent_bytes("nvme") <= whole.extent_bytes("nvme")
    sums.store.close()
    alone.store.close()


@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_second_gradient_that_has_no_room_is_refused_and_the_first_stays(placement: Any) -> None:
    refused, single = make(placement, accumulate=1), make(placement)
    for driver in (refused, single):
        driver.forward()
        driver.backward()
    with pytest.raises(OffloadError, match=r"a second gradient of u0 .* a sum needs 4; give .*accumulate="):
        refused.store.accept_gradient(0, refused.gradient(0, 1))
    for driver in (refused, single):
        driver.update()
    assert same(refused.everything(), single.everything())
    refused.forward()
    refused.backward()
    refused.store.discard_gradients()  # as zero_grad() does: the next one is a first one again
    refused.step()
    refused.store.close()
    single.store.close()


def test_in_fp32_a_sum_needs_no_more_and_is_not_refused() -> None:
    drivers = [make("host", driver={"reduce_dtype": torch.float32}, accumulate=n) for n in (1, 2)]
    for driver in drivers:
        driver.step(accumulate=2)
    assert same(*(driver.everything() for driver in drivers))
    for driver in drivers:
        driver.store.close()


def test_inference_reads_and_never_writes() -> None:
    driver = make("nvme", driver={"numels": (TILE // 2,) * 6, "frozen": (4, 5)})  # six units, three slots
    before = driver.store.stats()["nvme_write_bytes"]
    driver.forward()
    driver.forward()
    assert driver.losses[0] == driver.losses[1]
    assert driver.store.stats()["nvme_write_bytes"] == before
    assert driver.store.stats()["nvme_read_bytes"] > 0
    driver.store.close()


def test_two_stores_on_one_byte_store_do_not_meet() -> None:
    nvme = MemoryByteStore()
    pair = [make("nvme", nvme), make("nvme", nvme)]
    alone = make("nvme")
    for _ in range(2):
        for driver in (*pair, alone):
            driver.step()
    expected = alone.everything()
    pair[0].store.close()
    assert same(pair[1].everything(), expected)
    pair[1].store.close()
    assert nvme.used_bytes == 0  # every extent came back
    alone.store.close()


@pytest.mark.parametrize("discrete", [False, True])
@pytest.mark.parametrize("placement", ["host", "nvme", {"device": 0.3, "host": 0.3, "nvme": 0.4}], ids=str)
def test_what_attach_takes_is_the_sum_of_the_plans_rows(placement: Any, discrete: bool) -> None:
    with simulated_device() if discrete else nullcontext():
        nvme = MemoryByteStore()
        driver = make(placement, nvme)
        plan = driver.store.describe()
        assert driver.store._on.arena._taken == plan.arena_bytes
        assert nvme.used_bytes == plan.extent_bytes("nvme")
        driver.store.close()


def test_stats_and_describe() -> None:
    driver = make("nvme")
    driver.step()
    driver.store.wait()
    stats, plan = driver.store.stats(), driver.store.describe()
    assert stats["host_bytes"] == plan.arena_bytes == plan.bytes_of("host", "buffers")
    assert stats["device_bytes"] == 0 and stats["exposed_seconds"] >= 0
    assert make("device").store.stats()["device_bytes"] > 0
    kinds = {event.kind for event in driver.store.timeline.events()}
    assert {"update", "swap_in", "swap_out", "norm"} <= kinds
    driver.store.close()


def test_calls_out_of_place_are_refused() -> None:
    store = TieredStore()
    with pytest.raises(ClosedError, match="not attached"):
        store.stats()
    driver = Driver(store)
    with pytest.raises(OffloadError, match="once"):
        Driver(store)
    store.close()
    store.close()
    with pytest.raises(ClosedError, match="closed"):
        driver.store.parameters(0)
    with pytest.raises(PlacementError, match="optimizer='nvme' needs nvme=.*Slab"):
        TieredStore(optimizer="nvme")
    with pytest.raises(PlacementError, match=f"not a multiple of {TILE}, the gradient norm.s chunk; use {TILE}"):
        TieredStore(tile_numel=5)
    with pytest.raises(TypeError, match="RMSprop"):
        Driver(TieredStore(), optimizer_class=torch.optim.RMSprop, options={})


def test_a_device_without_streams_is_refused() -> None:
    store = TieredStore(parameters="device")
    with pytest.raises(OffloadError, match="that torch has streams for, not on meta; leave `store` out"):
        store.attach(
            make_specs(torch.float32),
            torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]),
            lambda i: torch.zeros(NUMELS[i]),
            context=StoreContext(torch.device("meta")),
        )


def test_a_forgotten_store_ends_its_thread_and_gives_extents_back() -> None:
    nvme, others = MemoryByteStore(), threads("zero-offload update")
    driver = make("nvme", nvme)
    driver.step()
    [thread], ghost = threads("zero-offload update") - others, weakref.ref(driver.store)
    del driver
    gc.collect()
    assert ghost() is None
    for closing in threads("zero-offload close"):
        closing.join()
    assert not thread.is_alive()
    assert nvme.used_bytes == 0


def test_an_empty_shard_takes_part() -> None:
    driver = make("nvme", driver={"numels": (TILE, 0, 640), "frozen": ()})
    driver.step()
    assert driver.store.parameters(1).numel() == 0
    driver.store.release(1)
    driver.everything()
    driver.store.close()


def test_stages_that_keep_every_unit_need_a_slot_for_each_on_nvme() -> None:
    """Refused when the store is attached; the first forward would find every slot held."""
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    options: dict[str, Any] = {"stage": 2, "prefetch_bytes": 0}
    store = TieredStore("nvme", "host", "host", nvme=MemoryByteStore())
    with pytest.raises(BudgetError, match=r"keep every unit .* 8 units .* share 3 slots .*use stage=3"):
        zero_core.shard(model, optimizer, store=store, param_dtype=torch.bfloat16, **options)
    store = TieredStore("nvme", "host", "host", nvme=MemoryByteStore())
    sharded = zero_core.shard(model, optimizer, store=store, param_dtype=torch.bfloat16, **options | {"stage": 3})
    kit.step(sharded, model(torch.zeros(1, 64, dtype=torch.bfloat16)).sum())
    sharded.close()


def test_several_stored_tiers_have_the_bits_of_host_memory() -> None:
    """Fails if a unit's parameters had one extent for all stored tiers, or if a tile went to another tier's store."""
    placement = {"host": 0.2, "first": 0.3, "nvme": 0.25, "last": 0.25}
    given = {
        "first": MemoryByteStore(),
        "nvme": FaultyByteStore(MemoryByteStore(), lazy=True),
        "last": MemoryByteStore(),
    }
    driver = {"numels": (3 * TILE, 5 * TILE + 384, 896)}
    one, several = make("host", driver=driver), make(placement, False, driver=driver, tiers=given)
    plan = several.store.describe()
    for tier in (*given, "host"):
        assert all(plan.bytes_of(tier, kind) for kind in ("parameters", "gradients", "optimizer")), tier
    middle = [unit for unit in plan.units if len(set(unit.parameter_tiers)) > 1]
    assert middle, "no unit has parameters on several tiers"
    for driver in (one, several):
        for _ in range(3):
            driver.step(accumulate=2)
    assert one.norms == several.norms and one.losses == several.losses and same(one.everything(), several.everything())
    stats = several.store.stats()
    assert all(stats[f"{tier}_{verb}_bytes"] > 0 for tier in given for verb in ("read", "write"))
    assert not given["nvme"].overtaken
    for driver in (one, several):
        driver.store.close()
    assert [store.used_bytes for store in (given["first"], given["nvme"].inner, given["last"])] == [0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": "remote"}, 'optimizer: \'remote\' is not a tier; known: "device", "host", "cold", "nvme"'),
        ({"optimizer": {"cold": 0.5, "nvme": 0.5}}, "needs nvme=, a ByteStore such as"),
        ({"tiers": {"host": MemoryByteStore()}}, "'host'.* is a tier already"),
        ({"tiers": {"nvme": MemoryByteStore()}, "nvme": MemoryByteStore()}, "'nvme'.* is a tier already"),
    ],
)
def test_tiers_that_are_not_there_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        TieredStore(**{"tiers": {"cold": MemoryByteStore()}, **arguments})
