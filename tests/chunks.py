"""Smaller chunks of the gradient norm, for tests whose units must be of several tiles and need not be large.

A tile is whole chunks, and a chunk has 2^20 elements; so a unit of three tiles takes millions of elements, which cost
time and show nothing that thousands do not. The true size is the bit-identity suite's and that of every run
through zero-train.
"""

import functools
import importlib
import pkgutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from unittest import mock

import zero_core
import zero_offload

TILE = 1 << 14  # elements of a small chunk, which is the smallest tile
# Where it is defined; a checkpoint's own tiles; the pieces that an average is taken in.
UNTOUCHED = {"zero_core.store", "zero_core.shard_spec", "zero_core.checkpoint.plan", "zero_core.api.averaged_model"}


@contextmanager
def small_chunks() -> Iterator[None]:
    """Inside, a chunk has TILE elements, 64 times fewer than it has."""
    with ExitStack() as stack:
        for module in know_chunks():
            stack.enter_context(mock.patch.object(module, "CHUNK_NUMEL", TILE))
        yield


@functools.cache
def know_chunks() -> list[ModuleType]:
    """The modules that count in chunks. Each imports the constant by its name, and so has one of its own."""
    found = (each for p in (zero_core, zero_offload) for each in pkgutil.walk_packages(p.__path__, f"{p.__name__}."))
    names = {each.name for each in found if not each.name.endswith("__main__")} - UNTOUCHED
    return [module for module in map(importlib.import_module, sorted(names)) if hasattr(module, "CHUNK_NUMEL")]
