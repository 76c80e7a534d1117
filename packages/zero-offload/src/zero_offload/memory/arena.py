"""Maps exactly the planned bytes of host memory once, counts them in a budget, and makes views into them.

Owns memory and nothing else. Not here: who may use which view, and when (in slots.py and tiles/).
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..core import CHUNK_NUMEL, round_up
from ..errors import LESS, BudgetError, ClosedError, gib


class HostBudget:
    """A budget of `nbytes` of host memory. Give the same one to several stores: `TieredStore(host_bytes=budget)`.

    A store takes the bytes of its arena when it is attached, and again when it wakes up. It gives them back when it
    sleeps, is closed or is forgotten. Threads may share it, processes may not.
    """

    def __init__(self, nbytes: int) -> None:
        if nbytes < 0:
            raise ValueError(f"HostBudget({nbytes}): the bytes cannot be negative")
        self.nbytes = nbytes
        self._lock = threading.Lock()
        self._taken = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that no store has taken."""
        return self.nbytes - self._taken

    def take(self, nbytes: int) -> None:
        """Takes `nbytes`. Raises BudgetError if fewer are free; then nothing is taken."""
        with self._lock, self.explained():
            if nbytes > self.free_bytes:
                raise BudgetError(f"this store needs {gib(nbytes)}, and the HostBudget has {gib(self.free_bytes)} left")
            self._taken += nbytes

    @contextmanager
    def explained(self) -> Iterator[None]:
        """A context in which a BudgetError also names the bytes of the other stores."""
        try:
            yield
        except BudgetError as error:
            raise BudgetError(
                f"{error}. Other stores have {gib(self._taken)} of the HostBudget of {gib(self.nbytes)}: give "
                "HostBudget more bytes. Or call sleep() or close() of another store"
            ) from error

    def give(self, nbytes: int) -> None:
        """Gives `nbytes` back."""
        with self._lock:
            self._taken -= nbytes


HUGE_PAGE_BYTES = 2 << 20
PAGE_BYTES = 4096


class Block:
    """`nbytes` of an arena from `offset`. Every view has a storage of its own, exactly as long as the view is.

    So a caller can swap a view's memory into another tensor of the same length.
    """

    __slots__ = ("_arena", "nbytes", "offset")

    def __init__(self, arena: Arena, offset: int, nbytes: int) -> None:
        self._arena, self.offset, self.nbytes = arena, offset, nbytes

    def view(self, dtype: torch.dtype, numel: int, start_bytes: int = 0) -> Tensor:
        """(numel,) of `dtype`, `start_bytes` into the block."""
        if start_bytes + numel * dtype.itemsize > self.nbytes:
            raise AssertionError(f"view of {numel} {dtype} at {start_bytes} in a block of {self.nbytes} bytes")
        if numel == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        return torch.frombuffer(self._arena.memory, dtype=dtype, count=numel, offset=self.offset + start_bytes)

    def raw(self, start_bytes: int, stop_bytes: int) -> Tensor:
        """Bytes [start, stop) as uint8, for transfers."""
        return self.view(torch.uint8, stop_bytes - start_bytes, start_bytes)

    def widen(self, dtype: torch.dtype, numel: int) -> None:
        """Turns the first `numel` elements of `dtype`, a 16-bit one, into fp32, in place.

        Chunk by chunk from the end: chunk k of the wide form covers narrow chunks 2k and 2k + 1, which are done then.
        """
        narrow, wide = self.view(dtype, numel), self.view(torch.float32, numel)
        for start in reversed(range(0, numel, CHUNK_NUMEL)):
            stop = min(start + CHUNK_NUMEL, numel)
            wide[start:stop].copy_(narrow[start:stop].to(torch.float32))


class Arena:
    """Host memory in blocks, taken once, one after another, that end with it. A view keeps the memory while it lives.

    Between give_back() and take_back() the blocks have no memory. Afterwards they have new memory, at the same offsets
    of the arena. So a view that was kept shows the old values, and never another block's memory.

    The mapping begins at a 2 MiB boundary, asks for huge pages (3 × on direct I/O) and stays with this process on fork.
    Pages cost memory when they are first touched. `pinned`: memory of torch's allocator for the accelerator instead,
    for a device whose module registers none: rounded up as that allocator does, without huge pages, and kept by it.
    `budget`: the bytes are taken from it while the arena has memory. `advice`: the kernel's answers at construction.
    """

    def __init__(self, nbytes: int, *, pinned: bool = False, budget: HostBudget | None = None) -> None:
        self.nbytes = nbytes
        self._is_pinned, self._budget = pinned, budget
        self._taken = 0
        self._memory: memoryview | None = None  # begins at the boundary of the first block
        self.advice = self.take_back()

    def take_back(self) -> dict[str, str]:
        """Allocates memory for all blocks, with undefined values. Raises BudgetError, and then there is none.

        Returns the kernel's answer to each request, empty if there is memory already.
        """
        if self._memory is not None:
            return {}
        if self._budget is not None:
            self._budget.take(self.nbytes)
        try:
            memory, alignment, advice = self._pinned() if self._is_pinned else self._mapped()
            start = -torch.frombuffer(memory, dtype=torch.uint8, count=1).data_ptr() % alignment
            self._memory = memoryview(memory).cast("B")[start:]
        except BaseException:
            if self._budget is not None:
                self._budget.give(self.nbytes)
            raise
        return advice

    def give_back(self) -> None:
        """Gives the memory back to the kernel (or torch), which has it when the last view is gone. Idempotent."""
        if self._memory is not None and self._budget is not None:
            self._budget.give(self.nbytes)
        self._memory = None

    def keep_only(self, blocks: Iterable[Block]) -> None:
        """Gives the pages of all other blocks back to the kernel. When they are touched again they are zero.

        Does nothing if torch pinned the arena. No page may be registered with a device.
        """
        if self._memory is None or self._is_pinned:
            return
        gone, start = 0, len(self._memory.obj) - self._memory.nbytes  # type: ignore[arg-type]  # of block 0 in the mapping
        for first, stop in [*sorted((each.offset, each.offset + each.nbytes) for each in blocks), (self._taken, 0)]:
            if gone < first:
                self._memory.obj.madvise(mmap.MADV_DONTNEED, start + gone, first - gone)  # type: ignore[attr-defined]
            gone = stop

    @property
    def has_memory(self) -> bool:
        """Whether the blocks have memory."""
        return self._memory is not None

    def _pinned(self) -> tuple[Any, int, dict[str, str]]:
        try:
            nbytes = round_up(self.nbytes, PAGE_BYTES) + PAGE_BYTES
            tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True, device="cpu")
        except RuntimeError as error:
            raise BudgetError(
                f"{gib(self.nbytes)} of host memory cannot be pinned ({error}); {LESS}. Or raise ulimit -l"
            ) from error
        memory: Any = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
        memory.tensor = tensor  # views keep the buffer, and the buffer keeps the tensor
        return memory, PAGE_BYTES, {"MADV_HUGEPAGE": "the device's module registers no memory, so torch pinned it"}

    def _mapped(self) -> tuple[Any, int, dict[str, str]]:
        nbytes = self.nbytes
        try:
            # Private, not shared: shared anonymous memory is shmem, which has another huge page policy.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0)
            mapping = mmap.mmap(-1, round_up(nbytes, PAGE_BYTES) + HUGE_PAGE_BYTES, flags=flags)
        except OSError as error:
            raise BudgetError(f"{gib(nbytes)} of host memory cannot be mapped ({error}); {LESS}") from error
        return mapping, HUGE_PAGE_BYTES, self._advise(mapping)

    @property
    def memory(self) -> memoryview:
        """The bytes, as a buffer. Raises ClosedError after close(), or while they were given back."""
        if self._memory is None:
            raise ClosedError("no host memory: if the store sleeps, call its wake(). If it is closed, make a new store")
        return self._memory

    @staticmethod
    def _advise(mapping: mmap.mmap) -> dict[str, str]:
        """The kernel's answer to each request: "ok" or the error. A refusal costs speed or a fork, not bits."""
        answers = {}
        for name in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            try:
                mapping.madvise(getattr(mmap, name))
                answers[name] = "ok"
            except OSError as error:
                answers[name] = str(error)
        return answers

    def take(self, nbytes: int) -> Block:
        """The next `nbytes`, from a page boundary. AssertionError beyond the planned bytes: that is a bug of ours."""
        if self._memory is None:
            raise ClosedError("the store has no host memory, because it was closed; make a new store")
        size = round_up(nbytes, PAGE_BYTES)
        if self._taken + size > round_up(self.nbytes, PAGE_BYTES):
            raise AssertionError(f"arena of {self.nbytes} bytes: {self._taken} taken, {size} wanted")
        block = Block(self, self._taken, size)
        self._taken += size
        return block

    def whole(self) -> Tensor:
        """All bytes (uint8), to register them with a device."""
        nbytes = round_up(self.nbytes, PAGE_BYTES)
        return Block(self, 0, nbytes).raw(0, nbytes)

    close = give_back
