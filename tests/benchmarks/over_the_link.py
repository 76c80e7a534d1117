"""What a step sends from machine to machine, and what the link costs: peers, machines first, and secondary shards.

    python -m tests.machines.two 1gbit 2ms 2 -m tests.benchmarks.over_the_link [--rounds 6] [--steps 3]
    python -m tests.machines.two 0 0 2 -m tests.benchmarks.over_the_link

A Llama of 8.4 M parameters in fp32, stage 3, a row of 128 tokens a rank, prefetch of 8 MiB, so that every unit is
gathered in forward and again in backward. The three take turns. The first rank prints JSON: of each round the seconds
of a step, and megabytes that its machine has sent a step. A link costs the step on it less that without a limit.
"""

from __future__ import annotations

import argparse
import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import zero_core
from tests.machines.two import DEVICE
from zero_core.comm import MessageCollectives

KINDS: dict[str, dict[str, Any]] = {
    "peers": {"collectives": MessageCollectives},
    "machines": {},
    "secondary shards": {"secondary_shards": True},
}
PAUSE = 0.2  # seconds until what was sent has been counted


def sent() -> int:
    """Bytes that this machine has sent over the link."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{DEVICE}:"))


class Side:
    def __init__(self, options: dict[str, Any]) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, use_cache=False, **sizes)).train()
        self.numel = sum(p.numel() for p in self.model.parameters())
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer = zero_core.shard(
            self.model, optimizer, max_grad_norm=1.0, prefetch_bytes=8 << 20, resident_bytes=0, **options
        )
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(0, 4096, (1, 128), generator=generator)
        self.seconds: list[float] = []
        self.megabytes = self.loss = 0.0

    def step(self) -> None:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.loss = loss.item()

    def turn(self, steps: int) -> None:
        dist.barrier()
        time.sleep(PAUSE)
        before, begun = sent(), time.perf_counter()
        for _ in range(steps):
            self.step()
        dist.barrier()
        self.seconds.append((time.perf_counter() - begun) / steps)
        time.sleep(PAUSE)
        self.megabytes = (sent() - before) / steps / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sides = {name: Side(options) for name, options in KINDS.items()}
    for side in sides.values():
        side.step()
        side.step()
    for number in range(given.rounds):
        for side in list(sides.values())[:: -1 if number % 2 else 1]:
            side.turn(given.steps)
    if dist.get_rank() == 0:
        told = {
            name: {"seconds": [round(s, 3) for s in side.seconds], "MB": round(side.megabytes, 2), "loss": side.loss}
            for name, side in sides.items()
        }
        print(json.dumps({"numel": sides["peers"].numel, **told}), flush=True)
    for side in sides.values():
        side.optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
