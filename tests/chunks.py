"""Smaller chunks of the gradient norm, for tests whose units must be of several tiles and need not be large.

A tile is whole chunks, and a chunk has 2^20 elements; so a unit of three tiles takes millions of elements, which cost
time and show nothing that thousands do not. The true size is test_exactness's, the bit-identity suite's and that of
every run through zero-train.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from unittest import mock

TILE = 1 << 14  # elements of a small chunk, which is the smallest tile
KNOW_CHUNKS = (
    "zero_core.precision",
    "zero_core.runtime.gradient_access",
    "zero_offload.tiles.gradients",
    "zero_offload.tiles.tile",
    "zero_offload.torch_step",
)


@contextmanager
def small_chunks() -> Iterator[None]:
    """Inside, a chunk has TILE elements, 64 times fewer than it has."""
    with ExitStack() as stack:
        for module in KNOW_CHUNKS:
            stack.enter_context(mock.patch(f"{module}.CHUNK_NUMEL", TILE))
        yield
