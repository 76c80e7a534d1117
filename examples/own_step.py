"""Trains with an optimizer of your own on any tier: Signum, and the `UpdateStep` that runs it on tiles.

python examples/own_step.py

Beside a torch optimizer, only the second class is new. It must be elementwise: each element of a parameter is updated
from the same element of its gradient and states. tests/conformance/zero_offload/test_toy_step.py runs the shipped
conformance suite on it, and compares a model's bits with those of the plain optimizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

import zero_core
from zero_core.precision import round_to
from zero_offload import MemoryByteStore, TieredStore
from zero_offload.protocols import Field, TileView, UpdateSegment


class Signum(torch.optim.Optimizer):
    """SignSGD with momentum (Bernstein et al. 2018): a step of `lr` in the direction of the momentum's sign."""

    optimizer_contract = "elementwise"  # parts of a parameter may be stepped apart

    def __init__(self, parameters: Any, lr: float = 1e-3, momentum: float = 0.9) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                advance(parameter, momentum, parameter.grad, group)


def advance(master: Tensor, momentum: Tensor, gradient: Tensor, options: Any) -> None:
    """Computes one step in fp32 and in place, for both classes."""
    momentum.mul_(options["momentum"]).add_(gradient * (1 - options["momentum"]))
    master.sub_(momentum.sign() * options["lr"])


class SignumStep:
    """Signum on tiles. The state of a tile has the fp32 master where the parameter is not fp32 itself."""

    def bind(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, Signum):
            raise TypeError(f"SignumStep runs Signum, not {type(optimizer).__name__}")

    def layout(self, numel: int, parameter_dtype: torch.dtype) -> Sequence[Field]:
        names = ("momentum",) if parameter_dtype == torch.float32 else ("master", "momentum")
        return [Field(name, torch.float32, numel) for name in names]

    def state_names(self) -> tuple[str, ...]:
        return ("momentum",)

    def initialise(self, tile: TileView, master: Tensor) -> None:
        self.write(tile, "master", master)
        self.write(tile, "momentum", torch.zeros_like(master))

    def update(self, tile: TileView, segments: Sequence[UpdateSegment], scale: float) -> None:
        master = self.read(tile, "master")
        for segment in segments:
            part = slice(segment.start, segment.stop)
            gradient = tile.gradient[part].float() * scale
            advance(master[part], tile.states["momentum"][part], gradient, segment.options)
        self.write(tile, "master", master)

    def read(self, tile: TileView, name: str) -> Tensor:
        return (tile.parameter if name not in tile.states else tile.states[name]).clone()

    def write(self, tile: TileView, name: str, values: Tensor) -> None:
        if name in tile.states:
            tile.states[name].copy_(values)
        if name == "master":
            round_to(values, tile.parameter)

    def accumulate(self, into: Tensor, values: Tensor) -> None:
        into.add_(values.float())

    def chunk_norms_squared(self, values: Tensor) -> Sequence[float]:
        return [float(chunk.double().square().sum()) for chunk in values.split(1 << 20)]


def main() -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    optimizer: torch.optim.Optimizer = Signum(model.parameters(), lr=3e-3)
    store = TieredStore("nvme", "nvme", "nvme", nvme=MemoryByteStore(), step=SignumStep())  # a Slab on a real disk
    optimizer = zero_core.shard(model, optimizer, store=store)
    for step in range(60):
        inputs = torch.randn(32, 8)
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, 59):
            print(f"step {step + 1}: loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
