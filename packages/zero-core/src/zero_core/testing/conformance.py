"""Tests every rule of the `ShardStore` protocol, as a suite to subclass (`ShardStoreSuite`). Imports no pytest.

Subclass it in a test module as `class TestX(ShardStoreSuite)` and define `make_store()`. Every expectation is computed
here with the user's torch optimizer on plain fp32 tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..precision import as_bytes, rounded, sum_of_squares
from ..saved_bytes import HostMemory
from ..store import GroupStep, Segment, ShardSpec, ShardStore, StoreContext

__all__ = ["ShardStoreSuite"]

_SIZES = (320, 1000, 64)  # elements of the three shards; not multiples of each other


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

    # -- tests -------------------------------------------------------------------------------------------------------

    def test_parameters_are_the_rounded_masters(self) -> None:
        for dtype in self.parameter_dtypes:
            with _Trial(self, dtype) as trial:
                trial.compare_parameters(exact=True)

    def test_updates_equal_the_optimizer_on_whole_tensors(self) -> None:
        for dtype in self.parameter_dtypes:
            for reduce_dtype in self.reduce_dtypes:
                with _Trial(self, dtype, reduce_dtype) as trial:
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
                with _Trial(self, torch.float32, reduce_dtype) as trial:
                    for seed in range(3):
                        trial.give_gradients(seed, lent=lent)
                    trial.compare_norm()
                    trial.update(1.0)
                    trial.compare_parameters()

    def test_discarded_gradients_leave_no_trace(self) -> None:
        """Nor does a NaN in them."""
        with _Trial(self, torch.float32) as trial:
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
                with _Trial(self, torch.float32, reduce_dtype) as trial:
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
                with _Trial(self, torch.float32, reduce_dtype) as trial:
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
        with _Trial(self, torch.float32) as trial:
            trial.refuses_gradients()
            trial.step(seed=0)
            trial.refuses_gradients()
            trial.give_gradients(1)
            trial.discard_all()
            trial.refuses_gradients()

    def test_skipped_segments_and_missing_gradients_change_nothing(self) -> None:
        with _Trial(self, torch.float32) as trial:
            trial.step(seed=0)
            trial.step(seed=1, only=(0, 2), skip=((0, 0),))
            trial.compare_parameters()
            trial.step(seed=2)  # the skipped segment takes its second step, the others their third
            trial.compare_parameters()
            trial.compare_states()

    def test_state_can_be_read_and_written_in_parts(self) -> None:
        with _Trial(self, torch.bfloat16 if torch.bfloat16 in self.parameter_dtypes else torch.float32) as trial:
            trial.step(seed=0)
            names = trial.store.state_names()
            assert names[0] == "master"
            saved = {(i, n): trial.store.read_state(i, n, 0, size) for i, size in enumerate(_SIZES) for n in names}
            numbers = trial.numbers()
            trial.step(seed=1)
            after = [trial.copy_of(i) for i in range(len(_SIZES))]
            for (i, name), values in saved.items():
                for start in range(0, _SIZES[i], 96):
                    trial.store.write_state(i, name, start, values[start : start + 96])
            for (i, k, name), number in numbers.items():
                assert number is not None, (i, k, name)
                trial.store.write_scalar(i, k, name, number)
            assert trial.numbers() == numbers
            for (i, name), values in saved.items():
                part = trial.store.read_state(i, name, 16, _SIZES[i] - 16)
                for segment in trial.specs[i].segments:
                    low, high = max(16, segment.start), min(_SIZES[i] - 16, segment.stop)
                    assert torch.equal(part[low - 16 : high - 16], values[low:high]), (i, name, segment)
            trial.counts = [[max(count - 1, 0) for count in counts] for counts in trial.counts]
            trial.step(seed=1)
            for i, expected in enumerate(after):
                assert torch.equal(trial.copy_of(i), expected), f"shard {i}: the repeated step differs"

    def test_what_slept_goes_on_with_the_same_bits(self) -> None:
        """Gradients, states and parameters are put aside while a gradient waits for its step."""
        for dtype in self.parameter_dtypes:
            for reduce_dtype in self.reduce_dtypes:
                with _Trial(self, dtype, reduce_dtype) as trial:
                    trial.step(seed=0)
                    trial.give_gradients(seed=1)
                    norm = trial.store.gradient_norm_squared()
                    for _ in range(2):
                        trial.store.sleep(HostMemory())
                    with _refused("sleeps", "wake()", but="parameters of a store that sleeps were had"):
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
        with _Trial(self, torch.float32) as trial:
            if not trial.store.swaps_in:
                trial.store.parameters(1)
                with _refused("unit1", "in use", but="the store slept while unit1 was in use"):
                    trial.store.sleep(HostMemory())
                trial.store.release(1)
                trial.step(seed=0)
                trial.compare_parameters()

    def test_shards_are_given_up_one_by_one(self) -> None:
        """The others keep their bits, and a shard that is taken up again can be written."""
        for dtype in self.parameter_dtypes:
            with _Trial(self, dtype) as trial:
                store = trial.store
                trial.step(seed=0)
                masters = [store.read_state(i, "master", 0, numel) for i, numel in enumerate(_SIZES)]
                gone = [store.give_up(i) for i in (0, 1)]
                assert torch.equal(store.read_state(2, "master", 0, _SIZES[2]), masters[2]), "another shard changed"
                for i in (0, 1):
                    if gone[i]:
                        store.take_up(i)
                        assert not store.read_state(i, "master", 0, _SIZES[i]).any(), f"shard {i} is not zeros"
                        store.write_state(i, "master", 0, masters[i])
                trial.compare_parameters()

    def test_closed_stores_say_so(self) -> None:
        trial = _Trial(self, torch.float32)
        trial.store.close()
        trial.store.close()
        with _refused("close", but="parameters of a closed store were had"):
            trial.copy_of(0)

    def test_copies_under_way_together_arrive_and_dropped_ones_touch_nothing(self) -> None:
        """In a store that swaps in, the memory of a dropped copy belongs to the caller again."""
        for dtype in self.parameter_dtypes:
            with _Trial(self, dtype) as trial:
                for seed in range(2) if trial.store.swaps_in else ():
                    expected = [trial.copy_of(i) for i in range(len(_SIZES))]
                    memory = [trial.memory(i) for i in range(len(_SIZES))]
                    arrivals = [trial.store.swap_in(i, memory[i]) for i in range(len(_SIZES))]
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
                if store.swaps_in:
                    store.swap_in(0, lent).wait()
                else:
                    lent.copy_(store.parameters(0))
                    store.release(0)
                assert torch.equal(as_bytes(lent.cpu()), as_bytes(shard.cpu())), f"{dtype} did not keep its bits"
            store.close()


@contextmanager
def _refused(*words: str, but: str) -> Iterator[None]:
    """Asserts that the block raises an error with these words. but: the failure's text if it does not raise."""
    try:
        yield
    except Exception as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(but)


class _Trial(AbstractContextManager["_Trial"]):
    """A store beside plain tensors which go through the same steps."""

    def __init__(self, suite: ShardStoreSuite, dtype: torch.dtype, reduce_dtype: torch.dtype = torch.float32) -> None:
        self.suite, self.dtype, self.reduce_dtype = suite, dtype, reduce_dtype
        generator = torch.Generator().manual_seed(0)
        masters = [torch.randn(size, generator=generator).to(suite.device) for size in _SIZES]
        segments = [
            (Segment(0, 96, 0, "a"), Segment(128, 320, 1, "b")),
            (Segment(0, 700, 1, "c"), Segment(704, 1000, None, "frozen")),
            (Segment(0, 64, 0, "d"),),
        ]
        self.specs = [ShardSpec(f"unit{i}", n, dtype, s) for i, (n, s) in enumerate(zip(_SIZES, segments, strict=True))]
        self.whole = [m.clone() for m in masters]
        self.views = [
            [nn.Parameter(w[s.start : s.stop]) for s in ss] for w, ss in zip(self.whole, segments, strict=True)
        ]
        groups: list[dict[str, Any]] = [{"params": [], "lr": 2e-2}, {"params": [], "weight_decay": 0.1}]
        for spec, views in zip(self.specs, self.views, strict=True):
            for segment, view in zip(spec.segments, views, strict=True):
                if segment.group is not None:
                    groups[segment.group]["params"].append(view)
        self.optimizer = suite.make_optimizer(groups)
        self.gradients: list[Tensor | None] = [None] * len(_SIZES)
        self.counts = [[0] * len(s) for s in segments]
        self.store = suite.make_store()
        context = StoreContext(suite.device, reduce_dtype=reduce_dtype)
        asked: list[int] = []

        def initial(i: int) -> Tensor:
            asked.append(i)
            return masters[i].clone()

        self.store.attach(self.specs, self.optimizer, initial, context=context)
        assert asked == list(range(len(_SIZES))), "initial(i) is called once each, in order"

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def _values(self, i: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + 10 * seed + i)
        values = torch.randn(_SIZES[i], generator=generator).to(self.reduce_dtype)
        inside = torch.zeros(_SIZES[i], dtype=torch.bool)
        for segment in self.specs[i].segments:
            inside[segment.start : segment.stop] = segment.group is not None
        return (values * inside).to(self.suite.device)

    def give_gradients(
        self,
        seed: int,
        *,
        only: Sequence[int] = (0, 1, 2),
        lent: bool = False,
        poison: float | None = None,
    ) -> None:
        for i in only:
            values = self._values(i, seed)
            if poison is not None and i == 1:
                values[5] = poison
            so_far = self.gradients[i]
            self.gradients[i] = values.float().clone() if so_far is None else so_far + values.float()
            buffer = self.store.gradient_buffer(i) if lent else None
            given = values if buffer is None else buffer.copy_(values)
            self.store.accept_gradient(i, given)
            if buffer is None:
                given.fill_(1e9)  # its memory belongs to the caller again

    def discard_all(self) -> None:
        self.store.discard_gradients()
        self.gradients = [None] * len(_SIZES)

    def discard(self, i: int, start: int, stop: int) -> None:
        self.store.discard_gradient(i, start, stop)
        gradient = self.gradients[i]
        assert gradient is not None
        gradient[start:stop] = 0.0

    def overwrite(self, i: int, start: int, stop: int, dtype: torch.dtype) -> None:
        """With values that `dtype` holds."""
        values = torch.linspace(-1.0, 2.0, stop - start, device=self.suite.device).to(dtype).float()
        gradient = self.gradients[i]
        assert gradient is not None
        self.store.write_gradient(i, start, values)
        gradient[start:stop] = values

    def compare_gradients(self) -> None:
        self.compare_norm()
        for i, (spec, expected) in enumerate(zip(self.specs, self.gradients, strict=True)):
            for segment in spec.segments:
                if segment.group is not None and expected is not None:
                    found = self.store.read_gradient(i, segment.start + 1, segment.stop)
                    assert found.dtype == torch.float32 and found.shape == (segment.stop - segment.start - 1,)
                    assert torch.equal(found.cpu(), expected[segment.start + 1 : segment.stop].cpu()), segment.name
                    found.fill_(7.0)  # a copy

    def refuses_gradients(self) -> None:
        with _refused("no gradient", but="a gradient was read where there is none"):
            self.store.read_gradient(0, 0, 96)
        with _refused("no gradient", but="a gradient was written where there is none"):
            self.store.write_gradient(0, 0, torch.ones(96, device=self.suite.device))

    def update(self, scale: float, skip: Sequence[tuple[int, int]] = ()) -> None:
        steps = self._apply(scale, skip)
        options = [{k: v for k, v in g.items() if k != "params"} for g in self.optimizer.param_groups]
        self.store.update([GroupStep(o) for o in options], scale, [2, 0, 1], steps)

    def _apply(self, scale: float, skip: Sequence[tuple[int, int]]) -> list[list[int]]:
        steps = [[0] * len(c) for c in self.counts]
        for i, spec in enumerate(self.specs):
            gradient = self.gradients[i]
            for k, segment in enumerate(spec.segments):
                if gradient is None or segment.group is None or (i, k) in skip:
                    continue
                self.counts[i][k] += 1
                steps[i][k] = self.counts[i][k]
                self.views[i][k].grad = gradient[segment.start : segment.stop] * scale
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.gradients = [None] * len(_SIZES)
        return steps

    def step(
        self, seed: int, scale: float = 1.0, only: Sequence[int] = (0, 1, 2), skip: Sequence[tuple[int, int]] = ()
    ) -> None:
        self.give_gradients(seed, only=only)
        self.update(scale, skip)

    def numbers(self) -> dict[tuple[int, int, str], float | None]:
        """The numbers that the store keeps besides tensors, by shard, segment and name, without frozen segments."""
        return {
            (i, k, name): self.store.read_scalar(i, k, name)
            for i, spec in enumerate(self.specs)
            for k, segment in enumerate(spec.segments)
            if segment.group is not None
            for name in self.store.scalar_names()
        }

    def memory(self, i: int) -> Tensor:
        """(numel,) for shard i, of values that no shard has."""
        return torch.full((_SIZES[i],), float("nan"), dtype=self.dtype, device=self.suite.device)

    def copy_of(self, i: int) -> Tensor:
        self.store.prefetch(i)
        if self.store.swaps_in:
            out = self.memory(i)
            self.store.swap_in(i, out).wait()
            return out
        values = self.store.parameters(i).clone()
        self.store.release(i)
        return values

    def compare_parameters(self, exact: bool | None = None) -> None:
        exact = self.suite.exact if exact is None else exact
        for i, spec in enumerate(self.specs):
            found = self.copy_of(i)
            assert found.dtype == self.dtype and found.shape == (_SIZES[i],)
            self._compare(spec, found, rounded(self.whole[i], self.dtype), exact, "parameters")

    def compare_norm(self) -> None:
        expected = sum(float(sum_of_squares(g)) for g in self.gradients if g is not None)
        found = float(self.store.gradient_norm_squared())
        assert abs(found - expected) <= 1e-12 * expected, (found, expected)

    def compare_states(self) -> None:
        self.store.wait()
        for i, spec in enumerate(self.specs):
            self._compare(
                spec, self.store.read_state(i, "master", 0, _SIZES[i]), self.whole[i], self.suite.exact, "master"
            )
            for name in self.store.state_names()[1:]:
                expected = torch.zeros(_SIZES[i], device=self.suite.device)
                for segment, view in zip(spec.segments, self.views[i], strict=True):
                    if segment.group is not None and name in self.optimizer.state[view]:
                        expected[segment.start : segment.stop] = self.optimizer.state[view][name]
                found = self.store.read_state(i, name, 0, _SIZES[i])
                self._compare(spec, found, expected, self.suite.exact, name)

    def _compare(self, spec: ShardSpec, found: Tensor, expected: Tensor, exact: bool, what: str) -> None:
        tolerance = 0.0 if exact else self.suite.tolerance
        for segment in spec.segments:
            a, b = (t[segment.start : segment.stop].float().cpu() for t in (found, expected))
            where = f"{what} of {spec.name}.{segment.name}: "
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=where.__add__)
