"""Tests every rule of the `ShardStore` protocol, as a suite to subclass (`ShardStoreSuite`). Imports no pytest.

Subclass it in a test module as `class TestX(ShardStoreSuite)` and define `make_store()`. Every expectation is computed
here with the user's torch optimizer on plain fp32 tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from ..precision import as_bytes
from ..store import GroupStep, Segment, ShardSpec, ShardStore, StoreContext
from ..util.freed_memory import HostMemory
from .trial import SIZES, Trial, copied, refused


class ShardStoreSuite:
    """Three shards: one with two groups and a gap, one with a frozen segment, one of a single parameter.

    Set `parameter_dtypes` and `reduce_dtypes` to those of the store, `exact` to False where its arithmetic differs from
    torch's (then `tolerance` is relative to the update). `device`: where store and optimizer compute. A store that
    says `swaps_in` once it is attached is asked to copy instead of to lend.
    """

    device = torch.device("cpu")

    parameter_dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)
    reduce_dtypes: Sequence[torch.dtype] = (torch.float32, torch.bfloat16)
    exact = True
    tolerance = 1e-4

    def make_store(self) -> ShardStore:
        """A new store, not attached."""
        raise NotImplementedError

    def make_optimizer(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """The optimizer whose behaviour the store must have."""
        return torch.optim.AdamW(groups, lr=1e-2)

    def _trials(
        self, dtypes: Sequence[torch.dtype], reduce_dtypes: Sequence[torch.dtype] = (torch.float32,)
    ) -> Iterator[Trial]:
        """A trial for each of these dtypes of parameters and of gradients."""
        for dtype, reduce_dtype in product(dtypes, reduce_dtypes):
            with Trial(self, dtype, reduce_dtype) as trial:
                yield trial

    # -- tests -------------------------------------------------------------------------------------------------------

    def test_parameters_are_the_rounded_masters(self) -> None:
        for trial in self._trials(self.parameter_dtypes):
            trial.compare_parameters(exact=True)

    def test_updates_equal_the_optimizer_on_whole_tensors(self) -> None:
        for trial in self._trials(self.parameter_dtypes, self.reduce_dtypes):
            for step in range(4):
                if step == 3:  # the options are those of the update
                    trial.optimizer.param_groups[0]["lr"] = 0.5
                trial.step(seed=step, scale=1.0 if step % 2 else 0.25)
                trial.compare_parameters()
            trial.compare_states()

    def test_gradients_accumulate_in_memory_of_the_caller_or_of_the_store(self) -> None:
        """The caller's is free afterwards."""
        for reduce_dtype in self.reduce_dtypes:
            for lent in (False, True):
                with Trial(self, torch.float32, reduce_dtype) as trial:
                    for seed in range(3):
                        trial.give_gradients(seed, lent=lent)
                    trial.compare_norm()
                    trial.update(1.0)
                    trial.compare_parameters()

    def test_discarded_gradients_leave_no_trace(self) -> None:
        """Nor does a NaN in them."""
        with Trial(self, torch.float32) as trial:
            trial.give_gradients(7, poison=float("nan"))
            assert not torch.isfinite(trial.store.gradient_norm_squared())
            trial.discard_all()
            assert float(trial.store.gradient_norm_squared()) == 0.0
            trial.compare_parameters(exact=True)
            trial.step(seed=1)
            trial.compare_parameters()

    def test_part_of_a_gradient_can_be_discarded(self) -> None:
        for reduce_dtype in self.reduce_dtypes:
            for times in (1, 2):
                with Trial(self, torch.float32, reduce_dtype) as trial:
                    trial.store.discard_gradient(0, 128, 320)  # none there yet
                    for seed in range(times):
                        trial.give_gradients(seed, poison=float("inf"))
                    trial.discard(1, 0, 700)  # with all that is not finite
                    trial.discard(0, 128, 320)
                    trial.compare_norm()
                    trial.update(1.0, skip=((0, 1), (1, 0)))
                    trial.compare_parameters()

    def test_part_of_a_gradient_can_be_read_and_overwritten(self) -> None:
        """The written values have more bits than the reduce dtype, or no more."""
        for reduce_dtype in self.reduce_dtypes:
            for written in (torch.float32, reduce_dtype):
                with Trial(self, torch.float32, reduce_dtype) as trial:
                    trial.give_gradients(0)
                    trial.compare_gradients()
                    trial.overwrite(0, 130, 320, written)
                    trial.overwrite(1, 0, 700, written)
                    trial.compare_gradients()
                    trial.give_gradients(1)  # added to the written values
                    trial.overwrite(2, 7, 31, written)
                    trial.compare_gradients()
                    trial.update(0.5)
                    trial.compare_parameters()
                    trial.compare_states()
                    trial.step(seed=2)
                    trial.compare_parameters()

    def test_a_gradient_that_is_not_there_is_not_zeros(self) -> None:
        """Before the first gradient, after an update, and after a discard."""
        with Trial(self, torch.float32) as trial:
            trial.refuses_gradients()
            trial.step(seed=0)
            trial.refuses_gradients()
            trial.give_gradients(1)
            trial.discard_all()
            trial.refuses_gradients()

    def test_skipped_segments_and_missing_gradients_change_nothing(self) -> None:
        with Trial(self, torch.float32) as trial:
            trial.step(seed=0)
            trial.step(seed=1, only=(0, 2), skip=((0, 0),))
            trial.compare_parameters()
            trial.step(seed=2)  # the skipped segment takes its second step, the others their third
            trial.compare_parameters()
            trial.compare_states()

    def test_state_can_be_read_and_written_in_parts(self) -> None:
        with Trial(self, torch.bfloat16 if torch.bfloat16 in self.parameter_dtypes else torch.float32) as trial:
            trial.step(seed=0)
            names = trial.store.state_names()
            assert names[0] == "master"
            saved = {(i, n): trial.store.read_state(i, n, 0, size) for i, size in enumerate(SIZES) for n in names}
            numbers = trial.numbers()
            trial.step(seed=1)
            after = [trial.copy_of(i) for i in range(len(SIZES))]
            for (i, name), values in saved.items():
                for start in range(0, SIZES[i], 96):
                    trial.store.write_state(i, name, start, values[start : start + 96])
            for (i, k, name), number in numbers.items():
                assert number is not None, (i, k, name)
                trial.store.write_scalar(i, k, name, number)
            assert trial.numbers() == numbers
            for (i, name), values in saved.items():
                part = trial.store.read_state(i, name, 16, SIZES[i] - 16)
                for segment in trial.specs[i].segments:
                    low, high = max(16, segment.start), min(SIZES[i] - 16, segment.stop)
                    assert torch.equal(part[low - 16 : high - 16], values[low:high]), (i, name, segment)
            trial.counts = [[max(count - 1, 0) for count in counts] for counts in trial.counts]
            trial.step(seed=1)
            for i, expected in enumerate(after):
                assert torch.equal(trial.copy_of(i), expected), f"shard {i}: the repeated step differs"

    def test_what_slept_goes_on_with_the_same_bits(self) -> None:
        """Gradients, states and parameters are put aside while a gradient waits for its step."""
        for trial in self._trials(self.parameter_dtypes, self.reduce_dtypes):
            trial.step(seed=0)
            trial.give_gradients(seed=1)
            norm = trial.store.gradient_norm_squared()
            for _ in range(2):
                trial.store.sleep(HostMemory())
            with refused("sleeps", "wake()", but="parameters of a store that sleeps were had"):
                trial.copy_of(0)
            for _ in range(2):
                trial.store.wake()
            assert torch.equal(trial.store.gradient_norm_squared(), norm)
            trial.compare_parameters()
            trial.update(1.0)
            trial.compare_parameters()
            trial.compare_states()
            trial.store.sleep(HostMemory())

    def test_a_store_does_not_sleep_while_a_shard_is_lent(self) -> None:
        with Trial(self, torch.float32) as trial:
            if not trial.store.swaps_in:
                trial.store.parameters(1)
                with refused("unit1", "in use", but="the store slept while unit1 was in use"):
                    trial.store.sleep(HostMemory())
                trial.store.release(1)
                trial.step(seed=0)
                trial.compare_parameters()

    def test_shards_are_given_up_one_by_one(self) -> None:
        """The others keep their bits, and a shard that is taken up again can be written."""
        for trial in self._trials(self.parameter_dtypes):
            store = trial.store
            trial.step(seed=0)
            masters = [store.read_state(i, "master", 0, numel) for i, numel in enumerate(SIZES)]
            gone = [store.give_up(i) for i in (0, 1)]
            assert torch.equal(store.read_state(2, "master", 0, SIZES[2]), masters[2]), "another shard changed"
            for i in (0, 1):
                if gone[i]:
                    store.take_up(i)
                    assert not store.read_state(i, "master", 0, SIZES[i]).any(), f"shard {i} is not zeros"
                    store.write_state(i, "master", 0, masters[i])
            trial.compare_parameters()

    def test_closed_stores_say_so(self) -> None:
        trial = Trial(self, torch.float32)
        trial.store.close()
        trial.store.close()
        with refused("close", but="parameters of a closed store were had"):
            trial.copy_of(0)

    def test_copies_under_way_together_arrive_and_dropped_ones_touch_nothing(self) -> None:
        """In a store that swaps in, the memory of a dropped copy belongs to the caller again."""
        for trial in self._trials(self.parameter_dtypes):
            for seed in range(2) if trial.store.swaps_in else ():
                expected = [trial.copy_of(i) for i in range(len(SIZES))]
                memory = [trial.memory(i) for i in range(len(SIZES))]
                arrivals = [trial.store.swap_in(i, memory[i]) for i in range(len(SIZES))]
                arrivals[1].drop()
                memory[1].fill_(7.0)
                for i in (2, 0):
                    arrivals[i].wait()
                    assert torch.equal(memory[i], expected[i]), f"shard {i} did not arrive whole"
                assert bool((memory[1] == 7.0).all()), "a dropped copy was written"
                assert torch.equal(trial.copy_of(1), expected[1])
                trial.step(seed)
                trial.compare_parameters()

    def test_a_shard_that_is_not_trained_keeps_its_bits(self) -> None:
        """In any dtype, beside one that is trained, and as it was written in part. Its master is in its own dtype."""
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.int64):
            generator = torch.Generator().manual_seed(1)
            bits = torch.randint(0, 256, (640 * dtype.itemsize,), dtype=torch.uint8, generator=generator)
            shard, view = bits.view(dtype).to(self.device), nn.Parameter(torch.ones(64, device=self.device))
            frozen = ShardSpec("frozen", 640, dtype, (Segment(0, 600, None, "w"),), trained=False)
            specs = [frozen, ShardSpec("trained", 64, torch.float32, (Segment(0, 64, 0, "v"),))]
            store, first = self.make_store(), [shard.clone(), view.detach().clone()]
            optimizer = self.make_optimizer([{"params": [view], "lr": 1e-2}])
            store.attach(specs, optimizer, first.__getitem__, context=StoreContext(self.device))
            options = GroupStep({k: v for k, v in optimizer.param_groups[0].items() if k != "params"})
            for step, (start, stop) in enumerate(((0, 0), (0, 640), (37, 500)), 1):
                as_bytes(shard[start:stop]).copy_(as_bytes(shard[start:stop]).flip(0))
                store.write_state(0, "master", start, shard[start:stop].clone())
                store.accept_gradient(1, torch.ones(64, device=self.device))
                store.update([options], 1.0, [1, 0], [[0], [step]])
                store.sleep(HostMemory())
                store.wake()
                found = store.read_state(0, "master", 0, 640)
                assert found.dtype == dtype and torch.equal(as_bytes(found.cpu()), as_bytes(shard.cpu())), dtype
                lent = torch.zeros(640, dtype=dtype, device=self.device)
                copied(store, 0, lent)
                assert torch.equal(as_bytes(lent.cpu()), as_bytes(shard.cpu())), f"{dtype} did not keep its bits"
            store.close()
