"""`DeviceStore`: every shard, gradient and optimizer state stays on the compute device. The default store.

The user's optimizer class runs, one instance a unit, on one parameter per segment: views of the flat fp32 master.
Its options (fused, foreach, betas ...) are kept. Where the reduce dtype is 16-bit and nothing accumulates, fp32
gradients exist for one unit at a time; once a unit's gradients have accumulated, they are fp32 from the first on.
A 16-bit shard lies beside its fp32 master. Not at stages 1 and 2: there the unsharded unit stays until the step, so its
shard is rounded from the master when it is asked for, once a step, and is gone when it has been gathered.
A shard that is not trained is its own master, whatever its dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ..element_bytes import ElementBytes
from ..errors import StoreError, UnsupportedOptimizerError
from ..precision import fits, round_to, rounded, sum_of_squares, widen_scaled
from ..saved_bytes import HostMemory, Keeper, SavedBytes, give_memory, take_memory
from ..store import GroupStep, Segment, ShardSpec, StoreContext
from .elementwise import kept_states, over_segments
from .joint import members_of
from .uncut import named_shapes

__all__ = ["DeviceStore"]


class DeviceStore:
    """A `ShardStore` without tiers. Synchronous: `update` returns when the update is queued on the device's stream."""

    lends_masters = True  # see `LendsMasters`

    def __init__(self) -> None:
        self._shards: list[_Shard] = []
        self._closed = False
        self.asleep, self._saved = False, SavedBytes()
        self._lent: set[int] = set()
        self._scratch = torch.empty(0)
        self._counts: frozenset[int] = frozenset()  # groups in which the optimizer counts steps
        self._names: tuple[str, ...] = ()
        self._scalars: tuple[str, ...] = ()
        self._shaped: tuple[str, ...] = ()

    def attach(
        self,
        shards: Sequence[ShardSpec],
        optimizer: torch.optim.Optimizer,
        initial: Callable[[int], Tensor],
        *,
        context: StoreContext,
    ) -> None:
        if self._shards or self._closed:
            raise StoreError("DeviceStore.attach called twice: make a new DeviceStore for each zero_core.shard")
        kept = kept_states(optimizer, context.device)
        self._context, self._optimizer = context, optimizer
        self._names, self._scalars, self._counts = ("master", *kept.tensors), kept.scalars, kept.counts
        self._shaped = kept.shaped
        try:
            for i, spec in enumerate(shards):
                master = initial(i)
                try:
                    self._shards.append(self._made(spec, master))
                except BaseException:
                    context.rescue(i, master)
                    raise
        except BaseException:
            for i, shard in enumerate(self._shards):
                context.rescue(i, shard.master)
            self._shards.clear()
            raise
        widest = max((s.spec.numel for s in self._shards if s.needs_scratch), default=0)
        self._scratch = torch.empty(widest, dtype=torch.float32, device=context.device)

    def _made(self, spec: ShardSpec, master: Tensor) -> _Shard:
        return _Shard(spec, master, self._optimizer, self._context, counts=self._counts)

    def prefetch(self, i: int) -> None:
        self._check()

    def parameters(self, i: int) -> Tensor:
        lent = self._shard(i).lend_parameter()
        self._lent.add(i)
        return lent

    def release(self, i: int) -> None:
        self._shard(i).take_back_parameter()
        self._lent.discard(i)

    def gradient_buffer(self, i: int) -> Tensor | None:
        return self._shard(i).lend()

    def accept_gradient(self, i: int, gradient: Tensor) -> None:
        self._shard(i).accept(gradient)

    def discard_gradients(self) -> None:
        self._check()
        for shard in self._shards:
            shard.discard_gradient()

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        gradient = self._shard(i).gradient
        if gradient is not None:
            gradient[start:stop].zero_()

    def read_gradient(self, i: int, start: int, stop: int) -> Tensor:
        return self._shard(i).held_gradient()[start:stop].to(torch.float32, copy=True)

    @torch.no_grad()
    def write_gradient(self, i: int, start: int, values: Tensor) -> None:
        self._shard(i).write_gradient(start, values)

    def gradient_norm_squared(self) -> Tensor:
        self._check()
        total = torch.zeros((), dtype=torch.float64, device=self._context.device)
        for shard in self._shards:
            if shard.gradient is not None:
                total += sum_of_squares(shard.gradient)
        return total

    def update(
        self, groups: Sequence[GroupStep], scale: float, order: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> None:
        self._check()
        for i in order:
            if self._shards[i].gradient is None:
                continue
            with self._context.observer.span("update", self._shards[i].spec.name):
                self._shards[i].update(groups, scale, steps[i], self._scratch)

    def switch_options(self, group: int, before: Sequence[Mapping[str, Any]], what: str) -> None:
        """As `SwitchesOptions`. Probes the optimizer as `attach` does; states that it keeps now have zeros at first."""
        try:
            kept = kept_states(self._optimizer, self._context.device)
        except UnsupportedOptimizerError as error:
            raise UnsupportedOptimizerError(f"{what}. {error}") from error
        self._names = tuple(dict.fromkeys((*self._names, *kept.tensors)))
        self._scalars = tuple(dict.fromkeys((*self._scalars, *kept.scalars)))
        self._shaped = tuple(dict.fromkeys((*self._shaped, *kept.shaped)))

    def wait(self) -> None:
        self._check()

    def state_names(self) -> tuple[str, ...]:
        return self._names

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        return self._shard(i).read(self._known(name), start, stop)

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        self._shard(i).write(self._known(name), start, values)

    def scalar_names(self) -> tuple[str, ...]:
        return self._scalars

    def read_scalar(self, i: int, k: int, name: str) -> float | None:
        return self._shard(i).read_scalar(k, name)

    def write_scalar(self, i: int, k: int, name: str, value: float) -> None:
        self._shard(i).write_scalar(k, name, value)

    def state_shapes(self, group: int, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """As `ShapedStates`."""
        named = named_shapes(self._optimizer, group, shape) if self._shaped else None
        return {name: each for name, each in (named or {}).items() if name in self._shaped}

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        return self._shard(i).read_shaped(k, name, start, stop)

    def write_shaped(self, i: int, k: int, name: str, start: int, values: Tensor) -> None:
        self._shard(i).write_shaped(k, name, start, values)

    def sleep(self, to: Keeper | None = None) -> None:
        """As `Sleeps.sleep`. to: None is host memory, on a discrete device."""
        if self.asleep:
            return
        self._check()
        if not self._shards:
            raise StoreError("sleep() of a DeviceStore that is not attached yet: zero_core.shard does that")
        if self._lent:
            names = ", ".join(self._shards[i].spec.name for i in sorted(self._lent))
            raise StoreError(f"sleep() while {names} is in use: zero_core.sleep(model) gives units back first")
        if to is None and self._context.device.type == "cpu":
            raise StoreError(
                "sleep() of a DeviceStore in host memory has nowhere to put its bytes: give sleep(to=) a ByteStore, "
                "such as zero_nvme.Slab([path])"
            )
        values = self.values()
        try:
            self._saved.put(HostMemory() if to is None else to, values)
        except Exception as error:
            raise StoreError(
                f"sleep() could not put {sum(value.nbytes for value in values):,} bytes aside: {error}. Nothing is "
                "lost and the store is awake: make room, or give sleep(to=) another ByteStore"
            ) from error
        self.asleep = True
        self.let_go()

    def wake(self) -> None:
        """As `Sleeps.wake`."""
        if not self.asleep:
            self._check()
            return
        try:
            self.take_back()
            self._saved.take(self.values())
        except BaseException as error:
            self.let_go()
            if not isinstance(error, Exception):
                raise
            raise StoreError(
                f"wake() failed: {error}. The store still sleeps: call wake() again when the cause is gone; if its "
                "bytes cannot be read any more, close() it and resume from the last checkpoint"
            ) from error
        self.restored()
        self.asleep = False
        self._saved.free()

    # -- asleep: also for a store that keeps one of these inside ---------------------------------------------------

    def values(self) -> list[Tensor]:
        """Every tensor whose values cannot be computed from another, in a fixed order."""
        return [value for shard in self._shards for value in shard.values()]

    def let_go(self) -> None:
        """Free the memory of everything. The tensors stay, and so do views of them."""
        for shard in self._shards:
            shard.let_go()
        give_memory([self._scratch])

    def take_back(self) -> None:
        """Allocate it again. The contents are undefined."""
        for shard in self._shards:
            take_memory(shard.values())
        take_memory([self._scratch])

    def restored(self) -> None:
        """`values` are there again, and what is computed from them follows."""
        for shard in self._shards:
            shard.restored()

    # -- while another store takes the shards over -----------------------------------------------------------------

    def give_up(self, i: int) -> bool:
        """As `GivesUp.give_up`."""
        self._shard(i).let_go()
        give_memory([self._scratch])
        return True

    def take_up(self, i: int) -> None:
        """As `GivesUp.take_up`."""
        spec = self._shard(i).spec
        self._shards[i] = self._made(spec, torch.zeros(spec.numel, dtype=spec.master_dtype))
        take_memory([self._scratch])

    def close(self) -> None:
        self._saved.free()
        self.asleep = False
        self._shards.clear()
        self._scratch = torch.empty(0)
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise StoreError("the DeviceStore is closed: its optimizer's close() was called")
        if self.asleep:
            raise StoreError("the DeviceStore sleeps: call zero_core.wake(model), or wake() of the store")

    def _shard(self, i: int) -> _Shard:
        self._check()
        return self._shards[i]

    def _known(self, name: str) -> str:
        if name not in self._names:
            raise StoreError(f"no state {name!r}; this optimizer has {', '.join(self._names)}")
        return name


class _Shard:
    """One unit's shard: master, parameter (the master itself in fp32), gradient, optimizer over its segments.

    `parameter` is None where it is rounded from the master each time it is lent.
    """

    def __init__(
        self,
        spec: ShardSpec,
        master: Tensor,
        optimizer: torch.optim.Optimizer,
        context: StoreContext,
        *,
        counts: frozenset[int],
    ) -> None:
        self.spec = spec
        self._optimizer_counts = counts
        self.master = master.detach().to(device=context.device, dtype=spec.master_dtype).contiguous()
        if self.master.untyped_storage().nbytes() != self.master.nbytes:  # sleep frees all of it
            self.master = self.master.clone()
        self.parameter: Tensor | None = self.master
        self._passing = False  # the parameter exists only while it is lent
        element = ElementBytes(spec.dtype, context.reduce_dtype, trained=spec.trained)
        if element.master:
            self._passing, self.parameter = context.keeps_parameters and context.shard_count > 1, None
            if not self._passing:
                self.lend_parameter()
        self.reduce_dtype = context.reduce_dtype
        self.needs_scratch = element.widened > 0
        self.gradient: Tensor | None = None  # (numel,) reduce dtype, or fp32 once accumulated
        self._own = torch.empty(0, dtype=context.reduce_dtype, device=context.device)  # its memory between steps
        self.views = [
            nn.Parameter(_in_shape(self.master, segment), requires_grad=segment.group is not None)
            for segment in spec.segments
        ]
        self.optimizer = over_segments(optimizer, self.views, [s.group for s in spec.segments])
        self._made_at_first_step = not self.optimizer.state  # Adagrad makes its state when it is built
        # The optimizer's own count of each segment, where known: to read its tensor would wait for the device.
        self._counts: list[int | None] = [None] * len(self.views)

    def lend_parameter(self) -> Tensor:
        if self.parameter is None:
            self.parameter = rounded(self.master, self.spec.dtype)
        return self.parameter

    def take_back_parameter(self) -> None:
        if self._passing:
            self.parameter = None

    def values(self) -> list[Tensor]:
        """Master, gradient and states. Each is all of its storage."""
        kept = [
            value
            for view in self.views
            for value in self._state_of(view).values()
            if isinstance(value, Tensor) and (value.shape == view.shape or value.dim())  # not the step's count
        ]
        return [self.master, *([] if self.gradient is None else [self.gradient]), *kept]

    def let_go(self) -> None:
        give_memory(self.values())
        if self.gradient is None:
            self._own = self._own.new_empty(0)
        if self.parameter is not self.master:
            self.parameter = None

    def restored(self) -> None:
        """The master is there again; a parameter beside it is rounded from it."""
        if not self._passing:
            self.lend_parameter()

    def _refresh(self, start: int, stop: int) -> None:
        """Elements [start, stop) of the master have changed."""
        if self.parameter is not None and self.parameter is not self.master:
            round_to(self.master[start:stop], self.parameter[start:stop])

    def _memory(self) -> Tensor:
        if self._own.numel() != self.spec.numel:
            self._own = self._own.new_empty(self.spec.numel)
        return self._own

    def lend(self) -> Tensor | None:
        """The gradient's own memory while it is free; nothing once a gradient is there, or is wider than reduced."""
        return self._memory() if self.gradient is None and self._own.dtype == self.reduce_dtype else None

    def accept(self, gradient: Tensor) -> None:
        if self.gradient is None:
            self.gradient = self._memory()
            if gradient is not self.gradient:
                self.gradient.copy_(gradient)
            return
        self._widen()
        self.gradient.add_(gradient)

    def _widen(self) -> None:
        if self.gradient is not None and self.gradient.dtype != torch.float32:
            self._own = self.gradient = self.gradient.float()

    def discard_gradient(self) -> None:
        self.gradient = None

    def held_gradient(self) -> Tensor:
        """(numel,) reduce dtype, or fp32. Raises StoreError if there is none."""
        if self.gradient is None:
            raise StoreError(
                f"no gradient of {self.spec.name} was accepted since the last update, so there is none to read or "
                "write: run a backward first"
            )
        return self.gradient

    def write_gradient(self, start: int, values: Tensor) -> None:
        if not fits(values, self.held_gradient().dtype):
            self._widen()
        self.held_gradient()[start : start + values.numel()].copy_(values)

    def update(self, groups: Sequence[GroupStep], scale: float, steps: Sequence[int], scratch: Tensor) -> None:
        assert self.gradient is not None
        gradient = self.gradient
        if gradient.dtype != torch.float32:
            gradient = widen_scaled(gradient, scale, scratch[: self.spec.numel])
        elif scale != 1.0:
            gradient.mul_(scale)
        for group in self.optimizer.param_groups:
            options = groups[group["zero_group"]].options
            group.update({k: v for k, v in options.items() if k != "params"})
        for k, step in enumerate(steps):
            if step:
                self._align_step(k, step)
        for segment, view, step in zip(self.spec.segments, self.views, steps, strict=True):
            if step:
                view.grad = _in_shape(gradient, segment)
        self.optimizer.step()
        for view in self.views:
            view.grad = None
        self.gradient = None
        self._refresh(0, self.spec.numel)

    def _align_step(self, k: int, step: int) -> None:
        """torch counts steps in the state; after a checkpoint was loaded the caller's count is the right one."""
        known, self._counts[k] = self._counts[k], step
        view = self.views[k]
        if step == 1 and self._made_at_first_step:
            for each in members_of(self.optimizer):
                each.state.pop(view, None)
            return
        if known == step - 1:
            return
        # Steps may have been counted without a state of the optimizer's: before shard(), or by a checkpoint.
        counted = self.spec.segments[k].group in self._optimizer_counts
        state = self._made_state(k, "step") if step > 1 and counted else self._state_of(view)
        self._counts[k] = step
        count = state.get("step")
        if isinstance(count, Tensor):
            count.fill_(step - 1)
        elif count is not None:
            state["step"] = step - 1

    def _state_of(self, view: nn.Parameter) -> dict[str, Any]:
        return self.optimizer.state[view] if view in self.optimizer.state else {}

    def read(self, name: str, start: int, stop: int) -> Tensor:
        if name == "master":
            return self.master[start:stop].clone()
        values = torch.zeros(stop - start, dtype=torch.float32, device=self.master.device)
        for segment, view in zip(self.spec.segments, self.views, strict=True):
            low, high = max(start, segment.start), min(stop, segment.stop)
            state = self._state_of(view).get(name)
            if low < high and state is not None:
                values[low - start : high - start] = state.view(-1)[low - segment.start : high - segment.start]
        return values

    @torch.no_grad()
    def write(self, name: str, start: int, values: Tensor) -> None:
        stop = start + values.numel()
        if name == "master":
            self.master[start:stop].copy_(values)
            self._refresh(start, stop)
            return
        for k, segment in enumerate(self.spec.segments):
            low, high = max(start, segment.start), min(stop, segment.stop)
            if low < high and segment.group is not None:
                state, part = self._made_state(k, name).get(name), values[low - start : high - start]
                if state is not None:
                    state.view(-1)[low - segment.start : high - segment.start].copy_(part)
                elif bool(part.any()):
                    raise StoreError(
                        f"{name} of {segment.name} is written, which the optimizer does not keep with the options of "
                        f"group {segment.group}: give the group the options with which the values were saved"
                    )

    def read_scalar(self, k: int, name: str) -> float | None:
        value = self._state_of(self.views[k]).get(name)
        return None if value is None else float(value)

    @torch.no_grad()
    def write_scalar(self, k: int, name: str, value: float) -> None:
        state = self._made_state(k, name)
        if isinstance(state[name], Tensor):
            state[name].fill_(value)
        else:
            state[name] = type(state[name])(value)

    def read_shaped(self, k: int, name: str, start: int, stop: int) -> Tensor:
        value = self._state_of(self.views[k]).get(name)
        if value is None:
            return torch.zeros(stop - start, dtype=torch.float32, device=self.master.device)
        found: Tensor = value.view(-1)[start:stop].clone()
        return found

    @torch.no_grad()
    def write_shaped(self, k: int, name: str, start: int, values: Tensor) -> None:
        self._made_state(k, name)[name].view(-1)[start : start + values.numel()].copy_(values)

    def _made_state(self, k: int, name: str) -> dict[str, Any]:
        """Segment k's state, made by a step that changes nothing else where the optimizer has none yet."""
        view = self.views[k]
        if self._state_of(view).get(name) is None:
            kept = view.detach().clone()
            view.grad = torch.zeros_like(view)
            self.optimizer.step()  # no other view has a gradient outside update()
            self._counts[k] = None
            view.grad = None
            view.data.copy_(kept)
            for value in self.optimizer.state[view].values():
                if isinstance(value, Tensor) and (value.shape == view.shape or value.dim()):
                    value.zero_()
        return self.optimizer.state[view]


def _in_shape(values: Tensor, segment: Segment) -> Tensor:
    """The segment's part of `values`: (n,), or in the shape of the parameter if it is uncut."""
    part = values[segment.start : segment.stop]
    return part.view(segment.shape) if segment.uncut and segment.shape is not None else part
