"""Which processors multiply in AMX. Fails if a test of bits took an AMX machine for another, or the reverse."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processors import multiplies_in_amx


@pytest.mark.parametrize(
    ("flags", "limit", "expected"),
    [
        ("fpu avx512f amx_bf16 amx_tile", None, True),
        ("fpu avx512f amx_bf16 amx_tile", "AVX512_CORE_AMX", True),
        ("fpu avx512f amx_bf16 amx_tile", "ALL", True),
        ("fpu avx512f amx_bf16 amx_tile", "AVX512_CORE_BF16", False),
        ("fpu avx512f amx_bf16 amx_tile", "avx2", False),
        ("fpu avx512f avx512_bf16", None, False),
    ],
)
def test_amx_is_found_unless_onednn_may_not_use_it(
    flags: str, limit: str | None, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    if limit is not None:
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", limit)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(f"processor : 0\nmodel name : a processor\nflags : {flags}\n")
    assert multiplies_in_amx.__wrapped__(cpuinfo) is expected
