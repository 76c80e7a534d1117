"""`tests.chunks` makes the chunk small wherever it counts. Fails if a module is left with the true size beside it."""

import importlib
import re
from pathlib import Path

import zero_core
import zero_offload
from tests.chunks import TILE, UNTOUCHED, small_chunks
from zero_core.store import CHUNK_NUMEL


def test_every_module_that_knows_the_chunk_is_listed() -> None:
    def sizes():
        return {name: importlib.import_module(name).CHUNK_NUMEL for name in know}

    know = set()
    for package in (zero_core, zero_offload):
        top = Path(package.__path__[0])
        for path in top.rglob("*.py"):
            if re.search(r"import .*\bCHUNK_NUMEL\b", path.read_text()):
                know.add(".".join((package.__name__, *path.relative_to(top).with_suffix("").parts)))
    assert "zero_offload.layout.tile" in know
    with small_chunks():
        assert sizes() == {name: CHUNK_NUMEL if name in UNTOUCHED else TILE for name in know}
    assert set(sizes().values()) == {CHUNK_NUMEL}
