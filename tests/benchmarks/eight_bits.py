"""8-bit moments: the loss curves of zero_optim_cpu's split_8bit beside those of bitsandbytes' AdamW8bit.

    python -m tests.benchmarks.eight_bits [--steps 400] [--seeds 3] [--parameters bfloat16|float32]

A Llama of 0.9 M parameters learns the bytes of this project's documentation, from first values and in an order that the
seed draws. With bfloat16 parameters bitsandbytes' sides have fp32 masters, as ours have, so that the moments alone
differ. The rate rises for a tenth of the steps and then falls to 0. What is printed is JSON: every 50 steps the loss on
held-out text, of each seed and kind, and whether the mean of ours lies between the least and the largest of
bitsandbytes'. "fp32" is torch's AdamW. bitsandbytes has to be installed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Built = tuple[Callable[[], None], Any]  # a step with its clipping, and the optimizer
LENGTH, ROWS, EVERY, RATE = 128, 16, 50, 1e-3


def text() -> Tensor:
    pages = sorted(Path(__file__).parents[2].glob("docs/*.md"))
    return torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()


def rows_of(values: Tensor, generator: torch.Generator, count: int) -> Tensor:
    starts = torch.randint(0, values.numel() - LENGTH, (count,), generator=generator)
    return torch.stack([values[start : start + LENGTH] for start in starts.tolist()])


def ours(model: nn.Module, dtype: torch.dtype) -> Built:
    import zero_core
    import zero_offload
    import zero_optim_cpu

    store = zero_offload.TieredStore(step=zero_optim_cpu.CpuStep(layout="split_8bit"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    narrow = None if dtype == torch.float32 else dtype
    made = zero_core.shard(model, optimizer, store=store, max_grad_norm=1.0, param_dtype=narrow)

    def step() -> None:
        made.step()
        made.zero_grad()

    return step, made


def with_masters(make: Callable[[list[nn.Parameter]], Any]) -> Callable[[nn.Module, torch.dtype], Built]:
    """fp32 masters beside the parameters, clipped and updated by the optimizer that `make` makes."""

    def build(model: nn.Module, dtype: torch.dtype) -> Built:
        masters = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
        model.to(dtype)
        optimizer = make(masters)

        def step() -> None:
            for master, parameter in zip(masters, model.parameters(), strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            with torch.no_grad():
                for master, parameter in zip(masters, model.parameters(), strict=True):
                    parameter.copy_(master)

        return step, optimizer

    return build


def of_bitsandbytes(masters: list[nn.Parameter]) -> Any:
    import bitsandbytes

    return bitsandbytes.optim.AdamW8bit(masters, lr=RATE, weight_decay=0.01, min_8bit_size=0)


def of_torch(masters: list[nn.Parameter]) -> Any:
    return torch.optim.AdamW(masters, lr=RATE)


KINDS = {"bitsandbytes": with_masters(of_bitsandbytes), "ours": ours, "fp32": with_masters(of_torch)}


def losses_of(kind: str, seed: int, steps: int, dtype: torch.dtype) -> list[float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, use_cache=False, **sizes)).train()
    values = text()
    held, seen = values[: values.numel() // 20], values[values.numel() // 20 :]
    generator = torch.Generator().manual_seed(seed)
    check = rows_of(held, torch.Generator().manual_seed(99), 64)
    step, optimizer = KINDS[kind](model, dtype)
    found = []
    for number in range(1, steps + 1):
        batch = rows_of(seen, generator, ROWS)
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(10 * number / steps, (steps - number) / (0.9 * steps))
        model(input_ids=batch, labels=batch).loss.backward()
        step()
        if number % EVERY == 0:
            with torch.no_grad():
                found.append(float(model(input_ids=check, labels=check).loss))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--parameters", choices=("float32", "bfloat16"), default="bfloat16")
    given = parser.parse_args()
    dtype = getattr(torch, given.parameters)
    found: dict[str, Any] = {
        kind: [losses_of(kind, seed, given.steps, dtype) for seed in range(given.seeds)] for kind in KINDS
    }
    theirs = list(zip(*found["bitsandbytes"], strict=True))
    means = [sum(values) / given.seeds for values in zip(*found["ours"], strict=True)]
    found["mean of ours within theirs"] = [
        min(values) <= mean <= max(values) for values, mean in zip(theirs, means, strict=True)
    ]
    print(json.dumps(found))


if __name__ == "__main__":
    main()
