"""Mixtures whose experts are in 4 bits: what they compute is what dequantised stacks compute, and they are read so.

`nox -s peft` has the libraries. Fails if a byte or a scale goes to another expert, or waits in 16 bits for its turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
bnb = pytest.importorskip("bitsandbytes")

import zero_core
import zero_hf
import zero_offload
from tests import kit
from zero_core.building.experts import find_stacks
from zero_core.checkpoint.safetensors import Reader
from zero_hf import four_bits
from zero_hf.four_bits import FourBit

ONE = 64 * 2 * 64 + 64 * 64  # values of one expert
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTURES = {
    "qwen3": lambda: transformers.Qwen3MoeConfig(**SHAPE, head_dim=32, moe_intermediate_size=64, num_experts=8),
    "gpt_oss": lambda: transformers.GptOssConfig(**SHAPE, head_dim=32, num_local_experts=8),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=8),
}


def saved(folder: Path, kind: str) -> Path:
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(MIXTURES[kind](), dtype=torch.float32)
    model.save_pretrained(folder)
    return folder


def how() -> Any:
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype="float32"
    )


def adapted(model: nn.Module) -> nn.Module:
    torch.manual_seed(1)
    names = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)).train()


def dense(folder: Path, dtype: torch.dtype, implementation: str) -> nn.Module:
    """transformers' own, whose stacks are quantised and dequantised as wholes."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, quantization_config=how(), dtype=dtype, device_map="cpu", experts_implementation=implementation
    )
    stacks = find_stacks(model).values()
    assert len(stacks) == 2
    for parameter in (p for stack in stacks for p in stack.parameters.values() if p.ndim == 3):
        packed, state = bnb.functional.quantize_4bit(parameter.data, blocksize=64, quant_type="nf4")
        parameter.data = bnb.functional.dequantize_4bit(packed, state)
        parameter.requires_grad_(False)
    return adapted(model)


def ours(folder: Path, dtype: torch.dtype, implementation: str) -> nn.Module:
    more = {"quantization_config": how(), "experts_implementation": implementation}
    return adapted(zero_hf.from_pretrained(transformers.AutoModelForCausalLM, folder, dtype=dtype, **more))


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With a power of two as learning rate an update rounds once, whoever computes it: this is about the base."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


def losses(model: nn.Module, optimizer: Any) -> list[Tensor]:
    found = []
    for step in range(2):
        tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(step))
        embedded = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(step))
        embedded = embedded.to(model.dtype).requires_grad_()
        loss = model(inputs_embeds=embedded, labels=tokens, use_cache=False).loss
        loss.backward()
        found += [loss.detach(), embedded.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize("kind", MIXTURES)
@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
def test_losses_and_gradients_are_those_of_dequantised_stacks(kind, implementation, tmp_path, monkeypatch):
    """In groups bit for bit those of dense experts in the same groups, on each tier, and of stock transformers within
    fp32 rounding. Fails if more than a group is dequantised at once."""
    folder, dtype = saved(tmp_path, kind), torch.float32
    stock = dense(folder, dtype, implementation)
    wanted = losses(stock, sgd(stock))
    sizes: list[int] = []
    own = FourBit.dequantised

    def noted(tensor: FourBit) -> Tensor:
        values = own(tensor)
        sizes.append(values.untyped_storage().nbytes() // values.itemsize)
        return values

    monkeypatch.setattr(FourBit, "dequantised", noted)
    model = dense(folder, dtype, implementation)
    optimizer = zero_core.shard(model, sgd(model), expert_bytes=2 * ONE * 4 + 4096)
    in_groups = losses(model, optimizer)
    optimizer.close()
    for place in ("host", "nvme"):
        model = ours(folder, dtype, implementation)
        store = zero_offload.TieredStore(place, place, place, nvme=zero_offload.MemoryByteStore())
        optimizer = zero_core.shard(model, sgd(model), store=store, expert_bytes=2 * ONE * 4 + 4096)
        names = [unit.name for unit in zero_core.units(model)]
        assert sum("experts[" in name and name.endswith("]") for name in names) == 2 * 4
        found = losses(model, optimizer)
        optimizer.close()
        assert all(torch.equal(a, b) for a, b in zip(found, in_groups, strict=True))
    for one, other in zip(wanted, in_groups, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)
    most = 12 * 2 * 2 if implementation == "batched_mm" else 2  # experts: one of each pair, or those of a group
    assert sizes and max(sizes) <= most * 2 * 64 * 64
