"""LoRA over a frozen quantised Llama: losses and gradients are PEFT's bit for bit, wherever the base is placed.

The libraries are not among what the other tests install: `nox -s peft`. Fails if a byte or a scale is cast, lost, shared
between ranks or read when it is not there; the last ends the process.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
import zero_offload
from zero_core.errors import ChangedParameterError

BITSANDBYTES = ("nf4", "nf4-double", "fp4", "int8")
TORCHAO = ("torchao-int8", "torchao-intx", "torchao-float8")
PLACEMENTS = ("device", "host", "nvme", "slab")


@pytest.fixture(autouse=True, scope="module")
def libraries() -> None:
    for name in ("transformers", "peft", "bitsandbytes", "torchao"):
        pytest.importorskip(name)


def llama(kind: str, seed: int = 0) -> nn.Module:
    """A Llama of two layers, its linears quantised, in training mode."""
    import transformers

    torch.manual_seed(seed)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=128, attn_implementation="eager",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    quantise(model.model.layers, kind)
    model.is_loaded_in_4bit, model.is_loaded_in_8bit = kind[:3] in ("nf4", "fp4"), kind == "int8"
    return model.train()


def quantise(model: nn.Module, kind: str) -> None:
    if kind.startswith("torchao"):
        from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, IntxWeightOnlyConfig, quantize_
        from torchao.quantization.granularity import PerGroup

        quantize_(
            model,
            {
                "torchao-int8": Int8WeightOnlyConfig(),
                "torchao-intx": IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32)),
                "torchao-float8": Float8WeightOnlyConfig(),
            }[kind],
        )
        return
    import bitsandbytes as bnb

    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                shape = child.in_features, child.out_features
                if kind == "int8":
                    new: Any = bnb.nn.Linear8bitLt(*shape, bias=False, has_fp16_weights=False)
                else:
                    double = kind.endswith("double")
                    new = bnb.nn.Linear4bit(*shape, bias=False, quant_type=kind[:3], compress_statistics=double)
                new.weight.data = child.weight.data
                setattr(module, name, new.to("cpu"))


def adapted(kind: str, seed: int = 0) -> nn.Module:
    import peft

    names = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    config = peft.LoraConfig(r=4, target_modules=names, init_lora_weights=False)
    return peft.get_peft_model(llama(kind, seed), config)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """With a power of two as learning rate an update rounds once, whoever computes it: this is about the base."""
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)


@contextmanager
def placed(placement: str, folder: str) -> Iterator[Any]:
    """A store that keeps everything in one place; None: the default one."""
    if placement == "device":
        yield None
    elif placement == "host":
        yield zero_offload.TieredStore(parameters="host", gradients="host", optimizer="host")
    elif placement == "nvme":
        nvme = zero_offload.MemoryByteStore()
        yield zero_offload.TieredStore(parameters="nvme", gradients="nvme", optimizer="nvme", nvme=nvme)
    else:
        import zero_nvme

        with zero_nvme.Slab(folder, capacity_bytes=64 << 20) as slab:
            yield zero_offload.TieredStore(parameters="nvme", gradients="nvme", optimizer="nvme", nvme=slab)


def losses(model: nn.Module, optimizer: Any, steps: int = 2) -> list[Tensor]:
    """Losses and gradients at the embeddings' output, which pass every quantised linear. All ranks on one batch."""
    found = []
    tokens = torch.arange(24).view(2, 12) * 7 % 128
    for step in range(steps):
        embedded = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
        loss = model(inputs_embeds=embedded, labels=tokens).loss
        loss.backward()
        found += [loss.detach(), embedded.grad]
        optimizer.step()
        optimizer.zero_grad()
    return found


def inner(values: Tensor) -> list[Tensor]:
    names = getattr(values, "__tensor_flatten__", lambda: ([], None))()[0]
    return [getattr(values, name) for name in names] or [values]


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert list(ours) == list(theirs)
    for name, values in theirs.items():
        for one, other in zip(inner(ours[name]), inner(values), strict=True):
            assert one.dtype == other.dtype and torch.equal(one.float(), other.float()), name


def check(kinds: tuple[str, ...], placements: tuple[str, ...], folder: str) -> None:
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    for kind in kinds:
        check_one(kind, placements, f"{folder}/{rank}", rank)


def check_one(kind: str, placements: tuple[str, ...], folder: str, rank: int) -> None:
    os.makedirs(folder, exist_ok=True)
    model = adapted(kind)
    expected = losses(model, sgd(model))
    for placement in placements:
        with placed(placement, folder) as store:
            ours = adapted(kind, rank)  # what rank 0 has counts, scales too
            optimizer = zero_core.shard(ours, sgd(ours), **({"store": store} if store else {}))
            found = losses(ours, optimizer)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one, other), (kind, placement)
            same(ours.state_dict(), model.state_dict())
            optimizer.close()


@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_lora_over_a_quantised_base_is_pefts_bit_for_bit(kind: str, tmp_path: Any) -> None:
    check((kind,), PLACEMENTS, str(tmp_path))


def test_two_ranks_have_the_values_of_rank_0_bit_for_bit(ranks: Any, tmp_path: Any) -> None:
    ranks(2).run(check, (*BITSANDBYTES, *TORCHAO), ("device", "slab"), str(tmp_path))
