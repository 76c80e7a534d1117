"""A byte-level model learns as well with coarse layouts as with fp32 states."""

from __future__ import annotations

import argparse
import functools
import inspect

import pytest
import torch
from torch import Tensor

import zero_optim_cpu

CONTEXT, WIDTH, STEPS, BATCH = 8, 96, 400, 256


@functools.cache
def windows() -> tuple[Tensor, Tensor]:
    """(n, CONTEXT) preceding bytes and (n,) next ones, of a source file that every Python has."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    view = text.unfold(0, CONTEXT + 1, 1)
    return view[:, :-1], view[:, -1]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, 24)
        self.hidden = torch.nn.Linear(24 * CONTEXT, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 256)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(torch.tanh(self.hidden(self.embedding(inputs).flatten(1)))).float()


@functools.cache
def final_loss(name: str, layout: str, dtype: torch.dtype) -> float:
    """Mean loss over held-out windows after training, nats a byte."""
    torch.manual_seed(0)
    inputs, targets = windows()
    held_out = torch.arange(inputs.shape[0]) % 10 == 0
    train_inputs, train_targets = inputs[~held_out], targets[~held_out]
    model = Model().to(dtype)
    optimizer = getattr(zero_optim_cpu, name)(model.parameters(), lr={"AdamW": 3e-3, "Lion": 6e-4}[name], layout=layout)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        rows = torch.randint(train_inputs.shape[0], (BATCH,), generator=generator)
        loss = torch.nn.functional.cross_entropy(model(train_inputs[rows]), train_targets[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    with torch.no_grad():
        return torch.nn.functional.cross_entropy(model(inputs[held_out]), targets[held_out]).item()


@pytest.mark.parametrize("name", ["AdamW", "Lion"])
@pytest.mark.parametrize("layout", ["split_bf16m", "split_8bit"])
def test_moments_of_fewer_bits_cost_less_than_one_percent(name: str, layout: str) -> None:
    exact = final_loss(name, "fp32", torch.float32)
    assert exact < 2.6  # a table of byte pairs has about 2.6 on such text; untrained: 5.5
    assert final_loss(name, layout, torch.float32) < 1.01 * exact


def test_split_masters_make_bf16_parameters_train_like_fp32_masters() -> None:
    """Bit for bit the same; and stochastic rounding, without a master, within five percent."""
    whole = final_loss("AdamW", "fp32", torch.bfloat16)
    assert final_loss("AdamW", "split", torch.bfloat16) == whole
    assert final_loss("AdamW", "bf16_stochastic", torch.bfloat16) < 1.05 * whole
