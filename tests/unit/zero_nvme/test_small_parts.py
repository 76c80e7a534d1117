"""Options, buffers, names of filesystems, the command line."""

import mmap
import os
import re
import types

import pytest

import zero_nvme
from zero_nvme import buffers
from zero_nvme.__main__ import main
from zero_nvme.buffers import HUGE_PAGE_BYTES, as_memory
from zero_nvme.tools.measure import measure_weights


@pytest.mark.promise("no-backend")
@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"backend": "aio"}, "does not exist; choose auto or one of.* io_uring"),
        ({"block_bytes": 1000}, "multiple of 4096"),
        ({"inflight_bytes": 0}, "must be positive"),
        ({"depth": 100000}, "at most 4096"),
        ({"weights": [1, 2]}, "2 weights for 1.* paths; give one for each"),
    ],
)
def test_options_name_the_keyword(change, text, tmp_path):
    with pytest.raises(ValueError, match=text) as caught:
        zero_nvme.Slab(tmp_path, **change)
    assert next(iter(change)) in str(caught.value)


@pytest.mark.parametrize("portable", [False, True])  # True: as where nothing could be compiled
@pytest.mark.parametrize("nbytes", [0, 1, 4096, HUGE_PAGE_BYTES + 1])
def test_empty_is_aligned_zeroed_and_of_its_size(portable, nbytes, monkeypatch):
    if portable:
        monkeypatch.setattr(buffers, "native", None)
    buffer = zero_nvme.empty(nbytes)
    assert buffer.nbytes == nbytes and not buffer.readonly and bytes(buffer) == bytes(nbytes)
    if nbytes:
        assert as_memory(buffer, writable=True).address % (4096 if portable else HUGE_PAGE_BYTES) == 0
        part = buffer[nbytes - 1 :]
        del buffer
        part[0] = 7  # a view keeps the mapping
        assert part[0] == 7


def test_memory_of_many_kinds():
    for buffer in (bytearray(8), memoryview(bytearray(8)), mmap.mmap(-1, 8)):
        assert as_memory(buffer, writable=True).nbytes == 8
    assert as_memory(b"12345678", writable=False).nbytes == 8
    with pytest.raises(TypeError):
        as_memory(8, writable=False)
    with pytest.raises(ValueError, match="cannot be negative"):
        zero_nvme.empty(-1)


def test_buffers_and_ranges_that_a_slab_refuses(tmp_path):
    with zero_nvme.Slab(tmp_path) as slab:
        extent = slab.allocate(4096)
        with pytest.raises(TypeError, match="read-only bytes"):
            slab.read(extent, bytes(4096))
        with pytest.raises(TypeError, match="not contiguous"):
            slab.write(extent, memoryview(bytearray(4096))[::2])
        for offset, nbytes in [(0, 4097), (1, 4096), (-1, 1), (4096, 1)]:
            with pytest.raises(ValueError, match="outside an extent of 4096"):
                slab.read(extent, bytearray(nbytes), offset)


@pytest.mark.promise("named-slab")
def test_doctor_lists_slabs_with_a_name(tmp_path, capsys):
    """Whose they are, who has them open, and how to be rid of those that nobody has."""
    zero_nvme.Slab(tmp_path, name="left", allow_memory=True).close()
    (tmp_path / "half.slab").touch()
    with zero_nvme.Slab(tmp_path, 1 << 20, name="open", allow_memory=True):
        main(["doctor", str(tmp_path)])
    text = " ".join(capsys.readouterr().out.split())
    assert re.search(rf"slab left .*made by .*process {os.getpid()}.*`rm .*left\.slab\*` removes it", text)
    assert re.search(rf"slab open .*in use by process {os.getpid()}", text)
    assert "left unfinished" in text


@pytest.mark.promise("free-bytes")
def test_doctor_and_a_slab_count_the_same_free_bytes(tmp_path, capsys, monkeypatch):
    """Fails if the blocks that a filesystem reserves count as free: for root alone they did, and the plan had less."""
    facts = types.SimpleNamespace(f_blocks=3 << 18, f_frsize=4096, f_bfree=3 << 18, f_bavail=1 << 18, f_files=0)
    monkeypatch.setattr(os, "statvfs", lambda fd: facts)
    main(["doctor", str(tmp_path)])
    assert "1.0 GiB; the filesystem reserves 2.0 GiB more" in capsys.readouterr().out
    with zero_nvme.Slab(tmp_path, allow_memory=True) as slab, pytest.raises(zero_nvme.NvmeError, match=r"1\.00 GiB"):
        slab.reserve(2 << 30)


def test_tune_prints_yaml(tmp_path, capsys):
    assert main(["tune", str(tmp_path), "--mib", "2"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if not line.startswith("#")]
    found = dict(line.split(": ") for line in lines)
    assert found["backend"] in zero_nvme.BACKENDS
    zero_nvme.Options(block_bytes=int(found["block_bytes"]), inflight_bytes=int(found["inflight_bytes"]))


def test_bench_prints_a_line_for_reads_writes_and_both(tmp_path, capsys):
    assert main(["bench", str(tmp_path), "--mib", "8", "--block-mib", "1", "--rounds", "1"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "8 MiB, medians of 1, GB/s" in head
    assert [line.split()[0] for line in lines] == ["read", "write", "mixed"] and all(float(line[6:]) for line in lines)


def test_measured_weights_are_rates(tmp_path):
    """Fails if a folder gets no rate, or one that pattern_of() refuses."""
    rates = measure_weights([str(tmp_path)] * 2, zero_nvme.Options("threads", direct=False), nbytes=1 << 20)
    assert len(rates) == 2 and min(rates) > 0
