"""Drives a store beside plain tensors that take the same steps, for `ShardStoreSuite`. Imports no pytest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..precision import rounded, sum_of_squares
from ..store import GroupStep, Segment, ShardSpec, ShardStore, StoreContext

SIZES = (320, 1000, 64)  # elements of the three shards; not multiples of each other


def copied(store: ShardStore, i: int, out: Tensor) -> Tensor:
    """Copies shard i into `out`, by swap_in or by lending, whichever the store does."""
    if store.swaps_in:
        store.swap_in(i, out).wait()
        return out
    lent = store.parameters(i)
    assert lent.dtype == out.dtype and lent.shape == out.shape
    out.copy_(lent)
    store.release(i)
    return out


@contextmanager
def refused(*words: str, but: str) -> Iterator[None]:
    """Asserts that the block raises an error with these words. but: the failure's text if it does not raise."""
    try:
        yield
    except Exception as error:
        assert all(word in str(error) for word in words), error
    else:
        raise AssertionError(but)


class Trial(AbstractContextManager["Trial"]):
    """A store beside plain tensors which go through the same steps."""

    def __init__(self, suite: Any, dtype: torch.dtype, reduce_dtype: torch.dtype = torch.float32) -> None:
        self.suite, self.dtype, self.reduce_dtype = suite, dtype, reduce_dtype
        generator = torch.Generator().manual_seed(0)
        masters = [torch.randn(size, generator=generator).to(suite.device) for size in SIZES]
        segments = [
            (Segment(0, 96, 0, "a"), Segment(128, 320, 1, "b")),
            (Segment(0, 700, 1, "c"), Segment(704, 1000, None, "frozen")),
            (Segment(0, 64, 0, "d"),),
        ]
        self.specs = [ShardSpec(f"unit{i}", n, dtype, s) for i, (n, s) in enumerate(zip(SIZES, segments, strict=True))]
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
        self.gradients: list[Any] = [None] * len(SIZES)
        self.counts = [[0] * len(s) for s in segments]
        self.store = suite.make_store()
        context = StoreContext(suite.device, reduce_dtype=reduce_dtype)
        asked: list[int] = []

        def initial(i: int) -> Tensor:
            asked.append(i)
            return masters[i].clone()

        self.store.attach(self.specs, self.optimizer, initial, context=context)
        assert asked == list(range(len(SIZES))), "initial(i) is called once each, in order"

    def __exit__(self, *error: object) -> None:
        self.store.close()

    def _values(self, i: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 + 10 * seed + i)
        values = torch.randn(SIZES[i], generator=generator).to(self.reduce_dtype)
        inside = torch.zeros(SIZES[i], dtype=torch.bool)
        for segment in self.specs[i].segments:
            inside[segment.start : segment.stop] = segment.group is not None
        return (values * inside).to(self.suite.device)

    def give_gradients(
        self, seed: int, *, only: Sequence[int] = (0, 1, 2), lent: bool = False, poison: float | None = None
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
        self.gradients = [None] * len(SIZES)

    def discard(self, i: int, start: int, stop: int) -> None:
        self.store.discard_gradient(i, start, stop)
        self.gradients[i][start:stop] = 0.0

    def overwrite(self, i: int, start: int, stop: int, dtype: torch.dtype) -> None:
        """With values that `dtype` holds."""
        values = torch.linspace(-1.0, 2.0, stop - start, device=self.suite.device).to(dtype).float()
        self.store.write_gradient(i, start, values)
        self.gradients[i][start:stop] = values

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
        with refused("no gradient", but="a gradient was read where there is none"):
            self.store.read_gradient(0, 0, 96)
        with refused("no gradient", but="a gradient was written where there is none"):
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
        self.gradients = [None] * len(SIZES)
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
        return torch.full((SIZES[i],), float("nan"), dtype=self.dtype, device=self.suite.device)

    def copy_of(self, i: int) -> Tensor:
        self.store.prefetch(i)
        return copied(self.store, i, self.memory(i))

    def compare_parameters(self, exact: bool | None = None) -> None:
        exact = self.suite.exact if exact is None else exact
        for i, spec in enumerate(self.specs):
            found = self.copy_of(i)
            assert found.dtype == self.dtype and found.shape == (SIZES[i],)
            self._compare(spec, found, rounded(self.whole[i], self.dtype), exact, "parameters")

    def compare_norm(self) -> None:
        expected = sum(float(sum_of_squares(g)) for g in self.gradients if g is not None)
        found = float(self.store.gradient_norm_squared())
        assert abs(found - expected) <= 1e-12 * expected, (found, expected)

    def compare_states(self) -> None:
        self.store.wait()
        for i, spec in enumerate(self.specs):
            master = self.store.read_state(i, "master", 0, SIZES[i])
            self._compare(spec, master, self.whole[i], self.suite.exact, "master")
            for name in self.store.state_names()[1:]:
                expected = torch.zeros(SIZES[i], device=self.suite.device)
                for segment, view in zip(spec.segments, self.views[i], strict=True):
                    if segment.group is not None and name in self.optimizer.state[view]:
                        expected[segment.start : segment.stop] = self.optimizer.state[view][name]
                found = self.store.read_state(i, name, 0, SIZES[i])
                self._compare(spec, found, expected, self.suite.exact, name)

    def _compare(self, spec: ShardSpec, found: Tensor, expected: Tensor, exact: bool, what: str) -> None:
        tolerance = 0.0 if exact else self.suite.tolerance
        for segment in spec.segments:
            a, b = (t[segment.start : segment.stop].float().cpu() for t in (found, expected))
            where = f"{what} of {spec.name}.{segment.name}: "
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, msg=where.__add__)
