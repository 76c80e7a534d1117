"""Averages a sharded model's weights over time (`AveragedModel`), in shards of its own.

Modelled on `torch.optim.swa_utils.AveragedModel`, whose averaging functions it takes. It keeps no second model: the
averages are the shards of another store, on that store's tiers, and are swapped with the masters for an evaluation.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import get_swa_avg_fn, get_swa_multi_avg_fn
from torch.utils._foreach_utils import _get_foreach_kernels_supported_devices

from .. import checkpoint
from ..checkpoint.shards import extra_states
from ..errors import ZeroError
from ..optim.device_store import DeviceStore
from ..store import CHUNK_NUMEL, Segment, ShardSpec, ShardStore, StoreContext
from .shard import handle


class AveragedModel:
    """The average of a sharded `model`'s trained parameters: fp32, of the masters, 4 bytes an element.

    Frozen parameters are left as they are.
    avg_fn(average, current, n) -> average and multi_avg_fn(averages, currents, n), in place, have torch's signatures,
    as `torch.optim.swa_utils.get_ema_multi_avg_fn(0.999)` has; n counts the averages so far. They receive flat pieces
    of parameters. Without both, all updates are averaged equally. use_buffers: average the buffers too; else they are
    copied at each update. store: keeps the averages, such as a zero_offload.TieredStore of its own; None: on the
    compute device. On one rank in fp32 the averages are bit-identical to torch's.
    All methods are collective. Raises ZeroError for a model that is not sharded.
    """

    def __init__(
        self,
        model: nn.Module,
        avg_fn: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
        multi_avg_fn: Callable[[list[Tensor], list[Tensor], Tensor], Any] | None = None,
        use_buffers: bool = False,
        store: ShardStore | None = None,
    ) -> None:
        if avg_fn is not None and multi_avg_fn is not None:
            raise ZeroError("AveragedModel takes avg_fn or multi_avg_fn, not both")
        self._handle = handle(model)
        self._avg_fn, self._multi_avg_fn = avg_fn, multi_avg_fn
        self.n_averaged = 0
        self._steps: int | None = None  # step_count of the model, while the averages are in its place
        self._units = [unit for unit in self._handle.units if unit.trainable]
        self._store = store or DeviceStore()
        ranks = self._handle.ranks
        rank, count = ranks.shard.rank, ranks.shard.size
        specs = []
        for unit in self._units:
            segments = tuple(Segment(p.shard_start, p.shard_stop, None, p.slot.name, p.slot.shape) for p in unit.pieces)
            specs.append(ShardSpec(unit.name, unit.shard_numel, torch.float32, segments, trained=False))
        self._handle.settle()
        nothing = torch.optim.SGD([{"params": []}])
        context = StoreContext(ranks.device, rank, count)
        self._store.attach(specs, nothing, self._first, context=context)
        self._use_buffers = use_buffers
        self._buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]

    def _first(self, i: int) -> Tensor:
        unit = self._units[i]
        return self._handle.store.read_state(unit.index, "master", 0, unit.shard_numel)

    @torch.no_grad()
    def update_parameters(self, model: nn.Module | None = None) -> None:
        """Adds the model's current weights to the average. `model` is there for torch's signature."""
        self._check(model)
        for i, unit, start, stop in self._pieces():
            current = self._handle.store.read_state(unit.index, "master", start, stop)
            if self.n_averaged:
                current = self._averaged(self._store.read_state(i, "master", start, stop), current)
            self._store.write_state(i, "master", start, current)
        for buffer, average in self._buffers:
            average.copy_(self._averaged(average, buffer) if self.n_averaged and self._use_buffers else buffer)
        self.n_averaged += 1

    def _averaged(self, average: Tensor, current: Tensor) -> Tensor:
        current, n = current.to(average.device), torch.tensor(self.n_averaged, device="cpu")
        # As torch chooses: the two round in different ways.
        of_list = average.device.type in _get_foreach_kernels_supported_devices()
        if self._avg_fn is not None or (self._multi_avg_fn is None and not of_list):
            return (self._avg_fn or get_swa_avg_fn())(average, current, n)
        (self._multi_avg_fn or get_swa_multi_avg_fn())([average], [current], n)
        return average

    @contextmanager
    def swapped_in(self) -> Iterator[nn.Module]:
        """Inside, the model's parameters are the averages, for evaluation, `save_pretrained` and `checkpoint.save`.

        On leaving, also by an error, the model has its own bits again. Values written inside stay in the averages.
        """
        self._check(None)
        self._steps = self._handle.optimizer.step_count
        self._exchange()
        self._handle.engine.averages = True
        try:
            yield self._handle.model
            if self._handle.optimizer.step_count != self._steps:
                raise ZeroError(
                    "step() inside AveragedModel.swapped_in() trained the averages. Call step() outside of the with "
                    "block. AveragedModel.load(folder) restores averages that AveragedModel.save(folder) wrote"
                )
        finally:
            self._steps = None
            self._handle.settle()
            self._exchange()
            self._handle.engine.averages = False

    @torch.no_grad()
    def _exchange(self) -> None:
        for i, unit, start, stop in self._pieces():
            mine = self._handle.store.read_state(unit.index, "master", start, stop)
            average = self._store.read_state(i, "master", start, stop)
            self._handle.store.write_state(unit.index, "master", start, average)
            self._store.write_state(i, "master", start, mine)
        for unit in self._units:
            for k in range(len(unit.parameters)):
                unit.overwritten(k)
        for buffer, average in self._buffers:
            values = buffer.clone()
            buffer.copy_(average)
            average.copy_(values)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes the averages and their number of updates as a checkpoint of the model."""
        count = self.n_averaged
        with self.swapped_in() as model:
            checkpoint.save(folder, model, extra={"n_averaged": count}, trained_only=True)

    def load(self, folder: str | os.PathLike[str]) -> None:
        """Reads a checkpoint of `save`, at any world size, stage and store."""
        with self.swapped_in() as model:
            own = [(module, module.get_extra_state()) for _, module in extra_states(model)]
            found = checkpoint.load(folder, model, random_state=False)
            for module, state in own:
                module.set_extra_state(state)
        self.n_averaged = int(found.extra["n_averaged"])

    def close(self) -> None:
        """Frees the memory of the averages."""
        self._store.close()

    def _check(self, model: nn.Module | None) -> None:
        if model is not None and model is not self._handle.model:
            raise ZeroError("update_parameters() got another model than AveragedModel() did: give both the same")
        if self._steps is not None:
            raise ZeroError("an AveragedModel cannot be used inside its swapped_in(): leave the with block first")
        self._handle.settle()

    def _pieces(self) -> Iterator[tuple[int, Any, int, int]]:
        """(number, unit, start, stop) of every piece of this rank's shards."""
        for i, unit in enumerate(self._units):
            numel, step = unit.shard_numel, 4 * CHUNK_NUMEL
            for start in range(0, numel, step):
                yield i, unit, start, min(start + step, numel)
