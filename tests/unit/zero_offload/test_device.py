"""What only a device's vendor provides: registering host memory, or memory that torch pins where nothing registers."""

import ctypes
import mmap
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from zero_offload import OffloadError
from zero_offload.errors import BudgetError
from zero_offload.memory import host_registration
from zero_offload.memory.arena import PAGE_BYTES, Arena
from zero_offload.memory.host_registration import parts, register, registers, unregister

pytestmark = pytest.mark.promise("device-registration")


class Module:
    """Stands for the module of a device that registers memory as CUDA's runtime does."""

    def __init__(self, *statuses: int) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._statuses = list(statuses)  # of the first calls; 0 of those after them

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self._call, cudaHostUnregister=self._call)

    def _call(self, *arguments: object) -> int:
        self.calls.append(arguments)
        return self._statuses.pop(0) if self._statuses else 0


@pytest.fixture
def module(request, monkeypatch):
    found = Module(*getattr(request, "param", ()))
    monkeypatch.setattr(torch.cpu, "cudart", found.cudart, raising=False)
    monkeypatch.setattr(torch.cpu, "device", lambda _: nullcontext(), raising=False)
    return found


CPU = torch.device("cpu")


def mapped(pages: int) -> tuple[mmap.mmap, torch.Tensor]:
    """Anonymous memory that nobody has touched."""
    mapping = mmap.mmap(-1, pages * PAGE_BYTES)
    return mapping, torch.frombuffer(mapping, dtype=torch.uint8)


def test_large_memory_is_registered_in_blocks_and_keeps_its_values(module, monkeypatch):
    monkeypatch.setattr(host_registration, "BLOCK_BYTES", 4 * PAGE_BYTES)
    _, host = mapped(10)
    host[::PAGE_BYTES] = torch.arange(10, dtype=torch.uint8)
    register(host, CPU)
    at = host.data_ptr()
    assert registers(CPU) and module.calls == [
        (at, 4 * PAGE_BYTES, 0),
        (at + 4 * PAGE_BYTES, 4 * PAGE_BYTES, 0),
        (at + 8 * PAGE_BYTES, 2 * PAGE_BYTES, 0),
    ]
    assert host[::PAGE_BYTES].tolist() == list(range(10)) and int(host.sum()) == sum(range(10))
    module.calls.clear()
    unregister(host, CPU)
    assert module.calls == [(at + start * PAGE_BYTES,) for start in (0, 4, 8)]


@pytest.mark.parametrize("populates", [True, False], ids=["madvise", "before Linux 5.14"])
def test_all_pages_are_in_memory_before_the_runtime_is_called(module, monkeypatch, populates):
    if not populates:
        monkeypatch.setattr(host_registration, "_MADV_POPULATE_WRITE", 10_000)  # which no kernel knows
    mapping, host = mapped(64)
    seen = []

    def look(address, nbytes, flags):
        present = (ctypes.c_ubyte * (nbytes // PAGE_BYTES))()
        assert ctypes.CDLL(None).mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), present) == 0
        seen.append(bytes(present))
        return 0

    before = (ctypes.c_ubyte * 64)()
    ctypes.CDLL(None).mincore(ctypes.c_void_p(host.data_ptr()), ctypes.c_size_t(host.nbytes), before)
    monkeypatch.setattr(module, "_call", look)
    register(host, CPU)
    assert not any(before) and seen == [bytes([1] * 64)]


@pytest.mark.parametrize("module", [(0, 2)], indirect=True)
def test_memory_that_cannot_be_registered_is_an_error_with_the_limits_and_nothing_stays_registered(module, monkeypatch):
    monkeypatch.setattr(host_registration, "BLOCK_BYTES", 4 * PAGE_BYTES)
    _, host = mapped(8)
    told = r"on cpu with status 2, after .* needs .* as free host memory, .*ulimit -l.* put .*Or raise the limit"
    with pytest.raises(OffloadError, match=told):
        register(host, CPU)
    assert module.calls[-1] == (host.data_ptr(),)


@pytest.mark.parametrize("module", [(0, 5)], indirect=True)
def test_an_error_of_giving_back_is_told(module):
    host = torch.zeros(64, dtype=torch.uint8)
    register(host, CPU)
    with pytest.raises(OffloadError, match="cudaHostUnregister returned 5 on cpu; end the process"):
        unregister(host, CPU)


def test_how_far_a_long_registration_has_come_is_logged(module, monkeypatch, caplog):
    monkeypatch.setattr(host_registration, "BLOCK_BYTES", 4 * PAGE_BYTES)
    register(mapped(8)[1], CPU)
    assert not caplog.messages
    monkeypatch.setattr(host_registration, "TELL_SECONDS", -1.0)
    register(mapped(8)[1], CPU)
    assert len(caplog.messages) == 2 and "of host memory with cpu" in caplog.messages[1]


def test_a_copy_is_cut_where_a_block_ends(monkeypatch):
    monkeypatch.setattr(host_registration, "BLOCK_BYTES", 4 * PAGE_BYTES)
    _, host = mapped(12)
    numbers = host.view(torch.float32)
    page = PAGE_BYTES // 4
    assert list(parts(numbers[: 4 * page], host)) == [(0, 4 * page)]
    assert list(parts(numbers[page : 11 * page], host)) == [(0, 3 * page), (3 * page, 7 * page), (7 * page, 10 * page)]
    assert list(parts(numbers[4 * page : 5 * page], host)) == [(0, page)]


@pytest.mark.promise("device-no-register")
def test_an_arena_that_is_pinned_begins_at_a_page_and_says_why_it_has_no_huge_ones(monkeypatch):
    taken = []
    empty = torch.empty

    def pinned(nbytes, *, dtype, device, pin_memory):
        assert pin_memory
        taken.append(empty(nbytes, dtype=dtype, device=device))  # no accelerator here pins any
        return taken[-1]

    monkeypatch.setattr(torch, "empty", pinned)
    arena = Arena(10_000, pinned=True)
    block, whole = arena.take(5_000), arena.whole()
    view = block.view(torch.float32, 8)
    assert view.data_ptr() % PAGE_BYTES == 0 and view.data_ptr() == whole.data_ptr() and whole.nbytes == 12_288
    start, stop = taken[0].data_ptr(), taken[0].data_ptr() + taken[0].nbytes
    assert start <= whole.data_ptr() and whole.data_ptr() + whole.nbytes <= stop
    assert "torch pinned it" in arena.advice["MADV_HUGEPAGE"]

    def none_left(*arguments, **options):
        raise RuntimeError("cannot allocate")

    monkeypatch.setattr(torch, "empty", none_left)
    with pytest.raises(
        BudgetError, match="of host memory cannot be pinned .cannot allocate.; put .*. Or raise ulimit -l"
    ):
        Arena(10_000, pinned=True)
