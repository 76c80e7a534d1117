"""A Llama that trains, and between its steps generates on each rank other lengths from other prompts."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager

import torch

import zero_core
from tests import kit, models
from tests.integration.zero_core.toys import world
from zero_core.runtime.residency import UnitMemory


@contextmanager
def counting_units():
    """Yields {"now": units with memory, "most": of them at once}."""
    count, move = Counter(), UnitMemory._move

    def counted(self, by):
        move(self, by)
        count["now"] += {"begin": 1, "lend": 1, "end": -1}.get(by, 0)
        count["most"] = max(count["most"], count["now"])

    UnitMemory._move = counted
    try:
        yield count
    finally:
        UnitMemory._move = move


def prompts(rank, step=0):
    """Of 2 + 3 r tokens on rank r, 5 - 2 r of them to generate, and none at all on rank 1 at the second step."""
    tokens = torch.randint(1, models.VOCABULARY, (1, 2 + 3 * rank), generator=torch.Generator().manual_seed(rank))
    return [] if step == 1 and rank == 1 else [(tokens, 5 - 2 * rank), (tokens[:, :2], 2 + rank)]


def continued(model, rank, step=0):
    options = {"do_sample": False, "pad_token_id": 0}
    return [model.generate(x, max_new_tokens=n, min_new_tokens=n, **options).tolist() for x, n in prompts(rank, step)]


def train_and_generate(stage, generates, options, store=None):
    """Losses and weights of three steps; each generates on every rank, if told, what a plain copy does."""
    rank = world()[0]
    model, plain = models.build("llama"), models.build("llama").to(options.get("param_dtype"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = zero_core.shard(model, optimizer, stage=stage, store=store and store(), **options)
    losses = []
    for step in range(3):
        if generates:
            with zero_core.gathered(model):
                plain.load_state_dict({name: p.detach().clone() for name, p in model.named_parameters()})
            with counting_units() as count, zero_core.uneven(model):
                assert continued(model, rank, step) == continued(plain, rank, step)
            assert stage == 0 or count["now"] == 0  # at stage 0 nothing is gathered, and units stay until the step
        losses.append(models.loss(model, models.batch(step, rank)))
        kit.step(optimizer, losses[-1])
    weights = kit.values(model, master=True)
    optimizer.close()
    return [loss.item() for loss in losses], weights


def generate_between(stage, options, store=None):
    """Training is, bit for bit, what it would have been without the generation."""
    losses, weights = train_and_generate(stage, True, options, store)
    expected_losses, expected = train_and_generate(stage, False, options, store)
    assert losses == expected_losses
    assert all(torch.equal(a, b) for a, b in zip(weights, expected, strict=True))
