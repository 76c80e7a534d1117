"""Units that tell others more than they return: through lists, dicts and objects they are given, or their attributes.

Fails if what one leaves there is lost, is that of one part of the batch, or is computed with twice.
"""

from collections import UserDict

import pytest
import torch
from torch import Tensor, nn

import zero_core
from zero_offload import ActivationError, offload_activations

pytestmark = pytest.mark.promise("recomputed-objects")


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear, self.state, self.losses = kind, nn.Linear(6, 6), None, []
        self.linear.register_forward_hook(lambda *given: None)

    def forward(self, x: Tensor, given: object = None) -> Tensor:
        if self.kind == "hook of its own":
            handle = self.linear.register_forward_hook(lambda module, args, output: 1.2 * output)
        y = torch.tanh(self.linear(x))
        if self.kind == "hook of its own":
            handle.remove()
        if self.kind == "list":
            given.append(y.square().mean())
        if self.kind in ("dict", "object"):
            earlier = given.get("y")
            given["y"] = y if earlier is None else y * earlier
            y = given["y"]
        if self.kind == "table":
            y = y + given.sum(0)
        if self.kind == "generator":
            y = y * torch.rand(y.shape, generator=given)
        if self.kind == "loss in an attribute":
            self.state = y.square().mean()
        if self.kind == "losses in an attribute":
            self.losses.append(y.square().mean())
        if self.kind == "rows in an attribute":
            self.state = y
        return x + y


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        self.blocks = nn.ModuleList(Block(kind) for _ in range(3))
        self.embedding = nn.Embedding(4, 6)  # as many rows as the batch, and zeros: nothing shows that it is no batch
        nn.init.zeros_(self.embedding.weight)

    def forward(self, x: Tensor) -> Tensor:
        generator = torch.Generator().manual_seed(7)
        given = {"list": [], "dict": {}, "object": UserDict(), "generator": generator}.get(self.kind)
        given = self.embedding.weight if self.kind == "table" else given
        for block in self.blocks:
            block.losses.clear()
            x = block(x, given)
        told = [*given] if self.kind == "list" else [loss for block in self.blocks for loss in block.losses]
        told += [block.state.pow(3).sum() for block in self.blocks if block.state is not None]
        return x.square().mean() + sum(told)


def train(kind: str, policy: str | None, rows: int | None = None) -> list[object]:
    """Losses of three steps, gradients of the first, and parameters and attributes at the end."""
    model = Model(kind)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    activations = None
    if policy is not None:
        optimizer = zero_core.shard(model, optimizer)
        activations = offload_activations(model, policy=policy, rows=rows, row_modules=["blocks.*"])
    found: list[object] = []
    try:
        for step in range(3):
            loss = model(torch.randn(4, 6, generator=torch.Generator().manual_seed(step)))
            loss.backward()
            found += [loss.detach()]
            if step == 0:
                found += [p.grad if policy is None else zero_core.full_gradient(p) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            found += [model(torch.ones(4, 6)), *(block.state for block in model.blocks)]
        found += [len(block.losses) for block in model.blocks]
    finally:
        if activations is not None:
            activations.close()
            optimizer.close()
    return found


KINDS = ["list", "dict", "object", "table", "generator", "hook of its own"]
KINDS += ["loss in an attribute", "losses in an attribute", "rows in an attribute"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["recompute", "host"])
def test_recomputation_has_the_bits_of_plain_torch(kind, policy):
    for ours, plain in zip(train(kind, policy), train(kind, None), strict=True):
        assert torch.equal(ours, plain) if isinstance(plain, Tensor) else ours == plain


@pytest.mark.parametrize("kind", ["table", "rows in an attribute"])
@pytest.mark.parametrize("rows", [1, 2, 3])
def test_by_rows_tables_are_shared_and_attributes_are_joined(kind, rows):
    for ours, plain in zip(train(kind, "recompute", rows), train(kind, None), strict=True):
        assert ours == plain if not isinstance(plain, Tensor) else torch.allclose(ours, plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        *(
            (kind, "module blocks.0 adds, replaces or removes tensors in an argument")
            for kind in ("list", "dict", "object")
        ),
        ("generator", "module blocks.0 mixes the rows of its input"),
        ("loss in an attribute", r"returns, or stores in an attribute, a value of shape \(\), such as a loss"),
        ("losses in an attribute", "module blocks.0 writes into its attribute 'losses'"),
    ],
)
@pytest.mark.parametrize("rows", [1, 2])
def test_by_rows_what_would_be_that_of_one_part_is_refused(kind, message, rows):
    with pytest.raises(ActivationError, match=message):
        train(kind, "recompute", rows)
