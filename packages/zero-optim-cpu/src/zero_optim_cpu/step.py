"""One tile's update on the CPU. Owns the translation of a tile into addresses; the arithmetic is native.

``CpuStep`` fills zero-offload's ``UpdateStep`` protocol without importing it: a tile is anything with ``.parameter``,
``.gradient`` and ``.states``, a segment anything with ``.start .stop .options .step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_optim_cpu import _native
from zero_optim_cpu.dispatch import native_item
from zero_optim_cpu.engine import Engine
from zero_optim_cpu.layouts import STOCHASTIC, Field, layout_named
from zero_optim_cpu.rules import Rule, rule_of
from zero_optim_cpu.tensors import check, dtype_code


class Tile(Protocol):
    """A run of elements: all tensors one-dimensional, contiguous, on the CPU."""

    parameter: Tensor  # (numel,) fp32, bf16 or fp16
    gradient: Tensor  # (numel,) fp32, bf16 or fp16; read by update only
    states: Mapping[str, Tensor]  # by the names of CpuStep.layout


class Segment(Protocol):
    """Elements [start, stop) of a tile that belong to one parameter."""

    start: int
    stop: int
    options: Mapping[str, Any]  # of its param group
    step: int  # 1-based


class Handle:
    """An update that runs in the background. Dropping it waits for the end."""

    def __init__(self, native: Any) -> None:
        self._native = native

    def done(self) -> bool:
        """Whether the update has ended. Never blocks."""
        return bool(self._native.done())

    def wait(self, timeout: float | None = None) -> None:
        """Block until the update has ended; TimeoutError after ``timeout`` seconds."""
        if not self._native.wait(-1.0 if timeout is None else max(0.0, timeout)):
            raise TimeoutError(f"the update did not end within {timeout} seconds")


class CpuStep:
    """The optimizer step of a tile, at the speed of memory.

    Args:
        layout: "fp32", "split", "split_bf16m", "split_8bit" or "bf16_stochastic", see ``layouts``.
        threads: threads of one update; None: one a physical core of this process's affinity.
        isa: instruction set; None: ``ZERO_OPTIM_ISA`` or the widest there is.
        cores: CPUs that the threads stay on, one each, while the caller waits: where the rest of the machine has other
            work, such as launching kernels. ``cores.beside_gpus`` chooses them. None: threads float, the caller works.

    Results have the same bits for every ``threads``, ``cores`` and ``isa``. Every method releases the GIL while it
    computes.
    """

    def __init__(
        self,
        layout: str = "split",
        threads: int | None = None,
        isa: str | None = None,
        cores: Sequence[int] | None = None,
    ) -> None:
        self._layout = layout_named(layout)
        self._engine = Engine(threads, isa, cores)
        self._rule: Rule | None = None
        self._initial: dict[str, float] = {}
        self._counted = 0  # elements initialised so far: the counter of stochastic rounding

    @property
    def isa(self) -> str:
        """Name of the instruction set in use."""
        return self._engine.isa

    @property
    def threads(self) -> int:
        """Threads of one update."""
        return self._engine.threads

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The CPUs that they stay on; None: wherever the process may run."""
        return self._engine.cores

    @property
    def in_a_row(self) -> bool:
        """Whether to ``start`` a tile while another is updated: so that cores of their own are never idle in between.

        Where the threads share their cores with other work nothing is gained by it.
        """
        return self.cores is not None

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the rule of this optimizer: its type and whether it has momentum.

        Raises:
            TypeError: no kernel for this type; ValueError: none for one of its options.
        """
        self._rule = rule_of(optimizer)
        self._initial = {"sum": float(optimizer.defaults.get("initial_accumulator_value", 0.0))}

    def layout(self, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        """The arrays of one tile's state, besides the parameter."""
        dtype_code("parameter", parameter_dtype)
        return self._layout.fields(self._bound(), numel, parameter_dtype)

    def state_names(self) -> tuple[str, ...]:
        """Logical names besides "master"."""
        return self._bound().state_names

    def initialise(self, tile: Tile, master: Tensor) -> None:
        """Write parameter and states of a fresh tile from its fp32 master (numel,)."""
        if "counter" in tile.states:
            tile.states["counter"].fill_(self._counted)
        self._counted += tile.parameter.numel()
        self.write(tile, "master", master)
        for name in self.state_names():
            value = self._initial.get(name, 0.0)
            if value == 0.0:
                tile.states[name].zero_()
                if f"{name}_scale" in tile.states:
                    tile.states[f"{name}_scale"].zero_()
            else:
                self.write(tile, name, torch.full((tile.parameter.numel(),), value))

    def update(self, tile: Tile, segments: Sequence[Segment], scale: float) -> None:
        """One step of every segment, in place. ``scale`` multiplies the gradient.

        Elements in no segment keep parameter and states. (split_8bit: a moment that shares a block of 256 with an
        updated element is expressed in the block's new scale.)
        """
        batch = self._batch(tile, segments)
        batch.run(self._engine.pool, float(scale))

    def start(self, tile: Tile, segments: Sequence[Segment], scale: float) -> Handle:
        """As ``update``, but return at once. The tile must be left alone until the handle says done."""
        batch = self._batch(tile, segments)
        keep = (tile.parameter, tile.gradient, dict(tile.states))
        return Handle(batch.start(self._engine.pool, float(scale), keep))

    def read(self, tile: Tile, name: str) -> Tensor:
        """Logical values (numel,) fp32 of "master" or of a state."""
        item = self._item(tile)
        values = torch.empty(tile.parameter.numel(), dtype=torch.float32)
        if name == "master":
            _native.decode_master(self._engine.pool, item, self._master_kind(tile), values.data_ptr())
        else:
            slot = self._slot(name)
            _native.decode_moment(self._engine.pool, item, slot, self._layout.moments, values.data_ptr())
        return values

    def write(self, tile: Tile, name: str, values: Tensor) -> None:
        """Replace the logical values of "master" (and with it the parameter) or of a state."""
        values = check(name, values, numel=tile.parameter.numel(), dtype=torch.float32)
        item = self._item(tile)
        if name == "master":
            _native.encode_master(self._engine.pool, item, self._master_kind(tile), values.data_ptr())
        else:
            slot = self._slot(name)
            _native.encode_moment(self._engine.pool, item, slot, self._layout.moments, values.data_ptr())

    def accumulate(self, into: Tensor, values: Tensor) -> None:
        """``into += values``: into (numel,) fp32, values (numel,) fp32, bf16 or fp16."""
        check("into", into, dtype=torch.float32)
        check("values", values, numel=into.numel())
        code = dtype_code("values", values.dtype)
        engine = self._engine
        _native.accumulate(engine.pool, engine.table, into.data_ptr(), values.data_ptr(), code, into.numel())

    def chunk_norms_squared(self, values: Tensor) -> list[float]:
        """The sum of squares of each chunk of 1 << 20 elements, in double. Not finite where a value is not."""
        check("values", values)
        code = dtype_code("values", values.dtype)
        engine = self._engine
        return _native.chunk_norms_squared(engine.pool, engine.table, values.data_ptr(), code, values.numel())

    def norm_squared(self, values: Tensor) -> float:
        """The sum of ``chunk_norms_squared``, in order."""
        return sum(self.chunk_norms_squared(values), 0.0)

    def count_nonfinite(self, values: Tensor) -> int:
        """How many elements are NaN or infinite."""
        check("values", values)
        code = dtype_code("values", values.dtype)
        engine = self._engine
        return int(_native.count_nonfinite(engine.pool, engine.table, values.data_ptr(), code, values.numel()))

    # ---- translation ---------------------------------------------------------------------------------------------

    def _bound(self) -> Rule:
        if self._rule is None:
            raise RuntimeError("CpuStep does not know the optimizer yet: call bind(optimizer) first")
        return self._rule

    def _master_kind(self, tile: Tile) -> int:
        return self._layout.master_of(tile.parameter.dtype)

    def _slot(self, name: str) -> int:
        for state, slot in self._bound().states:
            if state == name:
                return slot
        raise KeyError(f"{name!r} is no state of {self._bound().name}; there are {('master', *self.state_names())}")

    def _item(self, tile: Tile) -> Any:
        return native_item(self._bound(), self._layout, tile.parameter, tile.states)[0]

    def _batch(self, tile: Tile, segments: Sequence[Segment]) -> Any:
        rule = self._bound()
        gradient = check("gradient", tile.gradient, numel=tile.parameter.numel())
        native = [(s.start, s.stop, rule.hyper(s.options, s.step)) for s in segments]
        kind = self._master_kind(tile)
        counter = int(tile.states["counter"]) if kind == STOCHASTIC else 0
        batch = _native.Batch(self._engine.table, rule.code, self._layout.moments)
        code = dtype_code("gradient", gradient.dtype)
        batch.add(self._item(tile), kind, gradient.data_ptr(), code, counter, native)
        return batch
