"""Makes first values: of real parameters, of deferred ones, and of deferred ones with pretrained weights attached.

Owns the way from a parameter to this rank's slice of its first value. Not here: recorded construction (in
deferred_init.py), the place of the slices (in the store). One whole parameter is alive at a time, none where values
come from a file.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DeferredInitError, listed, reached
from ..layout import UnitLayout
from ..precision import round_to
from ..tensors.inner_tensors import named_parts
from .deferred_init import forget_recording, recording_of
from .init_recording import Recording
from .init_replay import Source


class Initialiser:
    """Knows the first value of every parameter of a model. Make it before anything in the model is changed.

    All ranks must hold the same model: their seeds are compared (a collective, where a deferred parameter is).
    Raises DeferredInitError naming parameters that are on meta without a recording, or that nothing initialises, and
    where ranks entered `deferred_init` with different seeds.
    """

    def __init__(
        self, model: nn.Module, kept: Callable[[Tensor, int, int], Tensor | None] = lambda parameter, start, stop: None
    ) -> None:
        """kept: returns elements [start, stop) of a parameter that is kept elsewhere, without memory of its own, or
        None. Collective."""
        self._kept = kept
        self._made: dict[int, Callable[[int, int], Tensor]] = {}  # by id(parameter), of those that are made by rows
        self._recordings: dict[int, Recording] = {}
        self._names: dict[int, str] = {}
        unknown, uninitialised, changed = [], [], []
        self._owners = [module for module in model.modules() if recording_of(module) is not None]
        for name, part, _, module, _ in named_parts(model):
            if not part.is_meta:
                continue
            recording = recording_of(module)
            self._names[id(part)] = name
            if recording is None or not recording.knows(part):
                unknown.append(name)
                continue
            self._recordings[id(part)] = recording
            if recording.changed_since(part):
                changed.append(name)
            if part.numel() and recording.source(part) is None and not recording.initialises(part):
                uninitialised.append(name)
        if unknown:
            raise DeferredInitError(
                f"{listed(unknown)} are on the meta device and were not made there by deferred_init(): "
                "build the model inside `with zero_core.deferred_init():`"
            )
        if changed:
            raise DeferredInitError(
                f"values written into {listed(changed)} after the with block of deferred_init() were not recorded: "
                "write them inside the block, or after shard() inside zero_core.gathered"
            )
        if uninitialised:
            raise DeferredInitError(f"nothing initialises {listed(uninitialised)}: {_WAY_OUT}")
        if self._recordings and dist.is_available() and dist.is_initialized():
            self._compare_seeds()

    def _compare_seeds(self) -> None:
        mine = sorted(set().union(*(r.seeds() for r in self._recordings.values())))
        seeds: list[list[int]] = [[]] * dist.get_world_size()
        with reached(dist.get_rank(), len(seeds)):
            dist.all_gather_object(seeds, mine)
        if any(other != seeds[0] for other in seeds):
            raise DeferredInitError(
                f"ranks built the model with different seeds, {seeds}: call torch.manual_seed with one seed on every "
                "rank before, or deferred_init(seed=...)"
            )

    def values(self, parameter: Tensor) -> Tensor:
        """Returns the whole first value, in the parameter's shape and dtype: its own memory if it has any, else new
        memory on the CPU."""
        if not parameter.is_meta:
            return parameter.detach()
        if (source := self._source(parameter)) is not None:
            return source.read(0, parameter.numel()).to(parameter.dtype).view(parameter.shape)
        return self._checked(parameter, self._recordings[id(parameter)].replay(parameter))

    def _checked(self, parameter: Tensor, value: Tensor) -> Tensor:
        floats, has_sum = value.dtype.is_floating_point, value.dtype.itemsize > 1  # 8 bits have no sum
        if floats and not (has_sum and value.sum().isfinite()) and value.isnan().any():  # a sum writes no memory
            raise DeferredInitError(f"{self._names[id(parameter)]} is only partly initialised: {_WAY_OUT}")
        return value

    def shard(
        self, layout: UnitLayout, parameters: Sequence[nn.Parameter], rank: int, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Returns (layout.numel_of(rank),) `dtype`, CPU: shard `rank` of the unit's first value; padding is zero.

        `parameters`: one for each of `layout.slots`, in order; for a slot of rows, the whole parameter that is cut.
        """
        shard = torch.zeros(layout.numel_of(rank), dtype=dtype, device="cpu")
        for k, (parameter, slot) in enumerate(zip(parameters, layout.slots, strict=True)):
            first = slot.whole.flat_start
            # Also where this shard has no part of it: other ranks ask for it.
            kept = self._kept(parameter, first, first + slot.numel)
            if (piece := layout.piece(rank, k)) is None:
                continue
            target = shard[piece.shard_start : piece.shard_stop]
            source = self._source(parameter)
            start, stop = first + piece.slot_start, first + piece.slot_stop
            if kept is not None:
                round_to(kept.reshape(-1)[piece.slot_start : piece.slot_stop], target)
            elif source is not None:
                round_to(source.read(start, stop), target)
            elif slot.rows is not None and parameter.is_meta:
                round_to(self._elements(parameter, start, stop), target)
            else:  # with no name for the whole value, which would keep it until the next one is made
                round_to(self.values(parameter).reshape(-1)[start:stop], target)
            if slot.rows is not None and slot.rows.stop == parameter.shape[0]:
                self._made.pop(id(parameter), None)
        return shard

    def _elements(self, parameter: nn.Parameter, start: int, stop: int) -> Tensor:
        """Returns elements of a deferred parameter whose rows are in several units, which ask one after another. Where
        it cannot be made in parts, the whole value stays until the last of them."""
        if id(parameter) not in self._made:
            if (made := self._recordings[id(parameter)].elements(parameter)) is None:
                whole = self.values(parameter).reshape(-1)
                made = lambda start, stop: whole[start:stop]  # noqa: E731
            self._made[id(parameter)] = made
        return self._checked(parameter, self._made[id(parameter)](start, stop).to(parameter.dtype))

    def _source(self, parameter: Tensor) -> Source | None:
        recording = self._recordings.get(id(parameter))
        return None if recording is None else recording.source(parameter)

    def release(self) -> None:
        """Releases the recordings and their memory and files, after every value has been taken."""
        for module in self._owners:
            forget_recording(module)
        self._owners.clear()
        self._recordings.clear()
        self._made.clear()


def become(parameter: Tensor, data: Tensor) -> None:
    """Gives `parameter` the memory `data`, of its shape. Identity, requires_grad and attributes stay, also from and to
    meta.
    """
    if not parameter.is_meta and not data.is_meta:
        parameter.data = data
        return
    real = nn.Parameter(data, requires_grad=parameter.requires_grad)
    if weakref.getweakrefs(parameter):
        # nn.LSTM keeps weak references to its weights, which swap_tensors refuses. They are to the Python object, which
        # stays; only references from C++ would be left behind, and a parameter that was never used has none.
        torch._C._swap_tensor_impl(parameter, real)
        return
    real.__dict__.update(parameter.__dict__)
    torch.utils.swap_tensors(parameter, real)


def materialise(module: nn.Module) -> None:
    """Gives every deferred parameter of `module` its memory and first value, in place. The rest stays as it is."""
    initialiser = Initialiser(module)
    for part in [part.tensor for part in named_parts(module)]:
        if part.is_meta:
            kind: Any = type(part)
            become(part, initialiser.values(part))
            part.__class__ = kind  # a part of a quantised parameter is no parameter
    initialiser.release()


_WAY_OUT = "initialise it where the module is built, or give it values with load_pretrained before shard()"
