"""A step with Muon over plain torch, with everything in host memory and with everything on NVMe, in turn.

    python -m tests.benchmarks.muon DIRECTORY --pairs 12 --steps 4

A Llama of 119.6 M parameters in fp32: torch.optim.Muon has the matrices inside of its blocks and an AdamW the rest, and
gradients are clipped to a norm of 1. The plain AdamW is torch's fused one, ours is zero_optim_cpu's. Each variant is a
process of its own, and blocks of `--steps` steps alternate. A block ends when every update is stored, so with one step
nothing hides behind the next forward. A processor that has no arithmetic in bf16 takes minutes for torch's Muon:
`--orthogonal float32` runs zero_core.Muon instead, in all variants, and `--ns_steps` fewer steps of Newton-Schulz.

    plain    torch alone
    host     shard, with parameters, gradients and states in host memory
    nvme     shard, with everything on NVMe, `--slots` slots and what is read ahead of `--prefetch_bytes`
    adamw    torch alone, with its fused AdamW over everything: what Muon itself costs

What is printed is one JSON line a variant: medians of a step's seconds, exposed seconds and bytes, the peak resident
memory, and the geometric mean over pairs of its seconds to those of the first variant, with its 95 % interval for 4
pairs and more. The program ends with an error if losses of host and nvme are not the same, or those of plain torch
differ from them by more than rounding: its AdamW is another program than ours.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .commits import DIFFERENCES, SIZES, VOCABULARY
from .sft import peak_kib
from .turns import in_turn, report, started

ROUNDING = 1e-3  # nats by which losses may differ where gradients do by rounding, which Muon's bf16 magnifies
VARIANTS = ("plain", "host", "nvme", "adamw")


def optimizers(given: argparse.Namespace, model: Any) -> list[Any]:
    """Muon over the matrices inside of blocks and AdamW over the rest, or AdamW over everything."""
    import torch

    import zero_core

    from .step_model import matrices_and_rest

    if given.variant == "adamw":
        return [torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)]
    matrices, rest = matrices_and_rest(model)
    kind: Any = zero_core.Muon if given.orthogonal == "float32" else torch.optim.Muon
    muon = kind(matrices, lr=0.02, ns_steps=given.ns_steps)
    return [muon, torch.optim.AdamW(rest, lr=1e-4, fused=given.variant == "plain")]


def trained(given: argparse.Namespace) -> tuple[Callable[[int], float], Callable[[], dict[str, float]]]:
    """Trains `count` steps and returns the last loss; what the store counts."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **SIZES))
    tokens = torch.randint(0, VOCABULARY, (given.micro_batch, given.tokens))
    found, store = optimizers(given, model), None
    if given.variant in ("host", "nvme"):
        import zero_core
        from zero_nvme import Slab
        from zero_offload import TieredStore
        from zero_optim_cpu import CpuStep

        tier, sizes = given.variant, {"tile_numel": given.tile_numel, "slots": given.slots}
        slab = Slab([given.directory]) if tier == "nvme" else None
        store = TieredStore(tier, tier, tier, nvme=slab, step=CpuStep(), **sizes)
        ahead = given.prefetch_bytes
        found = [zero_core.shard(model, found, store=store, max_grad_norm=1.0, prefetch_bytes=ahead)]

    def block(count: int) -> float:
        for _ in range(count):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            if store is None:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for each in found:
                each.step()
                each.zero_grad()
        if store is not None:
            store.wait()
        return float(loss.detach())

    return block, lambda: store.stats() if store is not None else {}


def work(given: argparse.Namespace) -> None:
    """Train; for each line on stdin a block of steps, and what it took on stdout."""
    block, stats = trained(given)
    block(2)
    print("ready", flush=True)
    for _ in sys.stdin:
        before, begun = stats(), time.perf_counter()
        row: dict[str, Any] = {"loss": block(given.steps), "seconds": (time.perf_counter() - begun) / given.steps}
        after = stats()
        row |= {name: (after[name] - before[name]) / given.steps for name in DIFFERENCES if name in after}
        print(json.dumps(row | {"peak_rss_kib": peak_kib()}), flush=True)


def compare(given: argparse.Namespace) -> None:
    workers = {}
    for variant in given.variants.split(","):
        own = Path(given.directory) / variant
        own.mkdir(parents=True, exist_ok=True)
        command = ["-m", "tests.benchmarks.muon", str(own), *sys.argv[2:], "--variant", variant]
        workers[variant] = started(variant, command)
    taken = in_turn(workers, given.pairs)
    report(workers, taken)
    check({variant: [row["loss"] for row in rows] for variant, rows in taken.items() if variant != "adamw"})


def check(losses: dict[str, list[float]]) -> None:
    """Ends the program if losses of several variants are not as they have to be."""
    first = next(iter(losses.values()), [])
    furthest = max((abs(a - b) for each in losses.values() for a, b in zip(each, first, strict=True)), default=0.0)
    tiers = [losses[tier] for tier in ("host", "nvme") if tier in losses]
    if furthest > ROUNDING or any(each != tiers[0] for each in tiers):
        raise SystemExit(f"losses differ, by {furthest:.1e} at most: {losses}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--variants", default="plain,host,nvme")
    parser.add_argument("--micro-batch", type=int, default=2, dest="micro_batch")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--tile_numel", type=int, default=1 << 22)
    parser.add_argument("--prefetch_bytes", type=int, default=64 << 20)
    parser.add_argument("--orthogonal", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--ns_steps", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    work(given) if given.variant else compare(given)
