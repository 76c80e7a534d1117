"""Mixtures whose experts are in 4 bits: what they compute is what dequantised stacks compute, and they are read so.

`nox -s tests-all` has the libraries. Fails if a byte or a scale goes to another expert, or waits in 16 bits for its
turn.
"""

import copy
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("peft")
pytest.importorskip("bitsandbytes")

import bitsandbytes as bnb
import peft
import safetensors.torch
import torch
import transformers
from torch import Tensor, nn

import zero_core
import zero_hf
import zero_offload
from tests import kit
from zero_core.checkpoint.safetensors import Reader, open_index
from zero_core.moe.expert_groups import find_stacks
from zero_hf import weights_4bit
from zero_hf.weights_4bit import FourBit

pytestmark = pytest.mark.promise("four-bit-experts")

ONE = 3 * 64 * 64  # values of one expert
SHAPE: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 1, "vocab_size": 128, "num_experts_per_tok": 2,
}  # fmt: skip
MIXTURES = {
    "qwen3": lambda: transformers.Qwen3MoeConfig(**SHAPE, head_dim=32, moe_intermediate_size=64, num_experts=8),
    "gpt_oss": lambda: transformers.GptOssConfig(**SHAPE, head_dim=32, num_local_experts=8),
    "mixtral": lambda: transformers.MixtralConfig(**SHAPE, num_local_experts=8),
}


def saved(folder: Path, kind: str, seed: int = 0) -> Path:
    torch.manual_seed(seed)
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


def near(found: list[Tensor], wanted: list[Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6)


def same(found: list[Tensor], wanted: list[Tensor]) -> None:
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


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
        same(losses(model, optimizer), in_groups)
        optimizer.close()
    near(wanted, in_groups)
    most = 12 * 2 * 2 if implementation == "batched_mm" else 2  # experts: one of each pair, or those of a group
    assert sizes and max(sizes) <= most * 2 * 64 * 64


def test_the_files_are_read_once_and_by_blocks(tmp_path, monkeypatch):
    """Fails if a stack, or an expert, is in memory whole, or its scales are read apart from its bytes."""
    folder = saved(tmp_path, "qwen3")
    experts = {entry.start_bytes for name, entry in open_index(folder).items() if "experts" in name}
    monkeypatch.setattr(weights_4bit, "_TILE_NUMEL", 1024)
    read: list[tuple[int, int]] = []
    own = Reader.read

    def noted(reader: Any, entry: Any, start: int, stop: int) -> Tensor:
        read.append((entry.start_bytes, stop - start))
        return own(reader, entry, start, stop)

    monkeypatch.setattr(Reader, "read", noted)
    model = ours(folder, torch.bfloat16, "eager")
    assert read and not experts & {at for at, _ in read}  # linears are quantised, and nothing else is read
    optimizer = zero_core.shard(model, sgd(model), expert_bytes=ONE * 2)
    of_experts = [numel for at, numel in read if at in experts]
    assert max(of_experts) <= 1024 and sum(of_experts) == 2 * 8 * ONE
    optimizer.close()


@pytest.fixture
def folder(tmp_path):
    return saved(tmp_path, "qwen3")


@kit.on_ranks(1, 2)
def test_it_is_made_plain_and_sharded_again_in_other_groups(size, folder):
    """Fails if bytes are lost, mixed between ranks, or are no `FourBit` any more. All ranks on one batch."""
    model, plain = ours(folder, torch.float32, "eager"), dense(folder, torch.float32, "eager")
    for expert_bytes in (ONE * 4, 1 << 30, None, ONE * 12):
        optimizer = zero_core.shard(model, sgd(model), expert_bytes=expert_bytes)
        near(losses(model, optimizer), losses(plain, sgd(plain)))
        if expert_bytes == ONE * 4:
            continue  # from shards to shards
        zero_core.unshard(model)
        for at, stack in find_stacks(model).items():
            twin = find_stacks(plain)[at]
            for name, p in stack.parameters.items():
                assert isinstance(p, FourBit) and isinstance(p, nn.Parameter)
                assert torch.equal(p + 0, twin.parameters[name])


def test_it_is_materialised_and_copied_as_a_plain_model(folder):
    model, plain = ours(folder, torch.float32, "eager"), dense(folder, torch.float32, "eager")
    zero_core.materialise(model)
    wanted = losses(plain, sgd(plain))
    for each in (copy.deepcopy(model), model):
        same(losses(each, sgd(each)), wanted)
    optimizer = zero_core.shard(model, sgd(model), expert_bytes=ONE * 4)
    losses(model, optimizer)
    optimizer.close()


@pytest.fixture
def another(tmp_path):
    return saved(tmp_path / "another", "qwen3", seed=5)


@kit.on_ranks(1, 2)
def test_a_checkpoint_has_its_bytes_and_is_loaded_in_other_groups(size, folder, another, tmp_path):
    """Fails if a checkpoint gives an expert's bytes or scales to another one."""
    model = ours(folder, torch.float32, "eager")
    optimizer = zero_core.shard(model, sgd(model), expert_bytes=ONE * 4)
    losses(model, optimizer)
    zero_core.checkpoint.save(tmp_path / "saved", model, optimizer)
    wanted = losses(model, optimizer)
    optimizer.close()
    other = ours(another, torch.float32, "eager")
    optimizer = zero_core.shard(other, sgd(other), expert_bytes=ONE * 12)
    zero_core.checkpoint.load(tmp_path / "saved", other, optimizer)
    near(losses(other, optimizer), wanted)
    optimizer.close()


@pytest.mark.parametrize("activations", ["recompute", "nvme"])
@pytest.mark.parametrize("placement", ["host", "nvme"])
def test_blocks_that_recompute_have_the_same_losses(activations, placement, folder):
    found = []
    for policy in ("keep", activations):
        model = ours(folder, torch.float32, "eager")
        store = zero_offload.TieredStore(placement, placement, placement, nvme=zero_offload.MemoryByteStore())
        optimizer = zero_core.shard(model, sgd(model), store=store, expert_bytes=ONE * 4)
        if policy != "keep":
            zero_offload.offload_activations(model, store, policy)
        found.append(losses(model, optimizer))
        optimizer.close()
    same(*found)


def test_adapters_on_experts_are_pefts(folder):
    """LoRA on the stacks themselves. Fails if a group's delta is another's, or is added to other values."""
    found = []
    for make in (dense, ours):
        model = make(folder, torch.float32, "eager").unload()
        torch.manual_seed(2)
        targets = [f"experts.{name}" for name in ("gate_up_proj", "down_proj")]
        model = peft.get_peft_model(
            model, peft.LoraConfig(r=2, target_modules=[], target_parameters=targets, init_lora_weights=False)
        ).train()
        found.append(model)
    plain, model = found
    with torch.no_grad():
        for one, other in zip(model.parameters(), plain.parameters(), strict=True):
            if one.requires_grad:
                one.copy_(other)
    optimizer = zero_core.shard(model, sgd(model), expert_bytes=ONE * 4)
    near(losses(model, optimizer), losses(plain, sgd(plain)))
    optimizer.close()


def test_experts_whose_blocks_would_overlap_stay_in_16_bits_with_a_warning(tmp_path):
    torch.manual_seed(0)
    sizes = SHAPE | {"hidden_size": 40, "moe_intermediate_size": 20}
    config = transformers.Qwen3MoeConfig(**sizes, head_dim=32, num_experts=8)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="down_proj stays in torch.bfloat16: an expert has 800 values, and"):
        model = zero_hf.from_pretrained(
            transformers.AutoModelForCausalLM, tmp_path, dtype=torch.bfloat16, quantization_config=how()
        )
    experts = model.model.layers[0].mlp.experts
    assert isinstance(experts.gate_up_proj, FourBit) and type(experts.down_proj) is nn.Parameter


@pytest.mark.advice("leave the layer unquantised: name it in llm_int8_skip_modules")
def test_layers_that_are_left_out_stay_as_they_are_and_a_new_one_is_not_quantised(folder, tmp_path):
    """Fails if the advice does not hold."""
    skip = ["model.layers.1.mlp.experts", "lm_head", "q_proj"]
    more = how()
    more.llm_int8_skip_modules = skip
    model = zero_hf.from_pretrained(transformers.AutoModelForCausalLM, folder, quantization_config=more)
    assert isinstance(model.model.layers[0].mlp.experts.down_proj, FourBit)
    assert type(model.model.layers[1].mlp.experts.down_proj) is nn.Parameter
    assert type(model.model.layers[0].self_attn.q_proj) is nn.Linear
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    missing = "model.layers.0.self_attn.q_proj.weight"
    safetensors.torch.save_file({n: t for n, t in tensors.items() if n != missing}, folder / "model.safetensors")
    with pytest.raises(zero_hf.ConfigError, match="q_proj.weight is not in the files, .*in llm_int8_skip_modules"):
        zero_hf.from_pretrained(transformers.AutoModelForCausalLM, folder, quantization_config=how())
    more.llm_int8_skip_modules = ["model.layers.0.self_attn.q_proj"]
    with pytest.warns(UserWarning, match="newly initialised"):
        zero_hf.from_pretrained(transformers.AutoModelForCausalLM, folder, quantization_config=more)
