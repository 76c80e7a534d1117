"""Builds a program's model: blocks of every kind, in every container, with every kind of output.

Plain torch only. Activations are smooth and values stay near one, so that rounding stays rounding.
"""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.fuzz.kinds import KINDS, WORDS, call
from tests.fuzz.program import Block, Model
from tests.fuzz.recomputing import forced, rerun
from tests.fuzz.sharing import share

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
}


def first_tensor(output: Any) -> Tensor:
    """What PACK wrapped."""
    while not isinstance(output, Tensor):
        if isinstance(output, (Output, Thing)):
            output = output.hidden
        else:
            output = output["hidden"] if isinstance(output, dict) else output[0]
    return output


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "clamp": lambda p: p.clamp_(-0.3, 0.3),
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
        if spec.keep == "buffer":
            self.register_buffer("kept", torch.zeros(()), persistent=False)
        else:
            self.kept: Any = {"list": [], "dict": {}}.get(spec.keep)
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

    def keep(self, y: Tensor) -> None:
        """Keeps the tensor where a loss may take it, and in a container the one before it, too."""
        if self.spec.keep == "list":
            self.kept.append(y)
            del self.kept[:-2]
        elif self.spec.keep == "dict":
            self.kept = {"before": self.kept.get("last", y), "last": y}
        else:
            self.kept = y

    def forward(self, x: Tensor, tokens: Tensor, fail: bool = False) -> Any:
        if self.spec.write and (weight := self.weight()) is not None:
            with torch.no_grad():
                WRITES[self.spec.write](weight)
        kind = self.spec.kind
        y = call(kind, self.inner, x, tokens)
        if self.spec.keep:
            self.keep(y)
        y = x * 0.8 + 0.5 * torch.tanh(y)
        shadow = getattr(self, "shadow", None)  # a buffer or an attribute over the memory of a parameter
        if shadow is not None:
            y = y + 0.1 * torch.tanh(shadow.sum())
        if fail:
            raise Failure("in forward")
        return PACK[self.spec.output](y, x)


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
        for wanted in spec.shares:
            share(self, pieces, wanted)

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
        def run(y: Tensor) -> Tensor:
            return first_tensor(piece(y, tokens, fail))

        if piece.spec.use == "no_grad":
            with torch.no_grad():
                y = run(x)
            return x + 0.1 * y
        if piece.spec.use.startswith("forced"):
            return forced(run, x, piece.spec.use == "forced_through")
        if piece.spec.checkpoint and torch.is_grad_enabled():
            if piece.spec.checkpoint == "adjoint":
                return rerun(run, piece, x)
            return checkpoint(run, x, use_reentrant=piece.spec.checkpoint == "reentrant")
        return run(x)


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
