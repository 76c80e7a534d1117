"""Frees a sharded model's memory for other uses (`sleep`), and takes it back (`wake`).

Owns the order of these steps, and that all ranks sleep or none. Not here: which bytes go where (in the store).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from ..errors import ZeroError
from ..util.freed_memory import Keeper, give_back_freed_memory
from .shard import Handle, handle


def sleep(model: nn.Module, to: Keeper | None = None) -> None:
    """Frees the device and host memory of the model's shards, gradients and optimizer states. Collective.

    to: a ByteStore, such as zero_nvme.Slab([path]), that keeps the bytes until wake(). None: the slowest one that the
    store has; for a DeviceStore on a discrete device, host memory. Updates under way are finished first; gradients that
    wait for a step are kept. Buffers, parameters that are not sharded, and unsharded gradients that wait at stage 1 or
    after no_sync, stay in memory. Until wake(), every use of a parameter raises; close() of the optimizer works.
    Raises ZeroError inside forward, backward or gathered(), and the store's error where it has no room for its bytes,
    or cannot write them. Then every rank is awake and has lost nothing.
    """
    found = handle(model)
    store = found.store
    if found.engine.busy:
        raise ZeroError("sleep() inside forward or backward: call it between steps")
    with torch.no_grad():
        found.settle()
        try:
            _together(found, "sleep()", lambda: store.sleep(to))
        except BaseException:
            store.wake()
            raise
        found.engine.pool.clear()
        for unit in found.units:
            if unit.secondary is not None:
                unit.secondary.forget()
    module = torch.get_device_module(found.ranks.device)
    if hasattr(module, "empty_cache"):  # freed memory that torch and glibc keep is of no use to others
        module.empty_cache()
    give_back_freed_memory()


def wake(model: nn.Module) -> None:
    """Takes the memory back, with the same bits. Collective. Nothing happens where the store is awake.

    Raises the store's error where there is no memory, or where the bytes cannot be read, and ZeroError on the other
    ranks; wake() may then be called again on all of them.
    """
    found = handle(model)
    with torch.no_grad():
        _together(found, "wake()", found.store.wake)


def _together(found: Handle, what: str, call: Callable[[], None]) -> None:
    """Makes the call on every rank. Raises on all of them if it failed on one."""
    error: Exception | None = None
    try:
        call()
    except Exception as failure:
        error = failure
    failed = found.ranks.sum_everywhere(found.ranks.numbers([float(error is not None)]), what)
    if error is not None:
        raise error
    if count := int(failed.item()):
        raise ZeroError(f"{what} failed on {count} of {found.ranks.size} ranks, not on this one: see their errors")
