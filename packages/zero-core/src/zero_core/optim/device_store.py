"""Keeps every shard, gradient and optimizer state on the compute device (`DeviceStore`, the default store).

The user's optimizer class runs, one instance a unit, on one parameter per segment: views of the flat fp32 master.
Its options (fused, foreach, betas ...) are kept. One that steps its parameters together has one instance for all units.
Where the reduce dtype is 16-bit and nothing accumulates, fp32
gradients exist for one unit at a time; once a unit's gradients have accumulated, they are fp32 from the first on.
A 16-bit shard is kept beside its fp32 master. Not at stages 1 and 2: there the unsharded unit stays until the step, so
its shard is rounded from the master once a step, when it is asked for, and is freed when it has been gathered.
A shard that is not trained is its own master, whatever its dtype.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import StoreError, UnsupportedOptimizerError
from ..precision import sum_of_squares
from ..store import GroupStep, Initial, ShardSpec, ShardStore, StoreContext
from ..util.freed_memory import HostMemory, Keeper, SavedBytes, give_memory, take_memory
from .contracts import TOGETHER, contract_of, is_together, options_of, over_segments, own_attributes
from .device_shard import DeviceShard
from .joint import kind_of, members_of
from .single_parameter import plain_in
from .state_names import KeptStates, kept_states
from .uncut import named_shapes


class DeviceStore(ShardStore):
    """A `ShardStore` without tiers. Synchronous: `update` returns when the update is queued on the device's stream."""

    swaps_in = updates_later = asleep = False
    lends_masters = True

    def __init__(self) -> None:
        self._shards: list[DeviceShard] = []
        self._closed = False
        self._saved = SavedBytes()
        self._lent: set[int] = set()
        self._scratch = torch.empty(0, device="cpu")
        self._kept = KeptStates((), (), frozenset())
        self._together: Any = None  # the optimizer over all shards, if it steps their parameters together

    def attach(
        self, shards: Sequence[ShardSpec], optimizer: torch.optim.Optimizer, initial: Initial, *, context: StoreContext
    ) -> None:
        if self._shards or self._closed:
            raise StoreError("DeviceStore.attach called twice: make a new DeviceStore for each zero_core.shard")
        self._context, self._optimizer, self._kept = context, optimizer, kept_states(optimizer, context.device)
        master: Tensor | None = None  # one that no shard has yet
        try:
            for i, spec in enumerate(shards):
                master = initial(i)
                self._shards.append(self._made(spec, master))
                master = None
        except BaseException:
            if master is not None:
                context.rescue(len(self._shards), master)
            for i, shard in enumerate(self._shards):
                context.rescue(i, shard.master)
            self._shards.clear()
            raise
        self._join()
        widest = max((s.spec.numel for s in self._shards if s.needs_scratch), default=0)
        self._scratch = torch.empty(widest, dtype=torch.float32, device=context.device)

    def _made(self, spec: ShardSpec, master: Tensor) -> DeviceShard:
        return DeviceShard(spec, master, self._optimizer, self._context, self._kept.counts)

    def _join(self) -> None:
        """Let one optimizer step all shards, with the states that they have, if it steps parameters together."""
        if not is_together(self._optimizer):
            return
        both = [pair for shard in self._shards for pair in zip(shard.spec.segments, shard.views, strict=True)]
        both.sort(key=lambda pair: pair[0].position)  # in the order of the user's groups
        views, groups = [view for _, view in both], [segment.group for segment, _ in both]
        had, before = [shard.optimizer.state for shard in self._shards], self._together
        self._together = over_segments(self._optimizer, views, groups)
        for member, earlier in zip(members_of(self._together), members_of(before or self._together), strict=True):
            vars(member).update(own_attributes(earlier))
            mine = {p for group in member.param_groups for p in group["params"]}
            member.state.update({view: kept for state in had for view, kept in state.items() if view in mine})
        for shard in self._shards:
            shard.optimizer = self._together

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """No-op: `attach` takes any optimizer, or refuses it by name."""

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
            shard.gradient = None

    def discard_gradient(self, i: int, start: int, stop: int) -> None:
        if (gradient := self._shard(i).gradient) is not None:
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
        if self._together is not None:
            self._update_together(groups, scale, steps)
            return
        for i in order:
            if self._shards[i].gradient is None:
                continue
            with self._context.observer.span("update", self._shards[i].spec.name):
                self._shards[i].update(groups, scale, steps[i], self._scratch)

    def _update_together(self, groups: Sequence[GroupStep], scale: float, steps: Sequence[Sequence[int]]) -> None:
        ready = [(shard, steps[i]) for i, shard in enumerate(self._shards) if shard.gradient is not None]
        with self._context.observer.span("update", "all units"):
            for shard, counts in ready:
                shard.begin_update(groups, scale, counts, None)
            still = [(name, view, view.detach().clone()) for shard in self._shards for name, view in shard.still()]
            self._together.step()
            for shard, counts in ready:
                shard.end_update(groups, counts)
        if changed := [name for name, view, before in still if not torch.equal(view, before)]:
            raise UnsupportedOptimizerError(
                f"a step of optimizer {kind_of(self._optimizer)} changed parameter {changed[0]!r}, which had no "
                "gradient. This change does not reach the model. Parameters with a gradient were updated. Give each "
                "parameter a gradient, or use another optimizer"
            )
        for member in members_of(self._together):
            for group in member.param_groups if contract_of(member) == TOGETHER else ():
                written = plain_in(options_of(group).items())
                number = written.pop("zero_group")
                self._optimizer.param_groups[number].update(written)

    def late_state(self) -> tuple[str, str] | None:
        self._check()
        known = {*self.state_names(), *self._kept.scalars, *self._kept.shaped, "step"}
        return next((late for shard in self._shards for late in shard.late_states(known)), None)

    def wait(self) -> None:
        self._check()

    def state_names(self) -> tuple[str, ...]:
        return "master", *self._kept.tensors

    def read_state(self, i: int, name: str, start: int, stop: int) -> Tensor:
        return self._shard(i).read(self._known(name), start, stop)

    def write_state(self, i: int, name: str, start: int, values: Tensor) -> None:
        self._shard(i).write(self._known(name), start, values)

    def scalar_names(self) -> tuple[str, ...]:
        return self._kept.scalars

    def read_scalar(self, i: int, k: int, name: str) -> float | None:
        return self._shard(i).read_scalar(k, name)

    def write_scalar(self, i: int, k: int, name: str, value: float) -> None:
        self._shard(i).write_scalar(k, name, value)

    def state_shapes(self, group: int, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        named = named_shapes(self._optimizer, group, shape) if self._kept.shaped else None
        return {name: each for name, each in (named or {}).items() if name in self._kept.shaped}

    def read_shaped(self, i: int, k: int, name: str, start: int, stop: int) -> Tensor:
        return self._shard(i).read_shaped(k, name, start, stop)

    def write_shaped(self, i: int, k: int, name: str, start: int, values: Tensor) -> None:
        self._shard(i).write_shaped(k, name, start, values)

    def sleep(self, to: Keeper | None = None) -> None:
        """to: None is host memory, on a discrete device."""
        if self.asleep:
            return
        self._check()
        if not self._shards:
            raise StoreError("sleep() of a DeviceStore that is not attached yet: zero_core.shard does that")
        if self._lent:
            names = ", ".join(self._shards[i].spec.name for i in sorted(self._lent))
            raise StoreError(f"sleep() while units are in use ({names}): call zero_core.sleep(model), which frees them")
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
        """Call it when `values` are there again: computes the tensors that depend on them."""
        for shard in self._shards:
            shard.restored()

    # -- while another store takes the shards over -----------------------------------------------------------------

    def give_up(self, i: int) -> bool:
        self._shard(i).let_go()
        give_memory([self._scratch])
        return True

    def take_up(self, i: int) -> None:
        spec = self._shard(i).spec
        self._shards[i] = self._made(spec, torch.zeros(spec.numel, dtype=spec.master_dtype, device="cpu"))
        self._join()
        take_memory([self._scratch])

    def close(self) -> None:
        self._saved.free()
        self.asleep = False
        self._shards.clear()
        self._scratch = torch.empty(0, device="cpu")
        self._closed = True

    def _check(self) -> None:
        if self._closed:
            raise StoreError("the DeviceStore is closed: call the optimizer's close() after the last use of its model")
        if self.asleep:
            raise StoreError("the DeviceStore sleeps: call zero_core.wake(model), or wake() of the store")

    def _shard(self, i: int) -> DeviceShard:
        self._check()
        return self._shards[i]

    def _known(self, name: str) -> str:
        if name not in self.state_names():
            raise StoreError(f"no state {name!r}; this optimizer has {', '.join(self.state_names())}")
        return name
