"""The instruction set and the threads of one optimizer. Owns the native pool; knows nothing of optimizers.

The environment is read here and nowhere else: ``ZERO_OPTIM_ISA=scalar|avx2|avx512|neon`` is for tests, and an
explicit ``isa=`` wins over it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from zero_optim_cpu import _native
from zero_optim_cpu.cores import granted, ranges


def compiled_isas() -> tuple[str, ...]:
    """Instruction sets that this build has kernels for, narrowest first."""
    return tuple(_native.compiled_isas())


def available_isas() -> tuple[str, ...]:
    """Of those, the ones that this CPU supports; the last is the default."""
    return tuple(_native.available_isas())


class Engine:
    """Kernels of one instruction set, and a pool of threads that runs them.

    Args:
        threads: how many threads work on one update, the caller included. None: the physical cores among the CPUs
            that this process may run on (its affinity).
        isa: name of an instruction set. None: ``ZERO_OPTIM_ISA``, or the widest that the CPU has.
        cores: CPUs to stay on, one thread each, the caller not included: it waits, wherever it runs. None: no thread
            is held anywhere.

    Raises:
        ValueError: the name is unknown, the CPU lacks the set, ``threads`` is below 1, or ``cores`` are not ``threads``
            different CPUs that this process may run on.
    """

    def __init__(self, threads: int | None = None, isa: str | None = None, cores: Sequence[int] | None = None) -> None:
        if cores is not None:
            threads = _checked(cores, threads)
        if threads is None:
            threads = _native.physical_cores()
        if threads < 1:
            raise ValueError(f"threads={threads}: an update needs at least one thread; leave it out for one a core")
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

    def __repr__(self) -> str:
        return f"Engine(threads={self.threads}, isa={self.isa!r}, cores={self.cores})"


def _checked(cores: Sequence[int], threads: int | None) -> int:
    """How many threads `cores` are for."""
    if not cores or len(set(cores)) != len(cores) or threads not in (None, len(cores)):
        raise ValueError(
            f"cores={list(cores)} with threads={threads}: one different CPU for each thread; leave threads out"
        )
    if refused := sorted(set(cores) - granted(cores)):
        raise ValueError(
            f"cores={list(cores)}: this process may not run on CPU {ranges(refused)}; leave those out, or leave cores "
            "out and the threads go where the process may"
        )
    return len(cores)
