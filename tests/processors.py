"""Says which kernels torch's libraries choose on this processor, for tests whose bits depend on that choice."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

__all__ = ["multiplies_in_amx"]

_WITHOUT_AMX = ("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2")


@cache
def multiplies_in_amx(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Whether oneDNN may multiply bf16 matrices in AMX tiles here.

    On a Xeon with AMX, runs of a mixture in groups and uncut differed in bits (2026-11-28). Under AVX2 and AVX-512 they
    have the same. Which product rounds otherwise is not known. `ONEDNN_MAX_CPU_ISA`, which oneDNN reads when it starts,
    forbids newer kernels.
    """
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if limit in _WITHOUT_AMX or (limit.startswith("AVX512") and "AMX" not in limit):
        return False
    return any(line.startswith("flags") and "amx_bf16" in line.split() for line in cpuinfo.read_text().splitlines())
