"""TieredStore as a ShardStore: what each call promises, apart from bits (test_exactness) and faults (test_faults)."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch

from zero_core.store import ShardStore, StoreContext
from zero_offload import ClosedError, MemoryByteStore, OffloadError, PlacementError, TieredStore
from zero_offload.testing import FaultyByteStore

from .harness import MI, NUMELS, Driver, make, make_specs, same


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
    assert written == sum(records) + 2 * MI + 4096  # both tiles' states and parameters, the short one's to a page
    driver.store.close()


def test_traffic_of_a_step_is_the_layout() -> None:
    driver = make({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, tile_numel=2 * MI)
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
        values = torch.randn(MI // 2, generator=torch.Generator().manual_seed(5))
        start = MI - 1000  # over a tile's edge
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
    first, second = make("nvme"), make("host", tile_numel=2 * MI)
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


def test_update_in_backward_has_the_bits_of_an_update_after_it() -> None:
    def run(placement: Any, inside: bool) -> list[torch.Tensor]:
        driver = make(placement)
        for number in range(1, 4):
            driver.forward()
            driver.step_number = number - 1
            for i in reversed(driver.units):
                if i in driver.frozen:
                    continue
                driver.store.accept_gradient(i, driver.gradient(i))
                if inside:
                    driver.store.update(driver.groups(), 1.0, [i], [[number] * 2] * 4)
            if not inside:
                driver.store.update(driver.groups(), 1.0, driver.units, [[number] * 2] * 4)
        values = driver.everything()
        driver.store.close()
        return values

    expected = run("host", False)
    assert same(run("host", True), expected)
    assert same(run("nvme", True), expected)


def test_update_in_backward_reads_the_next_unit_ahead() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    driver = make({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, nvme, driver={"frozen": ()})

    def backward(number: int) -> None:
        for i in reversed(driver.units):
            driver.store.accept_gradient(i, torch.ones(NUMELS[i], dtype=torch.bfloat16))
            driver.store.update(driver.groups(), 1.0, [i], [[number] * 2] * 4)

    backward(1)
    driver.store.wait()
    seen = len(nvme.log)
    driver.store.accept_gradient(3, torch.ones(NUMELS[3], dtype=torch.bfloat16))
    driver.store.wait()
    # Tiles are in hand before their update, at most one a slot; which were read in this backward, and which had
    # been in the last, depends on when slots fell free.
    in_hand = list(driver.store._states._early)
    assert 1 <= len(in_hand) <= driver.store.describe().state_slots
    assert {kind for kind, _, _ in nvme.log[seen:]} <= {"read"}
    driver.store.close()


def test_a_plan_decides_placement_tiles_and_slots() -> None:
    class Plan:
        placements = {"parameters": "host", "gradients": {"host": 1.0}, "optimizer": "nvme"}
        tile_numel, slots = 2 * MI, 4

    with pytest.raises(PlacementError, match="optimizer='nvme' needs nvme="):
        TieredStore(plan=Plan())
    driver = Driver(TieredStore(plan=Plan(), nvme=MemoryByteStore(), tile_numel=MI))
    found = driver.store.describe()
    assert (found.tile_numel, found.state_slots) == (2 * MI, 4)
    assert found.bytes_of("nvme", "optimizer") > 0 and found.bytes_of("nvme", "parameters") == 0
    driver.store.close()


def test_inference_reads_and_never_writes() -> None:
    driver = make("nvme", driver={"numels": (MI // 2,) * 6, "frozen": (4, 5)})  # six units, three slots
    before = driver.store.stats()["nvme_write_bytes"]
    driver.forward()
    driver.forward()
    assert driver.losses[0] == driver.losses[1]
    assert driver.store.stats()["nvme_write_bytes"] == before
    assert driver.store.stats()["nvme_read_bytes"] > 0
    driver.store.close()


def test_other_orders_are_fine() -> None:
    """The order of update and the order of use need not agree, nor the order of one step with the next's."""
    results = []
    for orders in ([(0, 1, 2, 3)] * 3, [(3, 1, 0, 2), (0, 1, 2, 3), (2, 3, 1, 0)]):
        driver = make("nvme", slots=3)
        for order in orders:
            driver.forward()
            driver.backward()
            driver.update(order)
        results.append(driver.everything())
        driver.store.close()
    assert same(*results)


def test_parameters_wait_for_their_own_unit_only() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    driver = make({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, nvme, slots=3)
    driver.step()
    driver.store.wait()
    driver.forward()
    driver.backward()
    driver.store.wait()  # what was read ahead is there: the first three of four tiles
    nvme.hold()
    driver.update()
    driver.store.parameters(0)  # its two tiles need no transfer any more; the writes are held
    driver.store.release(0)
    assert driver.store._pipeline.behind(3)
    waiter = threading.Timer(0.2, nvme.release)
    waiter.start()
    driver.store.parameters(3)
    driver.store.release(3)
    waiter.join()
    driver.store.close()


def test_reads_begin_during_backward() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    driver = make({"parameters": "host", "gradients": "host", "optimizer": "nvme"}, nvme, slots=3)
    driver.step()
    driver.store.wait()
    driver.forward()
    seen = len(nvme.log)
    driver.backward()
    driver.store.wait()
    ahead = nvme.log[seen:]
    assert [kind for kind, _, _ in ahead] == ["read"] * 3  # as many as there are slots, before any norm is known
    driver.update()
    driver.store.wait()
    kinds = [kind for kind, _, _ in nvme.log[seen:]]
    tiles = sum(record is not None for unit in driver.store.describe().units for record in unit.records)
    assert kinds.count("read") == tiles and kinds.count("write") == tiles
    driver.store.close()


def test_an_updated_unit_is_handed_over_from_memory() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    driver = make({"parameters": "nvme", "gradients": "host", "optimizer": "host"}, nvme)
    driver.forward()
    driver.backward()
    driver.store.wait()
    driver.update()
    driver.store._monitor.wait_until(lambda: not driver.store._pipeline.behind(0), "u0")
    seen = len(nvme.log)
    driver.store.parameters(0)
    driver.store.release(0)
    offsets = {offset for kind, offset, _ in nvme.log[seen:] if kind == "read"}
    assert driver.store._parameters._extents[0].offset_bytes not in offsets
    driver.store.close()


def test_no_request_overtakes_a_write_of_the_same_bytes() -> None:
    """Transfers happen only when something waits for them: whoever does not wait is caught."""
    nvme = FaultyByteStore(MemoryByteStore(), lazy=True)
    driver = make("nvme", nvme, slots=3, driver={"numels": (MI + 640, MI // 2, 896)})

    driver.step(accumulate=2)
    driver.step()
    gradient = torch.ones(MI // 2, dtype=torch.bfloat16)
    driver.store.accept_gradient(1, gradient)
    driver.store.discard_gradients()
    for _ in range(2):  # the same unit again, its first gradient and its parameters still on their way
        driver.store.accept_gradient(1, gradient)
        driver.store.update(driver.groups(), 1.0, [1], [[9, 9]] * 3)
    driver.everything()
    assert nvme.overtaken == []
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
    assert nvme._used == 0  # every extent came back
    alone.store.close()


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
    with pytest.raises(PlacementError, match="1048576"):
        TieredStore(tile_numel=5)
    with pytest.raises(TypeError, match="RMSprop"):
        Driver(TieredStore(), optimizer_class=torch.optim.RMSprop, options={})


def test_the_device_tier_is_refused_off_the_cpu() -> None:
    store = TieredStore(parameters="device")
    with pytest.raises(PlacementError, match="parameters='device'.*CPU only"):
        store.attach(
            make_specs(torch.float32),
            torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]),
            lambda i: torch.zeros(NUMELS[i]),
            context=StoreContext(torch.device("meta")),
        )


def test_a_forgotten_store_ends_its_thread_and_gives_extents_back() -> None:
    nvme = MemoryByteStore()
    driver = make("nvme", nvme)
    driver.step()
    thread, ghost = driver.store._pipeline._thread, weakref.ref(driver.store)
    del driver
    gc.collect()
    assert ghost() is None
    for closing in threading.enumerate():
        if closing.name == "zero-offload close":
            closing.join()
    assert thread is not None and not thread.is_alive()
    assert nvme._used == 0


def test_an_empty_shard_takes_part() -> None:
    driver = make("nvme", driver={"numels": (MI, 0, 640), "frozen": ()})
    driver.step()
    assert driver.store.parameters(1).numel() == 0
    driver.store.release(1)
    driver.everything()
    driver.store.close()


@pytest.mark.timeout(60)
def test_prefetch_waits_for_nothing_and_a_wait_for_a_slot_s_write_is_exposed() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    placement = {"parameters": "nvme", "gradients": "host", "optimizer": "host"}
    driver = make(placement, nvme, driver={"numels": (MI // 2,) * 6, "frozen": ()})
    driver.forward()
    for i in (2, 1, 0):
        driver.store.accept_gradient(i, driver.gradient(i))
    driver.store.wait()
    nvme.hold()
    driver.update()
    for i in (0, 1, 2):  # the three slots: updated and used, their writes held
        driver.store.parameters(i)
        driver.store.release(i)
    seen, exposed = len(nvme.log), driver.store.stats()["exposed_seconds"]
    driver.store.prefetch(5)
    assert len(nvme.log) == seen
    waiter = threading.Timer(0.1, nvme.release)
    waiter.start()
    driver.store.parameters(5)
    assert driver.store.stats()["exposed_seconds"] > exposed
    waiter.join()
    driver.store.close()


@pytest.mark.timeout(60)
def test_the_update_waits_for_a_slot_s_write_without_holding_the_training_thread() -> None:
    nvme = FaultyByteStore(MemoryByteStore())
    placement = {"parameters": "nvme", "gradients": "host", "optimizer": "host"}
    driver = make(placement, nvme, driver={"numels": (MI // 2,) * 6, "frozen": ()})
    driver.forward()
    driver.backward()
    driver.store.wait()
    nvme.hold()
    driver.update()  # units 0, 1 and 2 are in the three slots; their writes do not end
    for i in (0, 1, 2):
        driver.store.parameters(i)
        driver.store.release(i)  # the update of unit 3 may have the slot now, when its write is done
        for _ in range(20):
            threading.Event().wait(0.005)
            driver.store.release(i)  # a call that needs the tables, not the slot
    assert driver.store._pipeline.behind(3)
    nvme.release()
    driver.everything()
    driver.store.close()
