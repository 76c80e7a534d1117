"""Updates one tile on the CPU. Translates a tile into addresses; native code does the arithmetic.

``CpuStep`` implements zero-offload's ``UpdateStep`` protocol without importing it. A tile is anything with
``.parameter``, ``.gradient`` and ``.states``, and a segment is anything with ``.start .stop .options .step``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zero_optim_cpu import _native
from zero_optim_cpu._native import Handle
from zero_optim_cpu.dispatch import native_item
from zero_optim_cpu.kernels import Kernels
from zero_optim_cpu.layouts import Field, layout_named
from zero_optim_cpu.rules import Rule, rule_of
from zero_optim_cpu.tensors import check, dtype_code


class Tile(Protocol):
    """A run of elements. All its tensors are one-dimensional, contiguous and on the CPU."""

    parameter: Tensor  # (numel,) fp32, bf16 or fp16
    gradient: Tensor  # (numel,) fp32, bf16 or fp16; read by update only
    states: Mapping[str, Tensor]  # by the names of CpuStep.layout


class Segment(Protocol):
    """Elements [start, stop) of a tile that belong to one parameter."""

    start: int
    stop: int
    options: Mapping[str, Any]  # of its param group
    step: int  # 1-based


class CpuStep:
    """The optimizer step of a tile, in one pass over its memory.

    Args:
        layout: "fp32", "split", "split_bf16m" or "split_8bit", see ``layouts``.
        threads: the number of threads of an update. None: one for each physical core that this process may run on.
        isa: the instruction set. None: ``ZERO_OPTIM_ISA`` or the widest that the CPU supports.
        cores: the CPUs to pin one thread each to, while the caller waits. This is for machines whose other cores have
            other work, such as launching kernels; ``cores.beside_gpus`` chooses them. None: threads are not pinned, and
            the caller is one of them.

    Results have the same bits for every ``threads``, ``cores`` and ``isa``. Methods release the GIL while they compute.
    """

    def __init__(
        self,
        layout: str = "split",
        threads: int | None = None,
        isa: str | None = None,
        cores: Sequence[int] | None = None,
    ) -> None:
        self._layout = layout_named(layout)
        self._kernels = Kernels(threads, isa, cores)
        self._rule: Rule | None = None
        self._initial_sum = 0.0  # Adagrad's initial_accumulator_value

    @property
    def layout_name(self) -> str:
        """The name of the layout of states and masters."""
        return self._layout.name

    @property
    def isa(self) -> str:
        """The name of the instruction set in use."""
        return self._kernels.isa

    @property
    def threads(self) -> int:
        """The number of threads of an update."""
        return self._kernels.threads

    @property
    def cores(self) -> tuple[int, ...] | None:
        """The CPUs that the threads are pinned to. None: they run wherever the process may."""
        return self._kernels.cores

    @property
    def in_a_row(self) -> bool:
        """Whether to ``start`` a tile while another is still being updated.

        That keeps pinned threads busy. Threads that share their cores with other work gain nothing from it.
        """
        return self.cores is not None

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        """Adopts the rule of an optimizer: its type, and for SGD whether it has momentum.

        Raises TypeError if there is no kernel for its type, and ValueError if there is none for one of its options.
        """
        self._rule = rule_of(optimizer)
        self._initial_sum = float(optimizer.defaults.get("initial_accumulator_value", 0.0))

    def layout(self, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        """Returns the arrays of a tile of ``numel`` elements, besides the parameter and the gradient."""
        dtype_code("parameter", parameter_dtype)
        return self._layout.fields(self._bound(), numel, parameter_dtype)

    def state_names(self) -> tuple[str, ...]:
        """Returns the names of the states besides "master"."""
        return self._bound().state_names

    def initialise(self, tile: Tile, master: Tensor) -> None:
        """Writes the parameter and the states of a new tile, given its fp32 master (numel,)."""
        self.write(tile, "master", master)
        for name in set(tile.states) - {"master", "remainder"}:
            tile.states[name].zero_()
        if self._initial_sum != 0.0:
            self.write(tile, "sum", torch.full_like(tile.parameter, self._initial_sum, dtype=torch.float32))

    def update(self, tile: Tile, segments: Sequence[Segment], scale: float) -> None:
        """Updates every segment by one step, in place. ``scale`` multiplies the gradient.

        Elements outside of all segments keep their parameter and states. With split_8bit, a moment that shares a block
        of 256 with an updated element is encoded again in the block's new scale.
        """
        self._batch(tile, segments).run(self._kernels.pool, float(scale))

    def start(self, tile: Tile, segments: Sequence[Segment], scale: float) -> Handle:
        """Does what ``update`` does, but returns at once. Do not use the tile until the handle is done."""
        keep = (tile.parameter, tile.gradient, dict(tile.states))
        return self._batch(tile, segments).start(self._kernels.pool, float(scale), keep)

    def read(self, tile: Tile, name: str) -> Tensor:
        """Decodes "master" or a state. Returns fp32 (numel,)."""
        values = torch.empty(tile.parameter.numel(), dtype=torch.float32, device="cpu")
        _native.decode(self._kernels.pool, self._item(tile), *self._place(tile, name), values.data_ptr())
        return values

    def write(self, tile: Tile, name: str, values: Tensor) -> None:
        """Encodes fp32 values (numel,) into "master", and with it the parameter, or into a state."""
        values = check(name, values, numel=tile.parameter.numel(), dtype=torch.float32)
        _native.encode(self._kernels.pool, self._item(tile), *self._place(tile, name), values.data_ptr())

    def accumulate(self, into: Tensor, values: Tensor) -> None:
        """Adds ``values`` (numel,) fp32, bf16 or fp16 to ``into`` (numel,) fp32, in place."""
        address = check("into", into, dtype=torch.float32).data_ptr()
        code = dtype_code("values", check("values", values, numel=into.numel()).dtype)
        kernels = self._kernels
        _native.accumulate(kernels.pool, kernels.table, address, values.data_ptr(), code, into.numel())

    def chunk_norms_squared(self, values: Tensor) -> list[float]:
        """Returns the sum of squares of each chunk of 1 << 20 elements, in double. NaN and infinity propagate."""
        return self._kernels.reduce(_native.chunk_norms_squared, "values", values)

    # ---- translation ---------------------------------------------------------------------------------------------

    def _bound(self) -> Rule:
        if self._rule is None:
            raise RuntimeError("CpuStep does not know the optimizer yet: call bind(optimizer) first")
        return self._rule

    def _place(self, tile: Tile, name: str) -> tuple[int, int]:
        """Returns the native slot of "master" (-1) or of a state, and the native kind that says how it is stored."""
        if name == "master":
            return -1, self._layout.master_of(tile.parameter.dtype)
        slots = dict(self._bound().states)
        if name not in slots:
            raise KeyError(f"{name!r} is no state of {self._bound().name}; there are {('master', *slots)}")
        return slots[name], self._layout.moments

    def _item(self, tile: Tile) -> Any:
        return native_item(self._bound(), self._layout, tile.parameter, tile.states)

    def _batch(self, tile: Tile, segments: Sequence[Segment]) -> Any:
        rule = self._bound()
        gradient = check("gradient", tile.gradient, numel=tile.parameter.numel())
        native = [(s.start, s.stop, rule.hyper(s.options, s.step)) for s in segments]
        kind = self._layout.master_of(tile.parameter.dtype)
        batch = _native.Batch(self._kernels.table, rule.code, self._layout.moments)
        batch.add(self._item(tile), kind, gradient.data_ptr(), dtype_code("gradient", gradient.dtype), native)
        return batch
