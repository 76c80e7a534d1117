"""TieredStore as a ShardStore: what each call promises, apart from bits (test_write_back) and faults (test_faults)."""

import gc
import weakref
from typing import Any

import pytest
import torch

import zero_core
from tests import kit
from zero_core.store import StoreContext
from zero_offload import BudgetError, ClosedError, MemoryByteStore, OffloadError, PlacementError, TieredStore
from zero_offload.testing import FaultyByteStore

from .harness import NUMELS, TILE, Driver, make, make_specs, same, threads

pytestmark = pytest.mark.usefixtures("small_chunks")


@pytest.mark.promise("accumulation-tiers")
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


@pytest.mark.promise("frozen-moves-parameters")
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
    assert written == records[1]  # the first tile's states stay in a slot, and each unit's parameters have their own
    driver.store.close()


@pytest.mark.promise("states-by-name")
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


@pytest.mark.promise("one-micro-batch")
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


@pytest.mark.advice("a second gradient of unit {} before step()")
@pytest.mark.promise("one-micro-batch")
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_a_second_gradient_that_has_no_room_is_refused_and_the_first_stays(placement: Any) -> None:
    refused, single = make(placement, accumulate=1), make(placement)
    for driver in (refused, single):
        driver.forward_backward()
    with pytest.raises(OffloadError, match=r"a second gradient of unit u0 .* a sum needs 4; set accumulate= of"):
        refused.store.accept_gradient(0, refused.gradient(0, 1))
    for driver in (refused, single):
        driver.update()
    assert same(refused.everything(), single.everything())
    refused.forward_backward()
    refused.store.discard_gradients()  # as zero_grad() does: the next one is a first one again
    refused.step()
    refused.store.close()
    single.store.close()


@pytest.mark.promise("inference-writes-nothing")
def test_inference_reads_and_never_writes() -> None:
    driver = make("nvme", driver={"numels": (TILE // 2,) * 6, "frozen": (4, 5)})  # six units, three slots
    before = driver.store.stats()["nvme_write_bytes"]
    driver.forward()
    driver.forward()
    assert driver.losses[0] == driver.losses[1]
    assert driver.store.stats()["nvme_write_bytes"] == before
    assert driver.store.stats()["nvme_read_bytes"] > 0
    driver.store.close()


@pytest.mark.advice("must be a positive multiple of {} elements; use {}")
def test_calls_out_of_place_are_refused() -> None:
    store = TieredStore()
    with pytest.raises(ClosedError, match="not attached yet: first call"):
        store.stats()
    driver = Driver(store)
    with pytest.raises(OffloadError, match="has a model already"):
        Driver(store)
    store.close()
    store.close()
    with pytest.raises(ClosedError, match="the TieredStore is closed: close it after the last use of its model"):
        driver.store.parameters(0)
    with pytest.raises(PlacementError, match="optimizer='nvme' needs nvme=.*Slab"):
        TieredStore(optimizer="nvme")
    with pytest.raises(PlacementError, match=f"must be a positive multiple of {TILE} elements; use {TILE}"):
        TieredStore(tile_numel=5)
    TieredStore(tile_numel=TILE).close()
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
    [thread], ghost, freed = threads("zero-offload update") - others, weakref.ref(driver.store), list[bool]()
    free = nvme.free
    nvme.free = lambda extent: (freed.append(thread.is_alive()), free(extent))  # type: ignore[assignment, func-returns-value]
    del driver
    gc.collect()
    assert ghost() is None
    for closing in threads("zero-offload close"):
        closing.join()
    assert freed and not any(freed)  # extents were given back when nothing could write to them any more
    assert nvme.used_bytes == 0


@pytest.mark.promise("few-slots")
def test_stages_that_keep_every_unit_need_a_slot_for_each_on_nvme() -> None:
    """Refused when the store is attached; the first forward would find every slot held. Each way out trains."""

    def sharded(parameters: str = "nvme", **options: Any) -> tuple[torch.nn.Module, Any]:
        model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
        store = TieredStore(parameters, "host", "host", nvme=MemoryByteStore())
        optimizer = torch.optim.AdamW(model.parameters())
        return model, zero_core.shard(model, optimizer, store=store, param_dtype=torch.bfloat16, **options)

    ways = 'use stage=3. Or set parameters="host". Or raise prefetch_bytes to the bytes of all these units'
    with pytest.raises(BudgetError, match=rf"all parameters stay .* 8 units need a slot .* are 3 slots; {ways}"):
        sharded(stage=2, prefetch_bytes=0)
    for way in ({"stage": 3}, {"stage": 2, "parameters": "host"}, {"stage": 2, "prefetch_bytes": 8 * 64 * 65 * 2}):
        model, optimizer = sharded(**{"prefetch_bytes": 0} | way)  # type: ignore[arg-type]
        kit.step(optimizer, model(torch.zeros(1, 64, dtype=torch.bfloat16)).sum())
        optimizer.close()


@pytest.mark.promise("other-tiers")
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


@pytest.mark.promise("unknown-tier")
@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"optimizer": "remote"}, 'optimizer: \'remote\' is not a tier; known: "device", "host", "cold", "nvme"'),
        ({"optimizer": {"cold": 0.5, "nvme": 0.5}}, "needs nvme=, a ByteStore such as"),
        ({"tiers": {"host": MemoryByteStore()}}, "'host'.* a tier has this name"),
        ({"tiers": {"nvme": MemoryByteStore()}, "nvme": MemoryByteStore()}, "'nvme'.* a tier has this name"),
    ],
)
def test_tiers_that_are_not_there_are_refused(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(PlacementError, match=text):
        TieredStore(**{"tiers": {"cold": MemoryByteStore()}, **arguments})
