"""What a step sends from machine to machine, and what the link costs: without and with secondary shards.

    python -m tests.machines.two 1gbit 2ms 2 -m tests.benchmarks.over_the_link [--rounds 6] [--steps 3]
    python -m tests.machines.two 0 0 2 -m tests.benchmarks.over_the_link
    python -m tests.machines.two 1gbit 2ms 2 -m tests.benchmarks.over_the_link --sides "stage 2" DDP replicas HSDP

A Llama of 8.4 M parameters in fp32, stage 3, a row of 128 tokens a rank, prefetch of 8 MiB, so that every unit is
gathered in forward and again in backward. The sides take turns. The first rank prints JSON: of each round the seconds
of a step, and megabytes that its machine has sent a step. A link costs the step on it less that without a limit.
"stage 2" and torch's DDP keep all parameters on every rank; "replicas" and FSDP2's HSDP keep a model on each machine.
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
from zero_core.comm.ranks import mesh_of_replicas

KINDS: dict[str, dict[str, Any]] = {
    "peers": {},
    "secondary shards": {"secondary_shards": True},
    "stage 2": {"stage": 2},
    "replicas": {"replicas": 2},
}
PEERS = ("DDP", "HSDP")
PAUSE = 0.2  # seconds until what was sent has been counted


def sent() -> int:
    """Bytes that this machine has sent over the link."""
    lines = Path("/proc/net/dev").read_text().splitlines()
    return sum(int(line.split(":")[1].split()[8]) for line in lines if line.strip().startswith(f"{DEVICE}:"))


class Side:
    def __init__(self, name: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 4}
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=4096, use_cache=False, **sizes)).train()
        self.numel = sum(p.numel() for p in self.model.parameters())
        self.optimizer: Any
        self.clip = name in PEERS
        if name in PEERS:
            self.model = of_torch(name, self.model)
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        else:
            options = dict(KINDS[name])
            if replicas := options.pop("replicas", None):
                options["mesh"] = mesh_of_replicas("cpu", replicas, dist.get_world_size())
            self.optimizer = zero_core.shard(
                self.model, torch.optim.AdamW(self.model.parameters(), lr=1e-3), max_grad_norm=1.0,
                prefetch_bytes=8 << 20, resident_bytes=0, **options,
            )  # fmt: skip
        generator = torch.Generator().manual_seed(dist.get_rank())
        self.tokens = torch.randint(0, 4096, (1, 128), generator=generator)
        self.seconds: list[float] = []
        self.megabytes = self.loss = 0.0

    def step(self) -> None:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
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


def of_torch(name: str, model: Any) -> Any:
    """The same model under DDP, or under FSDP2 with a mesh of machines and ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    if name == "DDP":
        return DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard"))
    for block in model.model.layers:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--sides", nargs="+", default=list(KINDS)[:2], choices=[*KINDS, *PEERS])
    given = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    sides = {name: Side(name) for name in given.sides}
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
        print(json.dumps({"numel": next(iter(sides.values())).numel, **told}), flush=True)
    for name, side in sides.items():
        if name not in PEERS:
            side.optimizer.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
