"""Tells zero-sim's race detector what native code does with memory: zero_nvme's requests, zero_optim_cpu's tiles.

The detector sees torch's operators, and so `TorchStep` and `MemoryByteStore`, without help. What goes past torch by
address is wrapped here while the tests run, and so is what threads tell each other through plain attributes: the
shipped packages know nothing of the detector.
"""

import threading
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from torch import Tensor

import zero_sim

_installed = False


def install() -> None:
    """Wrap what there is. Once a process."""
    global _installed
    if _installed:
        return
    _installed = True
    _checkpoints()
    with suppress(ImportError):
        _transfers()
    with suppress(ImportError):
        _nvme()
    with suppress(ImportError):
        _cpu_step()


def _wrap(owner: Any, name: str, around: Callable[..., Any]) -> None:
    """Replace `owner.name` by `around`, which is given what was there before the arguments."""
    inner = getattr(owner, name)

    def wrapped(*args: Any, **options: Any) -> Any:
        return around(inner, *args, **options)

    setattr(owner, name, wrapped)


class _Tasks:
    """Native work under way, by the Python object that stands for it."""

    def __init__(self) -> None:
        self._tasks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()

    def add(self, thing: Any, task: Any) -> None:
        self._tasks[thing] = task

    def finish(self, thing: Any) -> None:
        """The calling thread has learnt that the work is over."""
        if (task := self._tasks.get(thing)) is not None:
            task.finish()

    def finish_all(self, wanted: Callable[[Any], bool]) -> None:
        for thing in [thing for thing in list(self._tasks) if wanted(thing)]:
            self.finish(thing)


def _transfers() -> None:
    """One thread finds that a transfer is over and notes it in the transfer, where others read it without a lock."""
    from zero_offload.memory.transfers import Transfer

    locks = [threading.Lock() for _ in range(1009)]  # a transfer has no place for one

    def done(inner: Any, transfer: Any) -> bool:
        with locks[id(transfer) // 16 % len(locks)]:
            return inner(transfer)

    def wait(inner: Any, transfer: Any) -> None:
        inner(transfer)
        transfer.done()

    _wrap(Transfer, "done", done)
    _wrap(Transfer, "wait", wait)


def _nvme() -> None:
    """A request touches its memory from its submission until somebody learns that it is done."""
    from zero_nvme.io.io_queue import IOQueue
    from zero_nvme.io.ticket import Ticket

    tasks = _Tasks()

    def start(inner: Any, queue: Any, write: bool, offset: int, memory: Any, *rest: Any, **options: Any) -> Any:
        at = [(memory.address, memory.nbytes)]
        touched = {"reads": at} if write else {"writes": at}
        task = zero_sim.begin("zero_nvme writes a file" if write else "zero_nvme reads a file", **touched)
        ticket = inner(queue, write, offset, memory, *rest, **options)
        tasks.add(ticket, task)
        return ticket

    def done(inner: Any, ticket: Any) -> bool:
        if found := inner(ticket):
            tasks.finish(ticket)
        return found

    def raise_error(inner: Any, ticket: Any) -> None:
        tasks.finish(ticket)  # called by whoever has waited
        inner(ticket)

    def settled(inner: Any, queue: Any, *args: Any, **options: Any) -> Any:
        found = inner(queue, *args, **options)
        tasks.finish_all(lambda ticket: ticket._queue is queue)
        return found

    _wrap(IOQueue, "_start", start)
    _wrap(Ticket, "done", done)
    _wrap(Ticket, "_raise_error", raise_error)
    for name in ("drain", "cancel", "close"):
        _wrap(IOQueue, name, settled)


def _cpu_step() -> None:
    """The kernels of zero_optim_cpu read and write tensors by address; `start` returns while they do."""
    from zero_optim_cpu.step import CpuStep, Handle

    tasks = _Tasks()

    def arrays(tile: Any) -> list[Tensor]:
        return [tile.parameter, *tile.states.values()]

    def touches(name: str, of: Callable[..., tuple[list[Tensor], list[Tensor]]]) -> None:
        """`of` takes the method's arguments and returns what it reads, and what it writes, before it returns."""

        def around(inner: Any, step: Any, *args: Any, **options: Any) -> Any:
            reads, writes = of(*args, **options)
            zero_sim.host_access(f"CpuStep.{name}", reads=reads, writes=writes)
            found = inner(step, *args, **options)
            zero_sim.host_access(f"CpuStep.{name}", reads=reads, writes=writes)
            return found

        _wrap(CpuStep, name, around)

    touches("update", lambda tile, segments, scale: ([tile.gradient], arrays(tile)))
    touches("read", lambda tile, name: (arrays(tile), []))
    touches("write", lambda tile, name, values: ([values], arrays(tile)))
    touches("accumulate", lambda into, values: ([values], [into]))
    touches("chunk_norms_squared", lambda values: ([values], []))

    def start(inner: Any, step: Any, tile: Any, segments: Any, scale: float) -> Any:
        task = zero_sim.begin("CpuStep.start", reads=[tile.gradient], writes=arrays(tile))
        handle = inner(step, tile, segments, scale)
        tasks.add(handle, task)
        weakref.finalize(handle, task.finish)  # dropping it waits
        return handle

    def done(inner: Any, handle: Any) -> bool:
        if found := inner(handle):
            tasks.finish(handle)
        return found

    def wait(inner: Any, handle: Any, *args: Any) -> None:
        inner(handle, *args)
        tasks.finish(handle)

    _wrap(CpuStep, "start", start)
    _wrap(Handle, "done", done)
    _wrap(Handle, "wait", wait)


def _checkpoints() -> None:
    """Files of a checkpoint are written from, and read into, the memory of tensors on the host."""
    from zero_core.checkpoint import safetensors

    def memory_of(inner: Any, tensor: Tensor) -> memoryview:
        zero_sim.host_access("a checkpoint's file", reads=[tensor])
        return inner(tensor)

    _wrap(safetensors, "memory_of", memory_of)
