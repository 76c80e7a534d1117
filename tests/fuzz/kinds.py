"""The kinds of blocks that a model may have: what is inside, and how it is called.

Plain torch only. Activations are smooth and values stay near one, so that rounding stays rounding.
"""

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

WORDS = 7  # tokens are below it


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.T) / 2


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.experts[int(tokens[0]) % 2](x)  # the last one is never chosen


def _of_experts(forward: Any) -> Any:
    """As transformers marks the forward of stacked experts."""

    @functools.wraps(forward)
    def run(*given: Any, **named: Any) -> Any:
        return forward(*given, **named)

    return run


class Stack(nn.Module):
    """Three experts in stacks of matrices, as transformers has them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.num_experts, self.is_transposed, self.has_bias = 3, False, False
        self.config = SimpleNamespace(_experts_implementation="eager", num_experts_per_tok=2)
        self.up = nn.Parameter(torch.randn(3, 2 * width, width) / width)
        self.down = nn.Parameter(torch.randn(3, width, 2 * width) / width)

    @_of_experts
    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        found = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            rows, slots = (top_k_index == expert).nonzero(as_tuple=True)
            y = F.linear(torch.tanh(F.linear(hidden_states[rows], self.up[expert])), self.down[expert])
            found = found.index_add(0, rows, y * top_k_weights[rows, slots, None])
        return found


class Nested(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Running(nn.Module):
    """A linear, and buffers which its forward writes; one is not in the state dict."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.1)
            self.calls += 1
        return self.linear(x - self.mean)


class Holder(nn.Module):
    """Parameters that belong to no stock module."""

    def __init__(self, *parameters: nn.Parameter) -> None:
        super().__init__()
        self.weight = parameters[0]
        self.rest = nn.ParameterList(parameters[1:])

    def forward(self, x: Tensor) -> Tensor:
        y = x * (1 + self.weight.sum())
        for parameter in self.rest:
            y = y * (1 + 0.1 * parameter.float().mean())
        return y


def _mlp(d: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))


def _layer(d: int) -> nn.Module:
    return nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.1, activation="gelu", batch_first=True)


def _conv(d: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, d)), nn.Conv1d(1, 3, 3, padding=1), nn.SiLU(), nn.Conv1d(3, 1, 1), nn.Flatten(1)
    )


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda d: nn.Linear(d, d),
    "mlp": _mlp,
    "conv": _conv,
    "layernorm": nn.LayerNorm,
    "batchnorm": nn.BatchNorm1d,
    "embedding": lambda d: nn.Embedding(WORDS, d, padding_idx=2),
    "max_norm": lambda d: nn.Embedding(WORDS, d, max_norm=1.0),
    "scalar": lambda d: Holder(nn.Parameter(torch.tensor(0.1))),
    "empty": lambda d: Holder(nn.Parameter(torch.empty(0)), nn.Parameter(torch.randn(3))),
    "list": lambda d: Holder(*(nn.Parameter(torch.randn(n) / 9) for n in (1, 5, 2))),
    "nested": Nested,
    "gru": lambda d: nn.GRU(d, d, batch_first=True),
    "mha": lambda d: nn.MultiheadAttention(d, 2, batch_first=True),
    "encoder": _layer,
    "transformer": lambda d: nn.TransformerEncoder(_layer(d), 2),
    "masked": lambda d: nn.MultiheadAttention(d, 2, batch_first=True),
    "experts": Experts,
    "stack": Stack,
    "buffer": Running,
    "dropout": lambda d: nn.Sequential(nn.Linear(d, d), nn.Dropout(0.3)),
    "weight_norm": lambda d: parametrizations.weight_norm(nn.Linear(d, d)),
    "spectral_norm": lambda d: parametrizations.spectral_norm(nn.Linear(d, d)),
    "orthogonal": lambda d: parametrizations.orthogonal(nn.Linear(d, d)),
    "symmetric": lambda d: _parametrised(nn.Linear(d, d)),
}


def _parametrised(linear: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


def call(kind: str, inner: nn.Module, x: Tensor, tokens: Tensor) -> Tensor:
    """What a block of this kind makes of x, (rows, width), and of the tokens, (rows,)."""
    if kind in ("embedding", "max_norm"):
        return inner(tokens)
    if kind == "experts":
        return inner(x, tokens)
    if kind == "stack":
        return inner(x, (tokens[:, None] + torch.arange(2)) % 3, torch.softmax(x[:, :2], 1))
    if kind == "mha":
        return inner(x[:, None], x[:, None], x[:, None])[0][:, 0]
    if kind in ("transformer", "masked"):  # a sequence of three, of which the end is padding where the token says so
        sequence = torch.stack([x, x * 0.5, x.flip(1)], 1)
        padding = torch.arange(3) > (tokens % 3)[:, None]
        if kind == "masked":
            return inner(sequence, sequence, sequence, key_padding_mask=padding, need_weights=False)[0].mean(1)
        return inner(sequence, src_key_padding_mask=padding).mean(1)
    if kind in ("gru", "encoder"):
        y = inner(x[:, None])
        return (y[0] if kind == "gru" else y)[:, 0]
    return inner(x)
