"""`tests.chunks` makes the chunk small wherever it counts. Fails if a module is left with the true size beside it."""

import importlib
import pkgutil

import zero_core
import zero_offload
from tests.chunks import KNOW_CHUNKS

# Where it is defined; a checkpoint's own tiles; the pieces that an average is taken in.
UNTOUCHED = {"zero_core.store", "zero_core.checkpoint.plan", "zero_core.averaging"}


def test_every_module_that_knows_the_chunk_is_listed() -> None:
    know = set()
    for package in (zero_core, zero_offload):
        for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not found.name.endswith("__main__") and hasattr(importlib.import_module(found.name), "CHUNK_NUMEL"):
                know.add(found.name)
    assert know - UNTOUCHED == set(KNOW_CHUNKS)
