"""Generates text from a model that may be larger than memory, all ranks in step, a byte or token at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from zero_train import models
from zero_train.schema import RunConfig

CONTEXT_BYTES = 128  # context of each draw, at most: enough to show progress, and cheap without a cache


@torch.no_grad()
def generate(
    model: nn.Module,
    run: RunConfig,
    context: int,
    device: torch.device,
    stop: Callable[[], bool] = lambda: False,
    tokenizer: Any = None,
) -> str:
    """Returns run.sample_prompt followed by up to run.sample_bytes bytes, as text. `stop` ends it early. Collective.

    The text is the same on every rank, because the draw has its own generator. Bytes that are not UTF-8 become
    replacement marks. The model sees `context` bytes at most. With a tokenizer of transformers, counts are in tokens.
    """
    was_training = model.training
    model.eval()
    dice = torch.Generator().manual_seed(run.seed)
    prompt = run.sample_prompt or "\n"
    text = list(prompt.encode()) if tokenizer is None else tokenizer.encode(prompt, add_special_tokens=False)
    known = 256 if tokenizer is None else len(tokenizer)
    for _ in range(run.sample_bytes):
        if stop():
            break
        tokens = torch.tensor([text[-min(context, CONTEXT_BYTES) :]], device=device)
        scores = models.logits(model, tokens)[0, -1, :known].cpu()
        if run.sample_temperature > 0:
            text.append(int(torch.multinomial((scores / run.sample_temperature).softmax(-1), 1, generator=dice)))
        else:
            text.append(int(scores.argmax()))
    model.train(was_training)
    return bytes(text).decode(errors="replace") if tokenizer is None else str(tokenizer.decode(text))
