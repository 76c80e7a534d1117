"""torch's clip_grad_norm_ on a sharded model against max_grad_norm=: seconds of a step, in turn, as a ratio.

    python -m tests.benchmarks.clipping DIRECTORY --tier nvme --pairs 12

One model, store and optimizer; blocks of `--steps` steps take turns, one clipped by torch's function between backward
and step(), one by step() itself. A block ends when every update is stored. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from contextlib import closing

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import zero_core
from zero_nvme import Slab
from zero_offload import TieredStore
from zero_optim_cpu import CpuStep

from .intervals import mean_ratio


def measure(given: argparse.Namespace) -> dict[str, object]:
    config = LlamaConfig(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
        use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(0, config.vocab_size, (1, given.tokens))
    with closing(Slab([given.directory])) as slab:
        store = None
        if given.tier != "device":
            kinds = dict.fromkeys(("parameters", "gradients", "optimizer"), given.tier)
            store = TieredStore(**kinds, nvme=slab, step=CpuStep())
        sharded = zero_core.shard(model, optimizer, store=store)

        def block(stock: bool) -> float:
            begin = time.perf_counter()
            for _ in range(given.steps):
                model(input_ids=tokens, labels=tokens).loss.backward()
                sharded.max_grad_norm = None if stock else 1.0
                if stock:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                sharded.step()
                sharded.zero_grad()
            if store is not None:
                store.wait()
            return (time.perf_counter() - begin) / given.steps

        for stock in (False, True):
            block(stock)  # not counted
        rows = [{stock: block(stock) for stock in ((True, False), (False, True))[n % 2]} for n in range(given.pairs)]
        sharded.close()
    return {
        "tier": given.tier,
        "max_grad_norm": statistics.median(row[False] for row in rows),
        "clip_grad_norm_": statistics.median(row[True] for row in rows),
        "ratio": mean_ratio((row[True] for row in rows), (row[False] for row in rows)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--tier", choices=["device", "host", "nvme"], default="nvme")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=2)
    print(json.dumps(measure(parser.parse_args())))
