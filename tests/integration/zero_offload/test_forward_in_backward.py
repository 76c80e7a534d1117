"""Forwards inside a backward, on tiers: the gradients of plain torch, wherever the parameters are between uses."""

import pytest

from tests import kit
from tests.chunks import TILE, small_chunks
from tests.integration.zero_core import toys
from tests.integration.zero_core.test_forward_in_backward import MODELS
from zero_offload import MemoryByteStore, TieredStore


@pytest.mark.promise("forward-in-backward")
@kit.on_ranks(1, 2)
@pytest.mark.parametrize("place", ["host", "nvme"])
def test_trains_as_plain_torch(place):
    with small_chunks():
        for name in ("adjoint", "deep", "deep reentrant", "equilibrium", "hook inside a block", "energy"):
            store = TieredStore(place, place, place, nvme=MemoryByteStore(), tile_numel=TILE)
            toys.train(MODELS[name], steps=2, build=toys.adamw, store=store, tolerance=1e-4)
