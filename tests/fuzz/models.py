"""Builds a program's model: blocks of every kind, in every container, with every kind of output.

Plain torch only. Activations are smooth and values stay near one, so that rounding stays rounding.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint

from tests.fuzz.program import Block, Model

__all__ = ["Failure", "Piece", "build", "first_tensor"]

WORDS = 7  # tokens are below it
Pair = namedtuple("Pair", ["hidden", "extra"])


class Failure(Exception):
    """Raised inside forward or backward, because the program asks for it."""


@dataclass
class Output:
    hidden: Tensor
    extra: Any = None


class Thing:
    """A plain object that carries tensors."""

    def __init__(self, hidden: Tensor, extra: Any) -> None:
        self.hidden, self.extra = hidden, extra


class Slots:
    """An object without __dict__."""

    __slots__ = ("extra", "hidden")

    def __init__(self, hidden: Tensor, extra: Any) -> None:
        self.hidden, self.extra = hidden, extra


PACK: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tensor": lambda y, x: y,
    "tuple": lambda y, x: (y, y.detach()),
    "list": lambda y, x: [y, None],
    "dict": lambda y, x: {"hidden": y, "mean": y.mean()},
    "dataclass": lambda y, x: Output(y, {"twice": [y * 2]}),
    "namedtuple": lambda y, x: Pair(y, 3),
    "nested": lambda y, x: {"hidden": ([y], x), "more": [(y + 1,)]},
    "object": lambda y, x: Thing(y, x),
    "pass": lambda y, x: (y, x),
    "slots": lambda y, x: Slots(y, x),
}


def first_tensor(output: Any) -> Tensor:
    """What PACK wrapped."""
    while not isinstance(output, Tensor):
        if isinstance(output, (Output, Thing, Slots)):
            output = output.hidden
        else:
            output = output["hidden"] if isinstance(output, dict) else output[0]
    return output


# -- kinds of blocks ---------------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return (weight + weight.T) / 2


class Lora(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Experts(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor, tokens: Tensor) -> Tensor:
        return self.experts[int(tokens[0]) % 2](x)  # the last one is never chosen


class Nested(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Functional(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.shift = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.shift)


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


class Tagged(nn.Parameter):
    """A class of parameters of the user's."""


def _mlp(d: int) -> nn.Module:
    return nn.Sequential(nn.LayerNorm(d), nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))


def _conv(d: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, d)), nn.Conv1d(1, 3, 3, padding=1), nn.SiLU(), nn.Conv1d(3, 1, 1), nn.Flatten(1)
    )


def _conv2d(d: int) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 2, d // 2)), nn.Conv2d(1, 2, 3, padding=1), nn.Flatten(1), nn.Linear(2 * d, d)
    )


KINDS: dict[str, Callable[[int], nn.Module]] = {
    "linear": lambda d: nn.Linear(d, d),
    "mlp": _mlp,
    "conv": _conv,
    "conv2d": _conv2d,
    "layernorm": nn.LayerNorm,
    "batchnorm": nn.BatchNorm1d,
    "embedding": lambda d: nn.Embedding(WORDS, d, padding_idx=2),
    "max_norm": lambda d: nn.Embedding(WORDS, d, max_norm=1.0),
    "bag": lambda d: nn.EmbeddingBag(WORDS, d, mode="mean"),
    "scalar": lambda d: Holder(nn.Parameter(torch.tensor(0.1))),
    "empty": lambda d: Holder(nn.Parameter(torch.empty(0)), nn.Parameter(torch.randn(3))),
    "list": lambda d: Holder(*(nn.Parameter(torch.randn(n) / 9) for n in (1, 5, 2))),
    "nested": Nested,
    "gru": lambda d: nn.GRU(d, d, batch_first=True),
    "mha": lambda d: nn.MultiheadAttention(d, 2, batch_first=True),
    "encoder": lambda d: nn.TransformerEncoderLayer(d, 2, 2 * d, dropout=0.1, activation="gelu", batch_first=True),
    "experts": Experts,
    "bilinear": lambda d: nn.Bilinear(d, d, d),
    "lora": Lora,
    "functional": Functional,
    "buffer": Running,
    "dropout": lambda d: nn.Sequential(nn.Linear(d, d), nn.Dropout(0.3)),
    "weight_norm": lambda d: parametrizations.weight_norm(nn.Linear(d, d)),
    "spectral_norm": lambda d: parametrizations.spectral_norm(nn.Linear(d, d)),
    "orthogonal": lambda d: parametrizations.orthogonal(nn.Linear(d, d)),
    "symmetric": lambda d: _parametrised(nn.Linear(d, d)),
    "old_weight_norm": lambda d: torch.nn.utils.weight_norm(nn.Linear(d, d)),
    "old_spectral_norm": lambda d: torch.nn.utils.spectral_norm(nn.Linear(d, d)),
    # what may be refused
    "integer": lambda d: Holder(
        nn.Parameter(torch.randn(2) / 9), nn.Parameter(torch.tensor([1, 2]), requires_grad=False)
    ),
    "subclass": lambda d: Holder(Tagged(torch.randn(3) / 9)),
    "double": lambda d: Holder(nn.Parameter(torch.randn(2) / 9), nn.Parameter(torch.randn(3).double() / 9)),
    "slots": lambda d: nn.Linear(d, d),
}


def _parametrised(linear: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(linear, "weight", Symmetric())
    return linear


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp": lambda p: p.clamp_(-0.3, 0.3),
    "data": lambda p: p.data.mul_(0.95),
    "detach": lambda p: p.detach().mul_(0.95),
    "copy": lambda p: p.copy_(p * 0.9),
    "row": lambda p: p[0].zero_(),
}


class Piece(nn.Module):
    """A block of any kind, with what is done to it and around it."""

    def __init__(self, spec: Block, width: int) -> None:
        super().__init__()
        self.spec = spec
        self.inner = KINDS[spec.kind](width)
        if spec.frozen:
            for parameter in list(self.parameters())[: 1 if spec.frozen == "first" else None]:
                parameter.requires_grad_(False)
        if spec.hook == "forward":
            self.inner.register_forward_hook(lambda module, args, output: None)
            self.register_forward_pre_hook(lambda module, args: None)
        if spec.hook == "backward":
            self.register_full_backward_hook(lambda module, ours, theirs: None)
        if spec.hook == "parameter":
            for parameter in self.parameters():
                if parameter.requires_grad:
                    parameter.register_hook(lambda gradient: gradient * 0.5)

    def weight(self) -> nn.Parameter | None:
        """The parameter that ties, writes and uses from outside are about."""
        return next((p for p in self.parameters() if p.is_floating_point()), None)

    def forward(self, x: Tensor, tokens: Tensor, fail: bool = False) -> Any:
        if self.spec.write and (weight := self.weight()) is not None:
            with torch.no_grad():
                WRITES[self.spec.write](weight)
        kind, inner = self.spec.kind, self.inner
        if kind in ("embedding", "max_norm"):
            y = inner(tokens)
        elif kind == "bag":
            y = inner(tokens[:, None])
        elif kind == "experts":
            y = inner(x, tokens)
        elif kind == "bilinear":
            y = inner(x, x)
        elif kind == "mha":
            y = inner(x[:, None], x[:, None], x[:, None])[0][:, 0]
        elif kind in ("gru", "encoder"):
            y = inner(x[:, None])
            y = (y[0] if kind == "gru" else y)[:, 0]
        else:
            y = inner(x)
        y = x * 0.8 + 0.5 * torch.tanh(y)
        if fail:
            raise Failure("in forward")
        return PACK["slots" if kind == "slots" else self.spec.output](y, x)


class Network(nn.Module):
    """The blocks in their container, and what belongs to the root."""

    def __init__(self, spec: Model) -> None:
        super().__init__()
        self.spec = spec
        pieces = [Piece(block, spec.width) for block in spec.blocks]
        for i, j in spec.ties:
            _tie(pieces[i % len(pieces)], pieces[j % len(pieces)])
        if spec.container == "attributes":
            for k, piece in enumerate(pieces):
                self.add_module(f"block{k}", piece)
        else:
            named = {f"b{k}": piece for k, piece in enumerate(pieces)}
            makers: dict[str, Any] = {"list": nn.ModuleList, "dict": lambda p: nn.ModuleDict(named)}
            self.blocks = makers.get(spec.container, lambda p: nn.Sequential(*p))(pieces)
        if spec.root == "scale":
            self.scale = nn.Parameter(torch.ones(()))
        elif spec.root == "bias":
            self.bias = nn.Parameter(torch.zeros(spec.width))
        elif spec.root == "empty":
            self.nothing = nn.Parameter(torch.empty(0, 3))
        elif spec.root == "embedding":
            self.embed = nn.Embedding(WORDS, spec.width)

    def pieces(self) -> list[Piece]:
        return [module for module in self.modules() if isinstance(module, Piece)]

    def forward(self, x: Tensor, tokens: Tensor, turn: int = 0, fail: int = -1) -> Any:
        spec, given, pieces = self.spec, x, self.pieces()
        if spec.root == "embedding":
            x = x + self.embed(tokens)
        if spec.external >= 0 and (weight := pieces[spec.external % len(pieces)].weight()) is not None:
            x = x + 0.1 * torch.tanh(weight.sum())
        for k, piece in enumerate(pieces):
            for _ in range(_times(piece, turn)):
                x = self.run(piece, x, tokens, k == fail)
                if spec.in_place:
                    x += 0.1
        if spec.root == "scale":
            x = x * self.scale
        elif spec.root == "bias":
            x = x + self.bias
        return PACK[spec.output](x, given)

    def run(self, piece: Piece, x: Tensor, tokens: Tensor, fail: bool) -> Tensor:
        if piece.spec.use == "no_grad":
            with torch.no_grad():
                y = first_tensor(piece(x, tokens, fail))
            return x + 0.1 * y
        if piece.spec.checkpoint and torch.is_grad_enabled():
            reentrant = piece.spec.checkpoint == "reentrant"
            return checkpoint(lambda y: first_tensor(piece(y, tokens, fail)), x, use_reentrant=reentrant)
        return first_tensor(piece(x, tokens, fail))


class Wrapper(nn.Module):
    def __init__(self, inner: Network) -> None:
        super().__init__()
        self.module = inner

    def pieces(self) -> list[Piece]:
        return self.module.pieces()

    def forward(self, *args: Any) -> Any:
        return self.module(*args)


def _times(piece: Piece, turn: int) -> int:
    use = piece.spec.use
    if use == "training":
        return int(piece.training)
    return {"twice": 2, "never": 0, "odd": turn % 2}.get(use, 1)


def _tie(one: Piece, other: Piece) -> None:
    """Give `other` the weight of `one`, if both have a plain one of the same shape."""
    for module in other.modules():
        for name, parameter in list(module._parameters.items()):
            for mine in one.parameters():
                if parameter is not None and mine is not parameter and mine.shape == parameter.shape and mine.ndim > 1:
                    setattr(module, name, mine)
                    return


def build(spec: Model, seed: int) -> Network | Wrapper:
    """The model of a description; a seed gives the same values every time."""
    torch.manual_seed(seed)
    network = Network(spec)
    return Wrapper(network) if spec.wrapped else network
