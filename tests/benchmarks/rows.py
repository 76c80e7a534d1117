"""A large batch in one piece, a few rows at a time inside each block, and as accumulated micro-batches, in turn.

    python -m tests.benchmarks.rows DIRECTORY --batch 16 --rows 2 --pairs 5

The Llama of 119.6 M parameters, everything on NVMe, three slots, each block recomputed. Each variant is a process of
its own, and blocks of `--steps` steps alternate. A block ends when every update is stored.

    whole       one batch, each block computes all of it: offload_activations(model, store, policy)
    rows        one batch, each block takes `--rows` rows at a time: offload_activations(..., rows=)
    accumulate  micro-batches of `--rows` rows, whose gradients are added
    small       a batch of `--rows` rows alone, for its memory and its rate

What is printed is one JSON line a variant: tokens per second, seconds of a step, exposed seconds and bytes of a step,
the peak resident memory (VmHWM), the bytes of the blocks' inputs, and the ratio of its tokens per second to those of
the first variant, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .commits import DIFFERENCES, SIZES, VOCABULARY, ask
from .sft import peak_kib

VARIANTS = ("whole", "rows", "accumulate", "small")


def work(given: argparse.Namespace) -> None:
    """Train; for each line on stdin a block of steps, and what it took on stdout."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zero_core
    from zero_nvme import Slab
    from zero_offload import TieredStore, offload_activations
    from zero_optim_cpu import CpuStep

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **SIZES))
    batch = given.rows if given.variant == "small" else given.batch
    parts = given.batch // given.rows if given.variant == "accumulate" else 1
    tokens = torch.randint(0, VOCABULARY, (batch, given.tokens))
    places = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
    store = TieredStore(**places, nvme=Slab([given.directory]), step=CpuStep(), slots=3, accumulate=parts)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    optimizer = zero_core.shard(model, adamw, store=store, max_grad_norm=1.0, prefetch_bytes=given.prefetch_bytes)
    offload_activations(model, store, given.policy, rows=given.rows if given.variant == "rows" else None)
    if given.keep_freed_memory:
        zero_core.keep_freed_memory()

    def block(count: int) -> float:
        for _ in range(count):
            for part in tokens.chunk(parts):
                loss = model(input_ids=part, labels=part).loss / parts
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        store.wait()
        return float(loss.detach()) * parts

    block(1)
    print("ready", flush=True)
    for _ in sys.stdin:
        before, begin = store.stats(), time.perf_counter()
        row: dict[str, Any] = {"loss": block(given.steps)}
        row["seconds"] = (time.perf_counter() - begin) / given.steps
        row["tokens_per_second"] = tokens.numel() / row["seconds"]
        row |= {name: (store.stats()[name] - before[name]) / given.steps for name in DIFFERENCES}
        inputs = batch * given.tokens * SIZES["hidden_size"] * 4 * SIZES["num_hidden_layers"]
        row["input_kib"] = (inputs // (parts if given.variant == "accumulate" else 1)) >> 10
        print(json.dumps(row | {"peak_rss_kib": peak_kib()}), flush=True)
    optimizer.close()


def start(variant: str, given: argparse.Namespace) -> subprocess.Popen[str]:
    folder = Path(given.directory, variant)
    folder.mkdir(parents=True, exist_ok=True)
    told = {key: value for key, value in vars(given).items() if key not in ("directory", "variant", "variants")}
    keep = ["--keep_freed_memory"] if told.pop("keep_freed_memory") else []
    options = [f"--{key}={value}" for key, value in told.items()]
    command = [sys.executable, "-m", "tests.benchmarks.rows", str(folder), "--variant", variant, *options, *keep]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def compare(given: argparse.Namespace) -> None:
    workers = {}
    for variant in given.variants.split(","):
        workers[variant] = start(variant, given)
        out = workers[variant].stdout
        if out is None or out.readline().strip() != "ready":
            raise SystemExit(f"{variant} ended before it trained; its error is above")
    taken: dict[str, list[dict[str, Any]]] = {variant: [] for variant in workers}
    for pair in range(given.pairs):
        for variant in list(workers)[:: 1 if pair % 2 else -1]:
            taken[variant].append(ask(workers[variant]))
    first = next(iter(taken.values()))
    for variant, rows in taken.items():
        workers[variant].communicate()
        found = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        if len(rows) > 1 and rows is not first:
            pairs = zip(rows, first, strict=True)
            logs = [math.log(a["tokens_per_second"] / b["tokens_per_second"]) for a, b in pairs]
            mean, half = statistics.mean(logs), 2.3 * statistics.stdev(logs) / math.sqrt(len(logs))
            found["ratio"] = [round(math.exp(value), 3) for value in (mean, mean - half, mean + half)]
        print(json.dumps({"variant": variant, "pairs": len(rows), **found}), flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--batch", type=int, default=16, help="rows of a step, a multiple of --rows")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--policy", choices=["recompute", "host", "nvme"], default="recompute")
    parser.add_argument("--prefetch_bytes", type=int, default=0)
    parser.add_argument("--keep_freed_memory", action="store_true", help="zero_core.keep_freed_memory()")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    work(chosen) if chosen.variant else compare(chosen)
