"""Ships conformance suites for `ByteStore` and `UpdateStep`, to subclass, as `zero_offload.testing`.

Owns no pytest configuration: a subclass named `Test...` with the fixture method overridden is all it takes, and an
implementation narrows the suite only by `pytest.mark.xfail(reason=...)` on an overridden test.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import torch
from torch import Tensor

from ..protocols import ByteStore, TileView, UpdateSegment, UpdateStep


class ByteStoreSuite:
    """Tests of behaviour that every ByteStore must have. Override `make_store`."""

    def make_store(self) -> ByteStore:
        """Returns a new store; every test closes its own. Override it."""
        raise NotImplementedError

    def test_bytes_come_back(self) -> None:
        with closing(self.make_store()) as store:
            store.reserve(3 << 20)
            extents = [store.allocate(1 << 20) for _ in range(3)]
            sent = [torch.randint(0, 256, (1 << 20,), dtype=torch.uint8) for _ in extents]
            for ticket in [store.write(e, s) for e, s in zip(extents, sent, strict=True)]:
                ticket.wait()
            back = [torch.zeros(1 << 20, dtype=torch.uint8) for _ in extents]
            tickets = [store.read(e, b) for e, b in zip(extents, back, strict=True)]
            for ticket in tickets:
                ticket.wait()
                assert ticket.done()
            assert all(torch.equal(s, b) for s, b in zip(sent, back, strict=True))

    def test_a_range_of_an_extent(self) -> None:
        with closing(self.make_store()) as store:
            extent = store.allocate(8 * store.alignment)
            store.write(extent, torch.zeros(8 * store.alignment, dtype=torch.uint8)).wait()
            middle = torch.full((2 * store.alignment,), 7, dtype=torch.uint8)
            store.write(extent, middle, 3 * store.alignment).wait()
            whole = torch.ones(8 * store.alignment, dtype=torch.uint8)
            store.read(extent, whole).wait()
            assert whole.nonzero().flatten().tolist() == list(range(3 * store.alignment, 5 * store.alignment))

    def test_tensors_of_any_dtype_and_buffers(self) -> None:
        with closing(self.make_store()) as store:
            extent = store.allocate(store.alignment)
            values = torch.arange(store.alignment // 4, dtype=torch.float32)
            store.write(extent, values).wait()
            buffer = bytearray(store.alignment)
            store.read(extent, buffer).wait()
            assert torch.equal(torch.frombuffer(buffer, dtype=torch.float32), values)

    def test_extents_do_not_overlap_and_are_aligned(self) -> None:
        with closing(self.make_store()) as store:
            extents = [store.allocate(size) for size in (1, store.alignment, store.alignment + 1, 100_000)]
            ranges = sorted((e.offset_bytes, e.offset_bytes + e.nbytes) for e in extents)
            assert all(start % store.alignment == 0 for start, _ in ranges)
            assert all(a[1] <= b[0] for a, b in zip(ranges, ranges[1:], strict=False))

    def test_a_freed_extent_makes_room(self) -> None:
        with closing(self.make_store()) as store:
            store.reserve(4 * store.alignment)
            for _ in range(20):
                extent = store.allocate(3 * store.alignment)
                store.write(extent, torch.ones(3 * store.alignment, dtype=torch.uint8)).wait()
                store.free(extent)

    def test_beyond_the_extent_is_refused(self) -> None:
        with closing(self.make_store()) as store:
            extent = store.allocate(store.alignment)
            too_much = torch.zeros(2 * store.alignment, dtype=torch.uint8)
            for request in (store.read, store.write):
                try:
                    request(extent, too_much).wait()
                except (ValueError, OSError):
                    continue
                raise AssertionError("a transfer beyond its extent succeeded")

    def test_from_several_threads(self) -> None:
        with closing(self.make_store()) as store, ThreadPoolExecutor(3) as threads:
            together = threading.Barrier(3)

            def work(number: int) -> None:
                together.wait()
                extent = store.allocate(1 << 18)
                for round_ in range(5):
                    sent = torch.full((1 << 18,), number * 10 + round_, dtype=torch.uint8)
                    store.write(extent, sent).wait()
                    back = torch.zeros_like(sent)
                    store.read(extent, back).wait()
                    assert torch.equal(sent, back)

            list(threads.map(work, range(3)))

    def test_close_twice(self) -> None:
        store = self.make_store()
        store.close()
        store.close()


class UpdateStepSuite:
    """Tests of behaviour that every UpdateStep must have. Override `make_step`, and `optimizer` if it lacks AdamW.

    The distance to torch's own optimizer is bounded, not zero, because implementations choose the order of operations.
    """

    numel = 3000

    def make_step(self) -> UpdateStep:
        """Returns a new step, not bound yet. Override it."""
        raise NotImplementedError

    def optimizer(self, parameters: Sequence[torch.nn.Parameter]) -> torch.optim.Optimizer:
        """Returns the torch optimizer whose values the step must reach. Override it for another one."""
        return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)

    def _bound(self) -> tuple[UpdateStep, torch.optim.Optimizer, dict[str, Any], Tensor]:
        """A step, the optimizer that it follows, the options of that, and a copy of its only parameter."""
        parameter = torch.nn.Parameter(self._gradient(self.numel, 1))
        optimizer, step = self.optimizer([parameter]), self.make_step()
        step.bind(optimizer)
        options = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
        return step, optimizer, options, parameter.detach().clone()

    def _tile(self, step: UpdateStep, dtype: torch.dtype, master: Tensor, gradient: Tensor | None = None) -> TileView:
        numel = master.numel()
        states = {f.name: torch.zeros(f.numel, dtype=f.dtype) for f in step.layout(numel, dtype)}
        tile = TileView(states, torch.zeros(numel, dtype=dtype), torch.zeros(numel) if gradient is None else gradient)
        step.initialise(tile, master)
        return tile

    @staticmethod
    def _gradient(numel: int, seed: int) -> Tensor:
        return torch.randn(numel, generator=torch.Generator().manual_seed(seed))

    def test_follows_torch(self) -> None:
        step, optimizer, options, master = self._bound()
        tile, [parameter] = self._tile(step, torch.float32, master), optimizer.param_groups[0]["params"]
        for number in range(1, 6):
            gradient = self._gradient(self.numel, number)
            changed = {**options, "lr": options["lr"] / number}
            segment = UpdateSegment(0, self.numel, changed, number)
            step.update(TileView(tile.states, tile.parameter, gradient), [segment], 0.5)
            parameter.grad = gradient * 0.5
            optimizer.param_groups[0].update(changed)
            optimizer.step()
        assert torch.allclose(step.read(tile, "master"), parameter.detach(), rtol=1e-5, atol=1e-6)

    def test_master_survives_a_round_trip(self) -> None:
        step, _, _, master = self._bound()
        for dtype in (torch.float32, torch.bfloat16):
            tile = self._tile(step, dtype, master)
            assert torch.equal(step.read(tile, "master"), master)
            other = self._gradient(self.numel, 9)
            step.write(tile, "master", other)
            assert torch.equal(step.read(tile, "master"), other)
            assert torch.allclose(tile.parameter.float(), other, rtol=2**-8)

    def test_ties_round_away(self) -> None:
        step, *_ = self._bound()
        ties = torch.tensor([1 + 2**-8, -(1 + 2**-8), 1 + 3 * 2**-8, 0.0], dtype=torch.float32)
        tile = self._tile(step, torch.bfloat16, ties)
        assert tile.parameter.tolist() == [1 + 2**-7, -(1 + 2**-7), 1 + 2**-6, 0.0]

    def test_states_survive_a_round_trip(self) -> None:
        step, _, _, master = self._bound()
        tile = self._tile(step, torch.bfloat16, master)
        for number, name in enumerate(step.state_names()):
            assert torch.equal(step.read(tile, name), torch.zeros(self.numel))
            values = self._gradient(self.numel, number).abs()
            step.write(tile, name, values)
            assert torch.allclose(step.read(tile, name), values, rtol=0.05, atol=0.02)

    def test_elements_outside_segments_keep_their_bits(self) -> None:
        step, _, options, master = self._bound()
        tile = self._tile(step, torch.bfloat16, master, self._gradient(self.numel, 2))
        segments = [UpdateSegment(256, 512, options, 1), UpdateSegment(1024, 1280, options, 3)]
        step.update(tile, segments, 1.0)
        moved = step.read(tile, "master") != master
        assert moved[256:512].any() and moved[1024:1280].any()
        moved[256:512] = moved[1024:1280] = False
        assert not moved.any()

    def test_cuts_do_not_change_bits(self) -> None:
        step, _, options, master = self._bound()
        gradient = self._gradient(self.numel, 4)
        whole = self._tile(step, torch.bfloat16, master, gradient)
        step.update(whole, [UpdateSegment(0, self.numel, options, 1)], 0.25)
        cut = self._tile(step, torch.bfloat16, master, gradient)
        step.update(cut, [UpdateSegment(0, 1024, options, 1), UpdateSegment(1024, self.numel, options, 1)], 0.25)
        assert torch.equal(step.read(whole, "master"), step.read(cut, "master"))

    def test_layouts_agree_on_the_parameter(self) -> None:
        """A 16-bit gradient is the same value as its fp32 form."""
        step, _, options, master = self._bound()
        gradient = self._gradient(self.numel, 5).to(torch.bfloat16)
        masters = []
        for form in (gradient, gradient.float()):
            tile = self._tile(step, torch.bfloat16, master, form)
            step.update(tile, [UpdateSegment(0, self.numel, options, 1)], 1.0)
            masters.append(step.read(tile, "master"))
        assert torch.equal(masters[0], masters[1])

    def test_norm_and_accumulate(self) -> None:
        step, *_ = self._bound()
        values = self._gradient(self.numel, 6)
        [norm_squared] = step.chunk_norms_squared(values)
        assert math.isclose(norm_squared, float(values.double().square().sum()), rel_tol=1e-12)
        for bad in (math.inf, math.nan):
            spoiled = values.clone()
            spoiled[17] = bad
            assert not math.isfinite(sum(step.chunk_norms_squared(spoiled)))
        into = values.clone()
        step.accumulate(into, values.to(torch.bfloat16))
        assert torch.equal(into, values + values.to(torch.bfloat16).float())

    def test_unknown_optimizer_is_refused_by_name(self) -> None:
        step = self.make_step()
        try:
            step.bind(torch.optim.Rprop([torch.nn.Parameter(torch.zeros(1))]))
        except TypeError as error:
            assert "Rprop" in str(error)
        else:
            raise AssertionError("an optimizer without a kernel was accepted")
