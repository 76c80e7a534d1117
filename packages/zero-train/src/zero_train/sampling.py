"""Text from a model that may be larger than memory: one byte at a time, every rank in step. No cache, no training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from zero_train import models

CONTEXT_BYTES = 128  # what the model sees of its own text: enough to show what it learnt, cheap without a cache


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: str,
    length: int,
    *,
    temperature: float,
    seed: int,
    context: int,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
) -> str:
    """`prompt` and up to `length` more bytes, as text; bytes that are no UTF-8 are shown as replacement marks.

    The same on every rank: the draw has its own generator. `stop` ends it early.
    """
    was_training = model.training
    model.eval()
    dice = torch.Generator().manual_seed(seed)
    text = list(prompt.encode() or b"\n")
    for _ in range(length):
        if stop():
            break
        tokens = torch.tensor([text[-min(context, CONTEXT_BYTES) :]], device=device)
        scores = models.logits(model, tokens)[0, -1, :256].cpu()
        if temperature > 0:
            text.append(int(torch.multinomial((scores / temperature).softmax(-1), 1, generator=dice)))
        else:
            text.append(int(scores.argmax()))
    model.train(was_training)
    return bytes(text).decode(errors="replace")
