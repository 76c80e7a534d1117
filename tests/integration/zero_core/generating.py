"""A Llama that trains, and between its steps generates on each rank other lengths from other prompts."""

import torch

import zero_core
from tests import kit, models
from tests.integration.zero_core.toys import world


def prompts(rank):
    """Of 2 + 3 r tokens on rank r, 5 - 2 r of them to generate."""
    tokens = torch.randint(1, models.VOCABULARY, (1, 2 + 3 * rank), generator=torch.Generator().manual_seed(rank))
    return [(tokens, 5 - 2 * rank), (tokens[:, :2], 2 + rank)]


def continued(model, rank, **options):
    options |= {"do_sample": False, "pad_token_id": 0}
    return [model.generate(x, max_new_tokens=n, min_new_tokens=n, **options).tolist() for x, n in prompts(rank)]


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
            assert continued(model, rank, synced_gpus=True) == continued(plain, rank)
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
