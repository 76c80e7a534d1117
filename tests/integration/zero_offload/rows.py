"""Small transformers and a toy, and their losses and gradients with and without `rows`; runs on every rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import zero_core
from tests import kit
from tests.integration.zero_offload.training import tiered
from zero_offload import TieredStore, TorchStep, offload_activations
from zero_offload.activations import recompute as module_under_test

FP32, BF16 = 1e-6, 2e-2  # relative to a gradient's norm; measured: 3e-7 and 8e-3
SIZES: dict[str, Any] = dict(  # of models of every family
    **dict(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4),
    **dict(num_key_value_heads=4, head_dim=8, max_position_embeddings=32, pad_token_id=0, use_cache=False),
    **dict(n_embd=32, n_head=4, n_layer=2, n_positions=32, rotary_dim=4, num_layers=2, num_heads=4),  # GPT-2, GPT-J
    **dict(num_local_experts=4, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16),
    **dict(q_lora_rank=8, kv_lora_rank=8, qk_rope_head_dim=4, qk_nope_head_dim=4, v_head_dim=8, n_routed_experts=4),
    **dict(n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1),  # DeepSeek
    **dict(d_model=32, d_kv=8, d_ff=48, decoder_start_token_id=1, encoder_layers=1, decoder_layers=1),
    **dict(encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_attention_heads=4, decoder_attention_heads=4),
    **dict(ffn_dim=48, word_embed_proj_dim=32, attention_types=[[["global", "local"], 1]]),  # OPT, GPT-Neo
    **dict(image_size=16, patch_size=4, num_mel_bins=8, max_source_positions=12, max_target_positions=16),
)
KINDS = {
    "llama": "LlamaForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "mixtral": "MixtralForCausalLM",
    "t5": "T5ForConditionalGeneration",
    "vit": "ViTForImageClassification",
    "whisper": "WhisperForConditionalGeneration",
}
DROPOUTS = (
    *("attention_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout_rate", "dropout", "activation_dropout"),
    *("hidden_dropout_prob", "attention_probs_dropout_prob"),
)


def made(kind: str, dropout: float = 0.0) -> nn.Module:
    model = getattr(transformers, KINDS[kind])
    more = {"num_key_value_heads": 2, "encoder_layers": 2, "decoder_layers": 2, "num_labels": 5}
    more |= {"bos_token_id": 1, "eos_token_id": 2} if kind == "whisper" else {}
    more |= {"max_position_embeddings": 1024, "n_positions": 1024} if kind == "gpt2" else {}
    return model(model.config_class(**SIZES | more, **dict.fromkeys(DROPOUTS, dropout)))


MODELS: dict[str, Callable[..., nn.Module]] = {kind: partial(made, kind) for kind in KINDS}


def batch_of(kind: str, rows: int, seed: int = 0, tokens: int = 7, padded: bool = True) -> dict[str, Tensor]:
    """A whole batch. padded: the texts have different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def integers(top: int, *shape: int) -> Tensor:
        return torch.randint(3, top, shape, generator=generator)

    if kind == "vit":
        return {
            "pixel_values": torch.randn(rows, 3, 16, 16, generator=generator),
            "labels": torch.randint(0, 5, (rows,), generator=generator),
        }
    if kind == "whisper":
        return {"input_features": torch.randn(rows, 8, 24, generator=generator), "labels": integers(64, rows, tokens)}
    ids = integers(64, rows, tokens)
    lengths = torch.randint(3 if padded else tokens, tokens + 1, (rows, 1), generator=generator)
    mask = (torch.arange(tokens) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


@dataclass(frozen=True)
class Case:
    kind: str = "llama"
    rows: int | None = None
    tokens: int | None = None  # of a row, at once
    batch: int = 6
    dropout: float = 0.0
    policy: Any = "recompute"
    placement: str | None = None  # None: zero-core's own store
    stage: int = 3
    steps: int = 1
    accumulate: int = 1  # parts that the loop takes one by one
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    lora: bool = False
    autocast: bool = False
    padded: bool = True
    more_rows: int = 0  # of each rank after the first
    overlap: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    gradients: dict[str, Tensor]  # of the first step
    parameters: dict[str, Tensor]
    stats: dict[str, Any]


def with_lora(model: nn.Module) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    adapters = LoraConfig(r=2, target_modules=["q_proj", "down_proj"], init_lora_weights=False, lora_dropout=0.0)
    return get_peft_model(model, adapters)


def build(case: Case) -> tuple[nn.Module, TieredStore | None, Any]:
    torch.manual_seed(0)
    model = MODELS[case.kind](case.dropout)
    if case.lora:
        model = with_lora(model)
    model.train()
    store = None
    if case.placement is not None:
        store = tiered(case.placement, step=TorchStep(), tile_numel=1 << 20, overlap=case.overlap)
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = {"param_dtype": case.dtype, "reduce_dtype": case.reduce_dtype, "stage": case.stage}
    optimizer = zero_core.shard(model, torch.optim.SGD(trained, lr=0.1), store=store, **kinds, **case.options)
    return model, store, optimizer


def train(case: Case) -> Outcome:
    """Trains on each rank's own rows of a batch."""
    module_under_test.SMALL_BYTES = 0
    rank, _ = kit.world()
    model, store, optimizer = build(case)
    losses, gradients = [], {}
    offloaded = offload_activations(model, store, case.policy, rows=case.rows, tokens=case.tokens)
    with offloaded:
        torch.manual_seed(1 + rank)
        for step in range(case.steps):
            batch = batch_of(case.kind, case.batch + rank * case.more_rows, 2 * step + rank, padded=case.padded)
            size = len(batch["labels"]) // case.accumulate
            for start in range(0, len(batch["labels"]), size):
                part = {name: values[start : start + size] for name, values in batch.items()}
                if case.dtype is not None:
                    part = {name: v.to(case.dtype) if v.is_floating_point() else v for name, v in part.items()}
                with torch.autocast("cpu", torch.bfloat16, enabled=case.autocast):
                    loss = model(**part).loss
                optimizer.scale_loss(loss / case.accumulate).backward()
                losses.append(float(loss.detach()))
            if step == 0:
                gradients = {
                    name: found.clone()
                    for name, p in model.named_parameters()
                    if p.requires_grad and (found := zero_core.full_gradient(p)) is not None
                }
            optimizer.step()
            optimizer.zero_grad()
        stats = offloaded.stats()
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    parameters = {name: value for name, value in kit.named_values(model).items() if name in trained}
    optimizer.close()
    return Outcome(losses, gradients, parameters, stats)


def distance(left: Mapping[str, Tensor], right: Mapping[str, Tensor]) -> float:
    """The largest distance of two tensors of a name, relative to their norm, or to a thousandth of the norm of all."""
    assert left.keys() == right.keys() and left
    norms = {name: float(tensor.double().norm()) for name, tensor in right.items()}
    floor = 1e-3 * sum(norm**2 for norm in norms.values()) ** 0.5
    return max(float((left[n].double() - right[n].double()).norm()) / max(norms[n], floor) for n in right)


# -- a toy -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Adds to x what `kind` says. Every other block returns what the first one does, but for one thing."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.inner, self.outer, self.drop = nn.Linear(16, 32), nn.Linear(32, 16), nn.Dropout(0.5)
        if kind == "batch norm":
            self.norm = nn.BatchNorm1d(16)
        if kind == "buffer":
            self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, bias: Any = None, **kwargs: Any) -> Any:
        y = self.outer(self.drop(torch.relu(self.inner(x))))
        if self.kind == "batch norm":
            y = self.norm(y.flatten(0, -2)).view_as(x)
        if self.kind == "contrast":
            y = y - y.mean(0)
        if self.kind == "capacity":  # at most six tokens, the first ones
            y = y * (torch.arange(y[..., 0].numel()) < 6).view(y.shape[:-1])[..., None]
        if self.kind == "noise":
            y = y + torch.rand_like(y) * self.training
        if self.kind == "buffer":
            self.seen += 1
        if isinstance(bias, Tensor):
            y = y + bias
        if self.kind == "record":
            return Record(x + y, {"twice": 2 * y}, x.new_ones(3))
        return (x + y, y.square().mean()) if self.kind == "loss" else x + y


@dataclass
class Record:
    hidden: Tensor
    more: dict[str, Tensor]
    shared: Tensor


torch.export.register_dataclass(Record)


class Toy(nn.Module):
    """Calls its one block, as `calls` says. parts: does by hand what `rows` does. `toy_sharded` names the block."""

    def __init__(self, kind: str = "plain", parts: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Linear(16, 16)
        self.layers = nn.ModuleList([Block(kind)])
        self.scale = nn.Parameter(torch.rand(5, 16))
        self.parts = parts

    def forward(self, x: Tensor, calls: int = 1, **kwargs: Any) -> Tensor:
        x = self.stem(x)
        if self.layers[0].kind == "captured":
            kwargs["bias"] = self.scale[: x.shape[1]].sigmoid()
        for _ in range(calls):
            if self.parts is None:
                x = self.layers[0](x, **kwargs)
            else:
                given = [self.layers[0](piece, **kwargs) for piece in x.split(self.parts)[::-1]]
                x = torch.cat(given[::-1])
            if isinstance(x, Record):
                x = x.hidden + x.more["twice"] * x.shared[0]
            if isinstance(x, tuple):
                x = x[0]
        return x


def toy_sharded(kind: str = "plain", **options: Any) -> tuple[Toy, Any, Any]:
    model = Toy(kind)
    store = tiered("host", step=TorchStep(), tile_numel=1 << 20)
    optimizer = zero_core.shard(model, torch.optim.SGD(model.parameters(), lr=0.1), store=store)
    return model, optimizer, offload_activations(model, store, "recompute", **{"row_modules": ["layers.*"]} | options)


def toy_batch(rows: int = 8, tokens: int = 5) -> Tensor:
    return torch.randn(rows, tokens, 16, generator=torch.Generator().manual_seed(1))


class Adds(torch.autograd.Function):
    """A loss that reaches gradients and no value."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0], gradients[0].new_ones(())
