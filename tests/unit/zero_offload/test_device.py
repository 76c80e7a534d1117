"""What only a device's vendor provides: registering host memory, or memory that torch pins where nothing registers."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from zero_offload import OffloadError
from zero_offload.arena import PAGE_BYTES, Arena
from zero_offload.device import register, registers, unregister
from zero_offload.errors import BudgetError


class Module:
    """Stands for the module of a device that registers memory as CUDA's runtime does."""

    def __init__(self, status: int) -> None:
        self.calls: list[tuple[object, ...]] = []
        self._status = status

    def cudart(self) -> SimpleNamespace:
        return SimpleNamespace(cudaHostRegister=self._call, cudaHostUnregister=self._call)

    def _call(self, *arguments: object) -> int:
        self.calls.append(arguments)
        return self._status


@pytest.fixture
def module(request, monkeypatch):
    found = Module(getattr(request, "param", 0))
    monkeypatch.setattr(torch.cpu, "cudart", found.cudart, raising=False)
    monkeypatch.setattr(torch.cpu, "device", lambda _: nullcontext(), raising=False)
    return found


def test_memory_is_registered_whole_and_given_back_by_its_address(module):
    host, device = torch.zeros(64, dtype=torch.uint8), torch.device("cpu")
    assert registers(device)
    register(host, device)
    unregister(host, device)
    assert module.calls == [(host.data_ptr(), 64, 0), (host.data_ptr(),)]


@pytest.mark.parametrize("module", [2], indirect=True)
def test_memory_that_cannot_be_registered_is_an_error_with_a_way_out(module):
    with pytest.raises(OffloadError, match="64 bytes failed with status 2 of the cpu runtime; all of it must fit"):
        register(torch.zeros(64, dtype=torch.uint8), torch.device("cpu"))


def test_an_arena_that_is_pinned_begins_at_a_page_and_says_why_it_has_no_huge_ones(monkeypatch):
    taken = []
    empty = torch.empty

    def pinned(nbytes, *, dtype, pin_memory):
        assert pin_memory
        taken.append(empty(nbytes, dtype=dtype))  # no accelerator here pins any
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
    with pytest.raises(BudgetError, match="arena of .* cannot be pinned .cannot allocate.; put more on nvme"):
        Arena(10_000, pinned=True)
