"""Holds one unit's shard on the compute device, with the user's optimizer over its segments, for `DeviceStore`."""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..errors import StoreError
from ..memory import ElementBytes
from ..precision import fits, round_to, rounded, widen_scaled
from ..store import GroupStep, Segment, ShardSpec, StoreContext
from ..util.freed_memory import give_memory
from .contracts import over_segments
from .joint import members_of
from .single_parameter import begin_step, check_step, dress, is_number, number_like, number_of, packed, undress


class DeviceShard:
    """One unit's shard: master, parameter (the master itself in fp32), gradient, optimizer over its segments.

    `parameter` is None where it is rounded from the master each time it is lent.
    """

    def __init__(
        self, spec: ShardSpec, master: Tensor, optimizer: Optimizer, context: StoreContext, counts: Container[int]
    ) -> None:
        self.spec = spec
        self._given = optimizer
        self._optimizer_counts = counts
        self.master = master.detach().to(device=context.device, dtype=spec.master_dtype).contiguous()
        if self.master.untyped_storage().nbytes() != self.master.nbytes:  # sleep frees all of it
            self.master = self.master.clone()
        element = ElementBytes(spec.dtype, context.reduce_dtype, trained=spec.trained)
        self.parameter: Tensor | None = None if element.master else self.master
        # Whether the parameter exists only while it is lent.
        self._passing = bool(element.master) and context.keeps_parameters and context.shard_count > 1
        self.restored()
        self.reduce_dtype = context.reduce_dtype
        self.needs_scratch = element.widened > 0
        self.gradient: Tensor | None = None  # (numel,) reduce dtype, or fp32 once accumulated
        self._own = torch.empty(0, dtype=context.reduce_dtype, device=context.device)  # its memory between steps
        self.views = [
            dress(nn.Parameter(_in_shape(self.master, segment), requires_grad=segment.group is not None), segment.look)
            for segment in spec.segments
        ]
        self.optimizer = over_segments(optimizer, self.views, [s.group for s in spec.segments])
        # Whether a step may give a parameter other memory, by p.data = ...: torch's own never do.
        self._replaces = not all(type(each).__module__.startswith("torch.") for each in members_of(self.optimizer))
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
        """Returns master, gradient and states. Each is all of its storage."""
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
        """Rounds a parameter of its own from the master, which is there again."""
        if not self._passing:
            self.lend_parameter()

    def _refresh(self, start: int, stop: int) -> None:
        """Rounds the parameter again after elements [start, stop) of the master have changed."""
        if self.parameter is not None and self.parameter is not self.master:
            round_to(self.master[start:stop], self.parameter[start:stop])

    def _memory(self) -> Tensor:
        if self._own.numel() != self.spec.numel:
            self._own = self._own.new_empty(self.spec.numel)
        return self._own

    def lend(self) -> Tensor | None:
        """Lends the gradient's own memory. None: it holds a gradient, or is wider than the reduce dtype."""
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

    def held_gradient(self) -> Tensor:
        """Returns (numel,) of the reduce dtype, or fp32. Raises StoreError if there is no gradient."""
        if self.gradient is None:
            raise StoreError(
                f"unit {self.spec.name!r} has received no gradient since the last update: run a backward before "
                "reading or writing the gradient"
            )
        return self.gradient

    def write_gradient(self, start: int, values: Tensor) -> None:
        if not fits(values, self.held_gradient().dtype):
            self._widen()
        self.held_gradient()[start : start + values.numel()].copy_(values)

    def update(self, groups: Sequence[GroupStep], scale: float, steps: Sequence[int], scratch: Tensor) -> None:
        self.begin_update(groups, scale, steps, scratch)
        self.optimizer.step()
        self.end_update(groups, steps)

    def begin_update(
        self, groups: Sequence[GroupStep], scale: float, steps: Sequence[int], scratch: Tensor | None
    ) -> None:
        """Gives the segments that step their gradients. scratch: fp32 (numel,) or more; None: it is allocated."""
        gradient = self.held_gradient()
        if gradient.dtype != torch.float32:
            if scratch is None:
                scratch = torch.empty_like(gradient, dtype=torch.float32)
            gradient = widen_scaled(gradient, scale, scratch[: self.spec.numel])
        elif scale != 1.0:
            gradient.mul_(scale)
        for member in members_of(self.optimizer):
            for group in member.param_groups:
                begin_step(member, group, groups[group["zero_group"]].options)
        for k, step in enumerate(steps):
            if step:
                self._align_step(k, step)
        for segment, view, step in zip(self.spec.segments, self.views, steps, strict=True):
            if step:
                view.grad = _in_shape(gradient, segment)

    def still(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and views of segments that an optimizer has and that get no gradient in this step."""
        for segment, view in zip(self.spec.segments, self.views, strict=True):
            if segment.group is not None and view.grad is None:
                yield segment.name, view

    def end_update(self, groups: Sequence[GroupStep], steps: Sequence[int]) -> None:
        """Takes over the values of the optimizer's step, and consumes the gradient."""
        stepped = {s.group for s, step in zip(self.spec.segments, steps, strict=True) if step}
        for member in members_of(self.optimizer):
            for group in (each for each in member.param_groups if each["zero_group"] in stepped):
                check_step(member, group, groups[group["zero_group"]].options, f"unit {self.spec.name!r}")
        for segment, view in zip(self.spec.segments, self.views, strict=True) if self._replaces else ():
            undress(view, _in_shape(self.master, segment))
        for view in self.views:
            view.grad = None
        self.gradient = None
        self._refresh(0, self.spec.numel)

    def _align_step(self, k: int, step: int) -> None:
        """Sets torch's count in the state to the caller's, which is the right one after a checkpoint was loaded."""
        known, self._counts[k] = self._counts[k], step
        view = self.views[k]
        if step == 1 and self._made_at_first_step:
            for each in members_of(self.optimizer):
                each.state.pop(view, None)
            return
        if known == step - 1:
            return
        # Steps may have been counted while the optimizer had no state: before shard(), or by a checkpoint.
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

    def late_states(self, known: Container[str]) -> Iterator[tuple[str, str]]:
        """Yields names of segments and of their states that are not `known` from the optimizer's dry steps."""
        for segment, view in zip(self.spec.segments, self.views, strict=True):
            for name, value in self._state_of(view).items():
                if value is not None and name not in known:
                    yield segment.name, name

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
                        f"{name} of {segment.name} cannot be restored, because the optimizer keeps no such state with "
                        f"the options of param group {segment.group}: give the group the options it was saved with"
                    )

    def read_scalar(self, k: int, name: str) -> float | None:
        value = self._state_of(self.views[k]).get(name)
        return None if value is None else float(value)

    @torch.no_grad()
    def write_scalar(self, k: int, name: str, value: float) -> None:
        state = self._made_state(k, name)
        state[name] = number_like(value, state[name])

    def read_shaped(self, k: int, name: str, start: int, stop: int) -> Tensor:
        if (value := self._state_of(self.views[k]).get(name)) is None:
            return torch.zeros(stop - start, dtype=torch.float32, device=self.master.device)
        return packed(value).to(self.master.device).reshape(-1)[start:stop].clone()

    @torch.no_grad()
    def write_shaped(self, k: int, name: str, start: int, values: Tensor) -> None:
        state = self._made_state(k, name)
        if is_number(state[name]):
            state[name] = number_of(values, state[name])
        else:
            state[name].view(-1)[start : start + values.numel()].copy_(values)

    def _made_state(self, k: int, name: str) -> dict[str, Any]:
        """Returns segment k's state. Where the optimizer has none yet, a step makes it that changes nothing else."""
        view = self.views[k]
        if self._state_of(view).get(name) is None:
            kept, group = view.detach().clone(), self.spec.segments[k].group
            view.grad = torch.zeros_like(view)
            alone = over_segments(self._given, [view], [group])
            alone.step()
            for mine in members_of(self.optimizer):
                if any(each["zero_group"] == group for each in mine.param_groups):
                    mine.state[view] = alone.state[view]
            self._counts[k] = None
            view.grad = None
            undress(view, _in_shape(self.master, self.spec.segments[k]))
            view.data.copy_(kept)
            for value in self.optimizer.state[view].values():
                if isinstance(value, Tensor) and (value.shape == view.shape or value.dim()):
                    value.zero_()
        return self.optimizer.state[view]


def _in_shape(values: Tensor, segment: Segment) -> Tensor:
    """Returns the segment's part of `values`: (n,), or in the shape of the parameter or its rows if it is uncut."""
    part = values[segment.start : segment.stop]
    return part.view(segment.uncut_shape) if segment.uncut else part
