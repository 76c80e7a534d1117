"""Updates tiles for optimizers that need some parameters whole, as torch.optim.Muon does.

Owns their states, and their update by the optimizer's own class. Not here: other parameters (in the step given).

[Note: uncut tiles]
A parameter that the optimizer needs whole is a tile of its own, however large, and its record has the optimizer's
states of it, each in its own shape:

    | remainder int16, of a bf16 parameter | momentum_buffer fp32 |                                                 Muon
    | remainder int16, of a bf16 parameter | exp_avg fp32 | exp_avg_sq fp32 | left fp32 | right fp32 | ...          SOAP

An update gives the optimizer's class one parameter, over the tile's master, with these states. So its results equal the
optimizer's own, bit for bit, wherever the tile is kept. It runs on the device that has the tile: see
`device_link.py`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from . import core
from .core import JointOptimizer, Segment, UnsupportedOptimizerError, kind_of
from .core import single_parameter as by_itself
from .errors import PlacementError
from .protocols import ENDED, Field, Started, StartingStep, TileView, UpdateSegment, UpdateStep
from .torch_step import TorchStep, master_fields, pieces_of

# Peak bytes of Muon's update of a matrix, as torch's profiler counts them. Per element: the weighted momentum (fp32),
# and three copies of the matrix that is orthogonalised (bf16). Beside them two squares of the smaller side (bf16).
MUON_BYTES, MUON_SQUARE_BYTES = 10, 4
TILE_BYTES = 8  # per element, beside these: the gradient, and the master of a bf16 parameter
# Bytes of the pieces in which a master is joined and split, and of an update's small workspaces. oneDNN takes 1.2 MiB
# for bf16 products of 768 x 768 where the CPU has no bf16 arithmetic.
_REST_BYTES = 2 << 20


def step_for(optimizer: torch.optim.Optimizer, step: UpdateStep, *, by_itself: bool = True) -> UpdateStep:
    """Binds `step`, or an `UncutStep` around it, so that it runs all of `optimizer`. Raises as `UpdateStep.bind`.

    by_itself: where an optimizer is elementwise by its contract and `step` cannot run it, its own class steps each
    parameter by itself, with states in fp32. Its contract is "by itself" from then on, so call this before `shard`.
    """
    if (why := core.apart(optimizer)) is not None:
        raise TypeError(why)
    for member in core.members_of(optimizer) if by_itself else ():
        if core.contract_of(member) == core.ELEMENTWISE and getattr(step, "layout_name", None) in ("fp32", "split"):
            try:
                step.bind(member)
            except (TypeError, ValueError):
                core.declare(member, core.BY_ITSELF)
    if not isinstance(step, UncutStep) and (core.uncut_groups(optimizer) or len(core.members_of(optimizer)) > 1):
        step = UncutStep(step)
    step.bind(optimizer)
    return step


def visiting_step(step: UpdateStep, optimizer: torch.optim.Optimizer) -> TorchStep:
    """The step of tiles that are not uncut on a discrete device, bound. Raises PlacementError where there is none."""
    if isinstance(step, UncutStep):
        optimizer = step.elementwise or optimizer
        step = step.step
    try:
        there = TorchStep(getattr(step, "layout_name", ""))
        there.bind(optimizer)
    except (TypeError, ValueError) as error:
        raise PlacementError(
            f"update_share is for AdamW, Adam and SGD of torch.optim with states in fp32 ({error}): leave it out"
        ) from error
    return there


def names_of(step: UpdateStep, segment: Segment) -> tuple[str, ...]:
    """Names of the states of this segment that have one value per element."""
    return step.names_of(segment) if isinstance(step, UncutStep) else tuple(step.state_names())


def shapes_of(step: UpdateStep, segment: Segment) -> Mapping[str, tuple[int, ...]]:
    """Names and shapes of the states whose shape is not the parameter's."""
    if not (segment.uncut and isinstance(step, UncutStep)) or segment.group is None:
        return {}
    return step.state_shapes(segment.group, segment.uncut_shape)


def flop_of(step: UpdateStep, segment: Segment) -> tuple[int, torch.dtype]:
    """FLOP of the matrix products in an update of this segment, and their dtype. 0 for segments that may be cut."""
    if not (segment.uncut and isinstance(step, UncutStep)) or segment.group is None:
        return 0, torch.float32
    return step.update_flop(segment.group, segment.uncut_shape)


class UncutStep:
    """An `UpdateStep` that also runs parameters which the optimizer needs whole: `zero_core.store.Segment.uncut`.

    Each is a tile of its own, whose `uncut` is the segment; other tiles have None. `update` gets one segment then, and
    the elements behind it in the tile are padding. If the compute device is a discrete one, `start` is not called for
    such a tile: `update` gets its tensors on the device, with a stream of its own as the current stream, also while
    tiles that were started are under way. `initialise`, `read` and `write` get its tensors on its tier.

    `step` runs all other tiles: it is bound to the one elementwise member of the optimizer.
    """

    def __init__(self, step: UpdateStep) -> None:
        self.step, self.accumulate, self.chunk_norms_squared = step, step.accumulate, step.chunk_norms_squared
        self._plain = TorchStep()  # stores the masters of uncut tiles
        self.elementwise: Any = None  # the optimizer's elementwise member, whose parameters may be cut; None: no such
        self._optimizer: Any = None
        self._kept: dict[int, core.KeptStates] = {}  # by the first group of each member that needs parameters whole
        self._first: list[int] = []  # by group, the first group of its member
        self._groups: dict[int, int] = {}  # id of a parameter that is needed whole -> its group
        self._running: dict[int, Any] = {}  # by group, the optimizer's class over one parameter
        self._states: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}  # as `state_of`, by group and shape

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """As UpdateStep.bind. Raises TypeError where two members are elementwise, which one step cannot run."""
        self._optimizer, self._kept, self._running, self._states = optimizer, {}, {}, {}
        self._groups = core.uncut_groups(optimizer)
        self._first = [first for member, first in core.placed(optimizer) for _ in member.param_groups]
        uncut, elementwise = set(self._groups.values()), []
        for member, first in core.placed(optimizer):
            if uncut.intersection(range(first, first + len(member.param_groups))):
                _refuse_mixed(member)
                self._kept[first] = core.kept_states(member, torch.device("cpu"))
            else:
                elementwise.append(member)
        if len(elementwise) > 1:
            raise TypeError(
                f"{kind_of(JointOptimizer(*elementwise))} cannot be updated on tiers together, which take one "
                "elementwise optimizer. Merge the elementwise ones into one, with a group for each rate. Or pass "
                'optimizer_contract="by itself" to zero_core.shard'
            )
        self.elementwise = elementwise[0] if elementwise else None
        if elementwise:
            self.step.bind(elementwise[0])
            shaped = (name for kept in self._kept.values() for name in kept.shaped)
            core.refuse_one_name(self.step.state_names(), shaped)

    def uncut_group(self, parameter: Tensor) -> int | None:
        """The index of the group of a parameter that the optimizer needs whole; None for any other parameter."""
        return self._groups.get(id(parameter))

    def layout(self, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        return self.step.layout(numel, parameter_dtype) if self.elementwise is not None else ()

    def uncut_layout(self, segment: Segment, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        """The state fields of an uncut tile of `numel` elements, the segment and the padding behind it. A field may
        have any number of elements."""
        return (
            *master_fields(numel, parameter_dtype),
            *(Field(name, torch.float32, numel) for name in self.names_of(segment)),
            *(Field(name, torch.float32, math.prod(shape)) for name, shape in shapes_of(self, segment).items()),
        )

    def scratch_bytes(self, group: int, shape: tuple[int, ...]) -> int:
        """Bytes that an update of an uncut parameter of `shape` in this group needs beside the tile, in host memory or
        on a discrete device. Counts the optimizer's own `scratch_bytes`, or Muon's if it has none."""
        member, number = core.member_of(self._optimizer, group)
        if (told := getattr(member, "scratch_bytes", None)) is not None:
            own = told(member.param_groups[number], shape)
        else:
            own = MUON_BYTES * math.prod(shape) + MUON_SQUARE_BYTES * min(shape, default=1) ** 2
        split = math.prod(shape)  # a byte of each when the master is split
        return TILE_BYTES * math.prod(shape) + max(own, split) + _REST_BYTES

    def update_flop(self, group: int, shape: tuple[int, ...]) -> tuple[int, torch.dtype]:
        """As `flop_of`: the optimizer's own `step_flop`, or Muon's count for Muon, or 0."""
        member, number = core.member_of(self._optimizer, group)
        options = member.param_groups[number]
        if (told := getattr(member, "step_flop", None)) is not None:
            flop: tuple[int, torch.dtype] = told(options, shape)
            return flop
        return core.schulz_flop(shape, options["ns_steps"]) if core.is_muon(member) else 0, torch.bfloat16

    def state_shapes(self, group: int, shape: tuple[int, ...]) -> Mapping[str, tuple[int, ...]]:
        """Names and shapes of the states of an uncut parameter in this group whose shape is not its own `shape`.

        Each is a field of that name and as many elements, for `read` and `write`. `state_names` has none of them.
        """
        kept = self._kept.get(self._first[group])
        if kept is None or not kept.shaped:
            return {}
        found = self._states_of(group, shape).items()
        return {
            name: by_itself.packed_shape(value) for name, value in found if name in kept.shaped and value is not None
        }

    def _states_of(self, group: int, shape: tuple[int, ...]) -> dict[str, Any]:
        """The first result of `state_of`: an update may run after options have changed."""
        if (group, shape) not in self._states:
            self._states[group, shape] = by_itself.state_of(self._optimizer, group, shape)
        return self._states[group, shape]

    def state_names(self) -> tuple[str, ...]:
        names = [name for kept in self._kept.values() for name in kept.tensors]
        return tuple(dict.fromkeys((*(self.step.state_names() if self.elementwise is not None else ()), *names)))

    def names_of(self, segment: Segment) -> tuple[str, ...]:
        """Those of `state_names` that this segment has, uncut or not."""
        if not segment.uncut or segment.group is None:
            return tuple(self.step.state_names()) if self.elementwise is not None else ()
        found = self._states_of(segment.group, segment.uncut_shape)
        return tuple(n for n in self._kept[self._first[segment.group]].tensors if found.get(n) is not None)

    def initialise(self, tile: TileView, master: Tensor) -> None:
        if tile.uncut is None:
            self.step.initialise(tile, master)
            return
        self._plain.initialise(tile, master)
        for name in tile.states.keys() - {"master", "remainder"}:
            tile.states[name].zero_()

    def update(self, tile: TileView, segments: Sequence[UpdateSegment], scale: float) -> None:
        segment = tile.uncut
        if segment is None:
            self.step.update(tile, segments, scale)
            return
        (moved,) = segments
        part, shape = slice(moved.start, moved.stop), segment.uncut_shape
        gradient = tile.gradient[part]
        if gradient.dtype != torch.float32:
            gradient = gradient.to(torch.float32).mul_(scale)
        elif scale != 1.0:
            gradient = gradient * scale
        master = self._plain.master(tile)
        states = {name: tile.states[name][part].view(shape) for name in self.names_of(segment)}
        states |= {name: tile.states[name].view(own) for name, own in shapes_of(self, segment).items()}
        self._advance(segment, moved, master[part].view(shape), gradient.view(shape), states)
        if tile.parameter.dtype != torch.float32:
            for piece in pieces_of(tile):
                self._plain.store_part(tile, master, piece, spare="master" not in tile.states)

    def _advance(
        self, segment: Segment, moved: UpdateSegment, master: Tensor, gradient: Tensor, states: dict[str, Tensor]
    ) -> None:
        """One step of the optimizer's class over `master`, in place, with these states. Step 1 makes its own."""
        group: Any = segment.group
        parameter = by_itself.dress(nn.Parameter(master), segment.look)
        parameter.grad = gradient
        if group not in self._running or moved.step == 1:
            trial = core.over_segments(self._optimizer, [parameter], [group])  # it may give a new parameter states
            self._running[group] = trial.optimizers[0] if isinstance(trial, JointOptimizer) else trial
        running = self._running[group]
        options = next(each for each in running.param_groups if each["zero_group"] == group)
        by_itself.begin_step(running, options, moved.options)
        options["params"] = [parameter]
        if moved.step > 1:
            running.state = defaultdict(dict, {parameter: self._given(segment, states, moved.step - 1)})
        try:
            running.step()
            by_itself.check_step(running, options, moved.options, segment.name)
        except Exception as error:  # it is raised far from here, on another thread
            core.noted(error, f"in step {moved.step} of {segment.name}, of shape {segment.uncut_shape}")
            raise
        by_itself.undress(parameter, master)
        self._take(running.state[parameter], states, segment)
        running.state = defaultdict(dict)
        options["params"] = []

    def _given(self, segment: Segment, states: Mapping[str, Tensor], steps: int) -> dict[str, Any]:
        """A parameter's states before its next step, numbers in the types that the optimizer has for them."""
        group: Any = segment.group
        formats = self._states_of(group, segment.uncut_shape)
        given: dict[str, Any] = {name: None for name, value in formats.items() if value is None}
        given |= {
            name: by_itself.number_of(value, formats[name]) if by_itself.is_number(formats.get(name)) else value
            for name, value in states.items()
        }
        if self._kept[self._first[group]].counts:
            given["step"] = by_itself.number_like(steps, formats.get("step", torch.tensor(0.0, device="cpu").float()))
        return given

    def _take(self, found: Mapping[str, Any], states: Mapping[str, Tensor], segment: Segment) -> None:
        """Copies the optimizer's states after its step into `states`. Raises if their names or formats differ."""
        left = {name: value for name, value in found.items() if name != "step" and value is not None}
        for name, mine in states.items():
            if by_itself.is_number(left.get(name)):
                left[name] = by_itself.packed(left[name]).to(mine.device)
        if (now := _told(left)) != (first := _told(states)):
            told = ", ".join(sorted(repr(name) for name in now | first if now.get(name) != first.get(name)))
            raise UnsupportedOptimizerError(
                f"step() of the optimizer ({kind_of(self._optimizer)}) added, removed or resized the state {told} of "
                f"parameter {segment.name} after the first step, and the store has memory only for the states of the "
                "first step: let the first step make all states. Or leave store= out"
            )
        for name, mine in states.items():
            if left[name].data_ptr() != mine.data_ptr():
                mine.copy_(left[name])

    def read(self, tile: TileView, name: str) -> Tensor:
        if tile.uncut is None and (name == "master" or name in self.step.state_names()):
            return self.step.read(tile, name)
        if name == "master":
            return self._plain.read(tile, name)
        if name in tile.states:
            return tile.states[name].clone()
        if name not in self.state_names():
            raise KeyError(f"state {name!r}; known: master, {', '.join(self.state_names())}")
        return torch.zeros(tile.parameter.numel(), dtype=torch.float32, device="cpu")  # of the other optimizer

    def write(self, tile: TileView, name: str, values: Tensor) -> None:
        if tile.uncut is None and (name == "master" or name in self.step.state_names()):
            self.step.write(tile, name, values)
        elif name == "master":
            self._plain.write(tile, name, values)
        elif name in tile.states:
            tile.states[name].copy_(values)
        elif bool(values.any()):
            raise UnsupportedOptimizerError(
                f"the optimizer of a parameter (one of {kind_of(self._optimizer)}) keeps no state {name!r}: write no "
                f"{name!r} there. Or give each optimizer the parameters that it had when the state was saved"
            )

    @property
    def in_a_row(self) -> bool:
        """As StartingStep: that of the wrapped step."""
        return isinstance(self.step, StartingStep) and self.step.in_a_row

    def start(self, tile: TileView, segments: Sequence[UpdateSegment], scale: float) -> Started:
        """As StartingStep. The update of an uncut tile is done when this returns."""
        if tile.uncut is None and isinstance(self.step, StartingStep):
            return self.step.start(tile, segments, scale)
        self.update(tile, segments, scale)
        return ENDED


def _told(states: Mapping[str, Any]) -> dict[str, Any]:
    """For each state the format that the tier must match: shape, dtype and strides, or the class if it is no tensor."""
    return {
        name: (tuple(v.shape), v.dtype, v.stride()) if isinstance(v, Tensor) else type(v) for name, v in states.items()
    }


def _refuse_mixed(member: torch.optim.Optimizer) -> None:
    """Raises if an optimizer needs some of its parameters whole and others not."""
    others = [
        tuple(p.shape)
        for number, group in enumerate(member.param_groups)
        for p in group["params"]
        if not core.needs_uncut(member, number, tuple(p.shape))
    ]
    if others:
        raise TypeError(
            f"{type(member).__name__} needs some parameters whole and others not (of shapes {others[:2]}), and on "
            "tiers one optimizer cannot have both kinds: give the others to an AdamW of their own, and both "
            "optimizers to shard(model, [matrices, others])"
        )
