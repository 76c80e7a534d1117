"""LoRA over a frozen quantised Llama: losses and gradients are PEFT's bit for bit, wherever the base is placed.

`nox -s tests-all` has the libraries. Fails if a byte or a scale is cast, lost, mixed between ranks, or read when it is
not there, which ends the process.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_core
import zero_offload
from tests import kit
from tests.integration.zero_offload.training import tiered
from zero_core.errors import ChangedParameterError, ShardedParameterError

pytestmark = pytest.mark.promise("quantised")

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
    elif placement == "slab":
        import zero_nvme

        with zero_nvme.Slab(folder, capacity_bytes=64 << 20) as slab:
            yield tiered("nvme", nvme=slab)
    else:
        yield tiered(placement)


def losses(model: nn.Module, optimizer: Any, steps: int = 2) -> list[Tensor]:
    """Losses and gradients at the embeddings' output, which pass every quantised linear. All ranks on one batch."""
    found = []
    tokens = torch.arange(24).view(2, 12) * 7 % 128
    for step in range(steps):
        embedded = torch.randn(2, 12, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
        found += [kit.step(optimizer, model(inputs_embeds=embedded, labels=tokens).loss), embedded.grad]
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
    rank, _ = kit.world()
    os.makedirs(f"{folder}/{rank}", exist_ok=True)
    for number, kind in enumerate(kinds):
        model = adapted(kind)
        expected = losses(model, sgd(model))
        for placement in placements:
            with placed(placement, f"{folder}/{rank}") as store:
                ours = adapted(kind, rank)  # what rank 0 has counts, scales too
                optimizer = zero_core.shard(ours, sgd(ours), stage=3 - number % 4, store=store)
                for one, other in zip(losses(ours, optimizer), expected, strict=True):
                    assert torch.equal(one, other), (kind, placement)
                same(ours.state_dict(), model.state_dict())
                optimizer.close()


@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_lora_over_a_quantised_base_is_pefts_bit_for_bit(kind: str, tmp_path: Any) -> None:
    check((kind,), PLACEMENTS, str(tmp_path))


def test_two_ranks_have_the_values_of_rank_0_bit_for_bit(ranks: Any, tmp_path: Any) -> None:
    ranks(2).run(check, (*BITSANDBYTES, *TORCHAO), ("device", "slab"), str(tmp_path))


def exact_in_eval(model: nn.Module) -> nn.Module:
    """bitsandbytes neither repacks 4-bit weights nor rounds their scales."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model.requires_grad_(False).eval()


@torch.no_grad()
def logits(model: nn.Module) -> Tensor:
    return model(torch.arange(24).view(2, 12)).logits


@pytest.mark.parametrize("kind", [*BITSANDBYTES, *TORCHAO])
def test_a_quantised_model_without_an_optimizer_is_the_dense_one(kind: str, tmp_path: Any) -> None:
    """In eval mode, in layers that are used outside of their units, in checkpoints, and after model.to()."""
    dense, ours = exact_in_eval(llama(kind)), exact_in_eval(llama(kind))
    with placed("nvme", "") as store:
        handle = zero_core.shard(ours, store=store)
        assert torch.equal(logits(ours), logits(dense))
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64)
        layer, plain = (model.model.layers[1].mlp.up_proj for model in (ours, dense))
        for _ in range(2):
            inputs = [x.clone().requires_grad_() for _ in range(2)]
            outputs = [linear(each) for linear, each in zip((layer, plain), inputs, strict=True)]
            assert torch.equal(*outputs)
            for each in outputs:
                each.square().sum().backward()
            assert torch.equal(inputs[0].grad, inputs[1].grad)
            ours.to("cpu")
        with zero_core.gathered(ours):
            assert torch.equal(layer(x), plain(x)) and torch.equal(logits(ours), logits(dense))
        zero_core.checkpoint.save(tmp_path / "saved", ours)
        torch.save(ours.state_dict(), tmp_path / "state")
        same(torch.load(tmp_path / "state", weights_only=False), dense.state_dict())
        handle.close()
    other = exact_in_eval(llama(kind, seed=1))
    assert not torch.equal(logits(other), logits(dense))
    handle = zero_core.shard(other)
    zero_core.checkpoint.load(tmp_path / "saved", other)
    assert torch.equal(logits(other), logits(dense))
    handle.close()


@pytest.mark.parametrize("kind", TORCHAO)
def test_values_are_written_into_a_torchao_weight_as_in_torch(kind: str) -> None:
    dense, ours, new = (exact_in_eval(llama(kind, seed)) for seed in (0, 0, 1))
    handle = zero_core.shard(ours)
    for model in (dense, ours):
        model.load_state_dict(new.state_dict())
    assert torch.equal(logits(ours), logits(dense)) and torch.equal(logits(ours), logits(new))
    with pytest.raises(RuntimeError, match="Couldn't swap Linear.weight") as raised:
        ours.model.layers[0].mlp.up_proj.bfloat16()
    assert isinstance(raised.value.__cause__, ShardedParameterError) and torch.equal(logits(ours), logits(new))
    handle.close()


@pytest.mark.parametrize("kind", ["nf4", "nf4-double", "fp4"])
def test_eval_mode_that_would_repack_4_bit_weights_is_refused(kind: str) -> None:
    """On a processor without avx512_bf16 nothing is repacked, so there is nothing to refuse."""
    dense, ours = exact_in_eval(llama(kind)), exact_in_eval(llama(kind))
    handle = zero_core.shard(ours)
    assert torch.equal(logits(ours), logits(dense))
    handle.close()
    ours = llama(kind).requires_grad_(False).eval()
    repacks = ours.model.layers[0].mlp.up_proj.support_avx512bf16_for_cpu
    handle = zero_core.shard(ours)
    if repacks:
        with pytest.raises(ChangedParameterError, match="support_avx512bf16_for_cpu = False"):
            logits(ours)
        evaluated = llama(kind).requires_grad_(False).eval()
        logits(evaluated)
        with pytest.raises(zero_core.ZeroError, match="was repacked by bitsandbytes"):
            zero_core.shard(evaluated)
    assert torch.equal(logits(exact_in_eval(ours)), logits(dense))
    handle.close()


def test_a_linear_that_is_not_quantised_yet_is_refused() -> None:
    import bitsandbytes as bnb

    for linear in (bnb.nn.Linear4bit(64, 64), bnb.nn.Linear8bitLt(64, 64, has_fp16_weights=False)):
        with pytest.raises(zero_core.ZeroError, match=r"weight, of class \w+, is not quantised yet"):
            zero_core.shard(nn.Sequential(linear).requires_grad_(False))


@pytest.mark.parametrize(("kind", "most"), [("nf4", 0.58), ("nf4-double", 0.54), ("fp4", 0.58)])
def test_a_4_bit_base_takes_at_most_0_6_bytes_of_each_parameter_on_nvme(kind: str, most: float) -> None:
    """Scales too. Of a layer as wide as those of real models are long: padding and bits of 4096 bytes count."""
    model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False) for _ in range(2)))
    numel = sum(p.numel() for p in model.parameters())
    quantise(model, kind)
    planned = zero_offload.plan(model, parameters="nvme", gradients="device", optimizer="device", tokens=1)
    nvme = zero_offload.MemoryByteStore()
    store = tiered("nvme", "device", "device", nvme=nvme)
    handle = zero_core.shard(model.requires_grad_(False), store=store)
    held = sum(unit.flat.untyped_storage().nbytes() for unit in zero_core.units(model))
    assert held == 0 and nvme.used_bytes / numel <= most
    assert store.describe().bytes_of("nvme", "parameters") == planned.bytes_of("nvme", "parameters") <= nvme.used_bytes
    handle.close()


@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_adapters_are_merged_into_a_sharded_bitsandbytes_base_as_in_peft(kind: str) -> None:
    """PEFT knows the classes by name, and copies a weight's attributes into a new one. The result is not sharded."""
    dense, ours = adapted(kind), adapted(kind)
    optimizer = zero_core.shard(ours, sgd(ours))
    losses(dense, sgd(dense)), losses(ours, optimizer)
    merged, expected = (model.merge_and_unload() for model in (ours, dense))
    assert torch.equal(logits(merged), logits(expected))
    optimizer.close()


@pytest.mark.parametrize("name", ["Embedding4bit", "Embedding8bit"])
def test_a_quantised_embedding_is_the_dense_one(name: str) -> None:
    """`Embedding4bit` copies its scales, with all that is attached to them, in every forward."""
    import bitsandbytes as bnb

    def build() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(getattr(bnb.nn, name)(128, 64), nn.Linear(64, 64)).to("cpu").requires_grad_(False)

    tokens = torch.arange(24).view(2, 12)
    dense, ours = build(), build()
    handle = zero_core.shard(ours)
    assert torch.equal(ours(tokens), dense(tokens)) and torch.equal(ours[0](tokens), dense[0](tokens))
    handle.close()
