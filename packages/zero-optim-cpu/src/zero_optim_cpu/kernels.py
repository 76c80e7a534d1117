"""Chooses an instruction set and owns the pool of threads. Knows nothing about optimizers.

Only this module reads the environment: ``ZERO_OPTIM_ISA=scalar|avx2|avx512|neon`` is for tests, and ``isa=`` overrides
it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from torch import Tensor

from zero_optim_cpu import _native
from zero_optim_cpu.cores import granted, ranges
from zero_optim_cpu.tensors import check, dtype_code

T = TypeVar("T")


def compiled_isas() -> tuple[str, ...]:
    """Returns the instruction sets that this build has kernels for, narrowest first."""
    return tuple(_native.compiled_isas())


def available_isas() -> tuple[str, ...]:
    """Returns those of ``compiled_isas`` that this CPU supports. The last one is the default."""
    return tuple(_native.available_isas())


class Kernels:
    """The kernels of one instruction set, and the pool of threads that runs them.

    Args:
        threads: the number of threads that work on an update, including the caller. None: one for each physical core
            that this process may run on.
        isa: the name of an instruction set. None: ``ZERO_OPTIM_ISA``, or the widest that the CPU supports.
        cores: the CPUs to pin one thread each to, while the caller waits. None: threads are not pinned.

    Raises:
        ValueError: the instruction set is unknown or not supported by the CPU, ``threads`` is below 1, or ``cores`` are
            not ``threads`` different CPUs that this process may run on.
    """

    def __init__(self, threads: int | None = None, isa: str | None = None, cores: Sequence[int] | None = None) -> None:
        if cores is not None:
            threads = _checked(cores, threads)
        if threads is None:
            threads = _native.physical_cores()
        if threads < 1:
            raise ValueError(f"threads={threads}: an update needs at least one thread; leave it out for one per core")
        source = "isa="
        if isa is None:
            isa, source = os.environ.get("ZERO_OPTIM_ISA") or available_isas()[-1], "ZERO_OPTIM_ISA="
        try:
            self.table = _native.table(isa)
        except ValueError as error:
            raise ValueError(f"{source}{isa}: {error}") from None
        self.isa: str = isa
        self.threads: int = threads
        self.cores: tuple[int, ...] | None = None if cores is None else tuple(cores)
        self.pool = _native.Pool(threads) if cores is None else _native.Pool(threads, list(cores))

    def reduce(self, kernel: Callable[[_native.Pool, _native.Table, int, int, int], T], name: str, values: Tensor) -> T:
        """Runs a native reduction over all elements. ``name`` is how errors call the tensor."""
        code = dtype_code(name, check(name, values).dtype)
        return kernel(self.pool, self.table, values.data_ptr(), code, values.numel())


def _checked(cores: Sequence[int], threads: int | None) -> int:
    """Returns the number of threads that ``cores`` are for."""
    if not cores or len(set(cores)) != len(cores) or threads not in (None, len(cores)):
        raise ValueError(f"cores={list(cores)} with {threads=}: each thread needs a CPU of its own; leave threads out")
    if refused := sorted(set(cores) - granted(cores)):
        raise ValueError(
            f"cores={list(cores)}: this process may not run on CPU {ranges(refused)}; leave those out, or leave cores "
            "out so that threads run wherever the process may"
        )
    return len(cores)
