"""The instruction set and the threads of one optimizer. Owns the native pool; knows nothing of optimizers.

The environment is read here and nowhere else: ``ZERO_OPTIM_ISA=scalar|avx2|avx512|neon`` is for tests, and an
explicit ``isa=`` wins over it.
"""

from __future__ import annotations

import os

from zero_optim_cpu import _native


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

    Raises:
        ValueError: the name is unknown, the CPU lacks the set, or ``threads`` is below 1.
    """

    def __init__(self, threads: int | None = None, isa: str | None = None) -> None:
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
        self.pool = _native.Pool(threads)

    def __repr__(self) -> str:
        return f"Engine(threads={self.threads}, isa={self.isa!r})"
