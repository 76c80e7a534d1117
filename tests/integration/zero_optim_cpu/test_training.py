"""A byte-level transformer learns as well with coarse layouts as with fp32 states."""

import argparse
import functools
import inspect

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import zero_optim_cpu

pytestmark = pytest.mark.promise("coarse-moments")

CONTEXT, WIDTH, HEADS, LAYERS, STEPS, BATCH = 32, 64, 4, 2, 300, 16


@functools.cache
def windows() -> tuple[Tensor, Tensor]:
    """(n, CONTEXT) bytes to train on and to be held out, of a source file that every Python has; each plus its next."""
    text = torch.frombuffer(bytearray(inspect.getsource(argparse).encode()), dtype=torch.uint8).long()
    view = text.unfold(0, CONTEXT + 1, 1)
    held_out = torch.arange(view.shape[0]) // 500 % 10 == 0  # runs of 500, so that few windows reach over
    return view[~held_out], view[held_out][:: CONTEXT // 2]


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.position = torch.nn.Embedding(256, WIDTH), torch.nn.Embedding(CONTEXT, WIDTH)
        options = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True}
        block = torch.nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, **options)
        self.blocks = torch.nn.TransformerEncoder(block, LAYERS, enable_nested_tensor=False)
        self.head = torch.nn.Sequential(torch.nn.LayerNorm(WIDTH), torch.nn.Linear(WIDTH, 256))
        self.mask = torch.nn.Transformer.generate_square_subsequent_mask(CONTEXT)

    def forward(self, inputs: Tensor) -> Tensor:
        """(batch, context) bytes -> (batch, context, 256) logits."""
        return self.head(self.blocks(self.embedding(inputs) + self.position.weight, self.mask, is_causal=True))


def loss_of(model: Model, batch: Tensor) -> Tensor:
    return cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@pytest.fixture(autouse=True)
def one_thread():
    """A step of this model is short: two threads would mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@functools.cache
def final_loss(layout: str) -> float:
    """Mean loss over held-out windows after training, nats a byte."""
    torch.manual_seed(0)
    train, held_out = windows()
    model = Model()
    optimizer = zero_optim_cpu.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.99), layout=layout)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=STEPS, cycle_momentum=False)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        loss = loss_of(model, train[torch.randint(train.shape[0], (BATCH,), generator=generator)])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        return loss_of(model, held_out).item()


@pytest.mark.parametrize("layout", ["split_bf16m", "split_8bit"])
def test_moments_of_fewer_bits_cost_less_than_one_percent(layout: str) -> None:
    exact = final_loss("fp32")
    assert exact < 2.6  # a table of byte pairs has about 2.6 on such text; untrained: 5.5
    assert final_loss(layout) < 1.01 * exact
