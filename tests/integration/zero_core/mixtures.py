"""Tiny mixtures of experts for tests on several ranks: a model, batches, and a plain twin's steps."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_core
from tests import kit

GROUP = 100_000  # bytes of a group's experts: four of sixteen in fp32
STACKS = ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")


def qwen(seed: int = 0, **options: Any) -> Any:
    """A Qwen3-MoE of two blocks with sixteen experts each, and its auxiliary loss."""
    from transformers import AutoModelForCausalLM
    from transformers.models.qwen3_moe import Qwen3MoeConfig

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        vocab_size=64, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=16,
        intermediate_size=64, moe_intermediate_size=32, num_experts=16, num_experts_per_tok=2, pad_token_id=0,
        max_position_embeddings=32, output_router_logits=True, attn_implementation="eager", **options,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.05)
    return model


def frozen() -> Any:
    """The same, whose experts are not trained."""
    model = qwen()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("experts" not in name)
    return model


def batch(number: int) -> Tensor:
    """(2, 6) tokens, or (1, 2), of which some group of experts gets none."""
    shape = (1, 2) if number % 2 else (2, 6)
    return torch.randint(0, 64, shape, generator=torch.Generator().manual_seed(number))


def loss_of(model: nn.Module, number: int) -> Tensor:
    tokens = batch(number)
    return model(input_ids=tokens, labels=tokens, use_cache=False).loss


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def made(build: Any = adamw, **options: Any) -> tuple[Any, Any, Any]:
    """A plain model, a copy of it whose experts are sharded in groups, and the copy's optimizer."""
    dense = qwen()
    model = copy.deepcopy(dense)
    return dense, model, zero_core.shard(model, build(model.parameters()), **{"expert_bytes": GROUP, **options})


def share(number: int) -> tuple[int, list[int]]:
    """The number of this rank's batch, and those of all ranks."""
    rank, size = kit.world()
    return number * size + rank, [number * size + each for each in range(size)]


def trained_plainly(model: nn.Module, steps: int = 3, norm: float | None = None, accumulate: int = 1) -> list[Tensor]:
    """Gradients of the first step, by name; the model is trained in place with the batches of all ranks."""
    optimizer, first = adamw(model.parameters()), {}
    for step in range(steps):
        for micro in range(accumulate):
            numbers = share(step * accumulate + micro)[1]
            (sum(loss_of(model, each) for each in numbers) / len(numbers)).backward()
        if not step:
            first = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        if norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), norm)
        optimizer.step()
        optimizer.zero_grad()
    return first


def grouped(model: nn.Module) -> list[str]:
    """Names of the units that are groups of experts."""
    return [unit.name for unit in zero_core.units(model) if unit.name.endswith("]")]


def close(found: Tensor, wanted: Tensor, scale: float = 1.0) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=1e-4 * scale, atol=2e-6 * scale)


def assert_same_values(model: nn.Module, dense: nn.Module) -> None:
    """The sharded model has the plain one's parameters. Collective."""
    for found, wanted in zip(kit.values(model), dense.parameters(), strict=True):
        close(found, wanted.detach(), 10)


class ListedBlock(nn.Module):
    """A router, and experts that are modules of a list. It calls those that its tokens want, from the last to the
    first. again: it calls the last a second time, after the others. alone: each call is in a checkpoint of its own."""

    def __init__(self, width: int, experts: int, again: bool, alone: bool) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(width), nn.Linear(width, experts)
        self.again, self.alone = again, alone
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 2 * width), nn.SiLU(), nn.Linear(2 * width, width)) for _ in range(experts)
        )

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        weights, chosen = self.router(hidden).softmax(-1).topk(2)
        out = torch.zeros_like(x)
        hit = sorted(set(chosen.flatten().tolist()), reverse=True)
        for number in [*hit, *hit[: self.again]]:
            share = (weights * (chosen == number)).sum(-1)
            rows = share.nonzero()[:, 0]
            expert = self.experts[number]
            found = checkpoint(expert, hidden[rows], use_reentrant=False) if self.alone else expert(hidden[rows])
            out = out.index_add(0, rows, found * share[rows, None])
        return x + out


class Listed(nn.Module):
    """Two blocks of eight experts that are modules, and a head. checkpointed: "block", "expert" or ""."""

    def __init__(self, again: bool = False, checkpointed: str = "") -> None:
        super().__init__()
        self.layers = nn.ModuleList(ListedBlock(16, 8, again, checkpointed == "expert") for _ in range(2))
        self.head, self.checkpointed = nn.Linear(16, 4), checkpointed

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed == "block" else layer(x)
        return self.head(x).square().mean()


LISTED = [f"layers.{block}.experts.{number}" for block in range(2) for number in range(8)]


def tokens(number: int) -> Tensor:
    """Two tokens of width 16, or one: most experts are not called."""
    return torch.randn(2 - number % 2, 16, generator=torch.Generator().manual_seed(number))
