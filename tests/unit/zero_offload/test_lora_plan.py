"""The plan of a 70 B QLoRA on one GPU, in arithmetic: fails if a frozen element costs more than its bytes."""

import pytest
import torch

import zero_offload
from tests.unit.zero_offload.sizes import transformer, unit
from zero_offload import Hardware
from zero_offload.planning.model_sizes import ModelSizes

HIDDEN, INNER, KEYS, LAYERS, VOCABULARY, RANK = 8192, 28672, 1024, 80, 128256, 16
LINEARS = [(HIDDEN, HIDDEN)] * 2 + [(HIDDEN, KEYS)] * 2 + [(HIDDEN, INNER)] * 3
BLOCK = sum(rows * columns for rows, columns in LINEARS)
ADAPTERS = sum((rows + columns) * RANK for rows, columns in LINEARS)
SCALES = BLOCK // 64  # one byte for 64 values, as double quantisation leaves
GIB = 1 << 30


def llama_70b() -> ModelSizes:
    """Packed 4-bit blocks, two values a byte, with their scales; embedding and head in 16 bits; adapters of rank 16."""
    packed = {"own_dtype": torch.uint8, "trained": False}
    blocks = [
        part
        for i in range(LAYERS)
        for part in (
            unit(f"layers.{i}", BLOCK // 2 + SCALES, matmul_numel=BLOCK, beside=i, **packed),
            unit(f"layers.{i}:trained", ADAPTERS, is_block=False, beside=i),
        )
    ]
    ends = [unit(name, VOCABULARY * HIDDEN, is_block=False, trained=False) for name in ("embedding", "head")]
    return ModelSizes((ends[0], *blocks, ends[1]), 2 * HIDDEN, 34 * HIDDEN, 34 * HIDDEN, 6 * VOCABULARY)


@pytest.mark.promise("qlora-70b")
def test_a_70b_qlora_fits_24_gib_of_gpu_64_gib_of_host_and_one_drive() -> None:
    sizes = llama_70b()
    values = LAYERS * BLOCK + 2 * VOCABULARY * HIDDEN
    assert values == pytest.approx(70e9, rel=0.02)
    gpu = Hardware(device="cuda", device_gib=24, host_gib=64, nvme_gib=1000)
    kinds = {"parameters": "nvme", "gradients": "host", "optimizer": "host"}
    planned = zero_offload.plan(sizes, gpu, tokens=2048, activations="recompute", **kinds)
    base = LAYERS * (BLOCK // 2 + SCALES) + 2 * 2 * VOCABULARY * HIDDEN
    trained = LAYERS * ADAPTERS
    assert planned.bytes_of("nvme", "parameters") == pytest.approx(base + 2 * trained, rel=1e-3)
    assert base < 0.6 * values
    assert planned.bytes_of("host", "gradients") == pytest.approx(2 * trained, rel=1e-3)
    assert planned.bytes_of("host", "optimizer") == pytest.approx(12 * trained, rel=1e-3)
    assert planned.total("device") < 24 * GIB and planned.total("host") < 64 * GIB
    # The same model, all of it trained: 16 bytes of a value and not half a byte.
    whole = transformer(layers=LAYERS, hidden_size=HIDDEN, intermediate_size=INNER, gated=True)
    assert not zero_offload.fits(whole, gpu, tokens=2048, activations="recompute", **kinds)


@pytest.mark.promise("frozen-tiers")
def test_slots_are_not_as_large_as_the_embedding_nor_taken_by_adapters() -> None:
    """Blocks take turns in three slots of their size; embedding and head, and all adapters, have slots of their own."""
    planned = zero_offload.plan(llama_70b(), parameters="nvme", gradients="nvme", optimizer="nvme", prefetch_bytes=0)
    store = planned.store
    assert (store.unit_slots, store.unit_slot_bytes) == (3, BLOCK // 2 + SCALES)
    assert len(store.own_slots) == LAYERS + 2
    once = 2 * 2 * VOCABULARY * HIDDEN + 2 * LAYERS * ADAPTERS  # read when they are first used, and kept
    everything = planned.bytes_of("nvme", "parameters")
    assert planned.account.moved["nvme"]["forward_read"] == pytest.approx(everything - once, rel=1e-3)
