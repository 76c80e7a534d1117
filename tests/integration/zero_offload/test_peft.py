"""PEFT as people write it: get_peft_model, then shard, and everything that PEFT does with a model after that.

Each test does the same with plain PEFT. On one rank, fp32 and the default store give its bits; tiers give the same bits
as each other, and are near. On two ranks, which see half of each batch, plain PEFT is trained on all of it.
"""

from __future__ import annotations

import functools
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft", reason="peft is not installed: nox -s peft")
pytest.importorskip("transformers")

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

import zero_core
from zero_core.errors import ChangedParameterError
from zero_offload import MemoryByteStore, TieredStore

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's own, of saved embeddings and of merges

KINDS: dict[str, dict[str, Any]] = {
    "lora": {},
    "dora": {"use_dora": True},
    "embeddings": {"target_modules": ["embed_tokens", "q_proj"]},
    "modules_to_save": {"modules_to_save": ["lm_head"]},
    "bias": {"bias": "lora_only"},
    "rslora": {"use_rslora": True},
    "all": {"target_modules": "all-linear", "lora_dropout": 0.1},
}
PROMPT = torch.arange(8)[None]
WEIGHTS = "adapter_model.safetensors"


def base(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4, attention_bias=True)).to(dtype)


def adapter(kind: str = "lora") -> LoraConfig:
    options = {"target_modules": ["q_proj", "v_proj"], **KINDS[kind]}
    return LoraConfig(r=4, lora_alpha=8, init_lora_weights=False, **options)


def build(kind: str = "lora", dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(1)
    return get_peft_model(base(dtype), adapter(kind))


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    """Its updates are as close as its gradients; AdamW's are not, where a gradient is near 0."""
    return torch.optim.SGD(parameters, lr=0.5, momentum=0.9)


def make_store(tier: str | None, nvme: Any = None) -> TieredStore | None:
    return None if tier is None else TieredStore(tier, tier, tier, nvme=nvme or MemoryByteStore(), tile_numel=1 << 20)


def train(model: Any, optimizer: Any, first: int, last: int) -> list[float]:
    """Mean losses of four rows a step, of which each rank has its part."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    model.train()
    losses = []
    for step in range(first, last):
        tokens = torch.randint(0, 64, (4, 8), generator=torch.Generator().manual_seed(step))[rank::size]
        torch.manual_seed(step)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach() / size
        if size > 1:
            dist.all_reduce(total)
        losses.append(float(total))
    model.eval()
    return losses


@torch.no_grad()
def logits(model: Any) -> Tensor:
    model.eval()
    return model(input_ids=PROMPT).logits.clone()


def a_day_with_peft(model: Any, optimizer: Any, folder: Path, first: bool = True) -> dict[str, Any]:
    """What people do with an adapter: losses by name, logits, tokens, and the folders of what was saved."""
    found: dict[str, Any] = {"losses": train(model, optimizer, 0, 2)}
    with model.disable_adapter():
        found["disabled"] = logits(model)
    model.merge_adapter()
    found["merged"] = logits(model)
    model.unmerge_adapter()
    found["losses"] += train(model, optimizer, 2, 3)
    if not dist.is_initialized():
        found["tokens"] = model.generate(input_ids=PROMPT, max_new_tokens=4, do_sample=False)
    found["losses"] += train(model, optimizer, 3, 4)
    found["trained"] = logits(model)
    model.save_pretrained(folder / "adapter", is_main_process=first)
    found["adapter"] = load_file(folder / "adapter" / WEIGHTS) if first else {}
    whole = model.merge_and_unload()
    found["unloaded"] = logits(whole)
    whole.save_pretrained(folder / "whole", is_main_process=first)
    found["whole"] = load_file(folder / "whole" / "model.safetensors") if first else {}
    return found


@functools.cache
def plain(kind: str, dtype: torch.dtype, make: Any) -> dict[str, Any]:
    import tempfile

    model = build(kind, dtype)
    with tempfile.TemporaryDirectory() as folder:
        return a_day_with_peft(model, make(model.parameters()), Path(folder))


def sharded(
    kind: str, dtype: torch.dtype, make: Any, stage: int, tier: str | None, folder: Path, nvme: Any = None
) -> dict[str, Any]:
    model = build(kind, dtype)
    optimizer = zero_core.shard(model, make(model.parameters()), stage=stage, store=make_store(tier, nvme))
    first = not dist.is_initialized() or dist.get_rank() == 0
    found = a_day_with_peft(model, optimizer, folder, first)
    optimizer.close()
    return found


def assert_equal(found: dict[str, Any], expected: dict[str, Any], **close: float) -> None:
    """Bit for bit, or within `close` (rtol, atol)."""
    close = close or {"rtol": 0.0, "atol": 0.0}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, **close, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("kind, stage", [*((kind, 3) for kind in KINDS), ("lora", 0), ("dora", 1), ("lora", 2)])
def test_one_rank_gives_the_bits_of_plain_peft(ranks: Any, tmp_path: Path, kind: str, stage: int) -> None:
    arguments = kind, torch.float32, adamw
    expected = ranks(1).run(plain, *arguments)[0]
    assert_equal(ranks(1).run(sharded, *arguments, stage, None, tmp_path)[0], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_tiers_give_the_same_bits_near_those_of_plain_peft(ranks: Any, tmp_path: Path, kind: str) -> None:
    arguments = kind, torch.float32, adamw
    host, nvme = (ranks(1).run(sharded, *arguments, 3, tier, tmp_path)[0] for tier in ("host", "nvme"))
    assert_equal(host, nvme)
    assert_equal(host, ranks(1).run(plain, *arguments)[0], rtol=1e-4, atol=1e-5)


def test_a_slab_gives_the_bits_of_the_host(ranks: Any, tmp_path: Path) -> None:
    zero_nvme = pytest.importorskip("zero_nvme")
    arguments = "lora", torch.float32, adamw, 3
    with zero_nvme.Slab(tmp_path, 16 << 20) as slab:
        found = ranks(1).run(sharded, *arguments, "nvme", tmp_path / "run", slab)[0]
    assert_equal(found, ranks(1).run(sharded, *arguments, "host", tmp_path / "run")[0])


@pytest.mark.parametrize("tier", [None, "nvme"])
def test_a_bf16_base_with_fp32_adapters(ranks: Any, tmp_path: Path, tier: str | None) -> None:
    """PEFT keeps the adapters of a 16-bit base in fp32, so nothing but the update can differ."""
    arguments = "lora", torch.bfloat16, adamw
    found, expected = ranks(1).run(sharded, *arguments, 3, tier, tmp_path)[0], ranks(1).run(plain, *arguments)[0]
    assert {value.dtype for value in found["adapter"].values()} == {torch.float32}
    assert {value.dtype for value in found["whole"].values()} == {torch.bfloat16}
    assert_equal(found, expected, **({} if tier is None else {"rtol": 0.02, "atol": 0.02}))


TWO = [*((kind, 3, None) for kind in KINDS if kind != "all")]
TWO += [("lora", 0, None), ("dora", 1, None), ("lora", 2, None), ("dora", 3, "nvme"), ("lora", 2, "host")]


@pytest.mark.parametrize("kind, stage, tier", TWO)
def test_two_ranks_are_near_plain_peft_on_the_joined_batch(
    ranks: Any, tmp_path: Path, kind: str, stage: int, tier: str | None
) -> None:
    expected = dict(ranks(1).run(plain, kind, torch.float32, sgd)[0])
    expected.pop("tokens")
    found, other = ranks(2).run(sharded, kind, torch.float32, sgd, stage, tier, tmp_path)
    assert_equal(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(found["unloaded"], other["unloaded"])
