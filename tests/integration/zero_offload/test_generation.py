"""Generation of unequal length between steps, with everything on NVMe: the text of the plain model, and the same bits.

Fails if a rank that is done reads other shards than the others wait for.
"""

from typing import Any

import pytest
import torch

from tests.integration.zero_core.generating import generate_between
from zero_offload import MemoryByteStore, TieredStore, TorchStep


def nvme() -> TieredStore:
    return TieredStore("nvme", "nvme", "nvme", MemoryByteStore(), TorchStep())


@pytest.mark.promise("generation-synced")
@pytest.mark.parametrize("size", [2, 3])
def test_generation_of_unequal_length_from_nvme(ranks: Any, small_chunks: None, size: int) -> None:
    pytest.importorskip("transformers")
    ranks(size).run(generate_between, 3, {"param_dtype": torch.bfloat16, "prefetch_bytes": 60_000}, nvme)
