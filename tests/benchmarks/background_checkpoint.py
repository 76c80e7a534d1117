"""A checkpoint in the background: step times before, during and after it, and a resumption, beside those that block.

    python -m tests.benchmarks.background_checkpoint FOLDER --micro-batch 8

A process trains a Llama of 1.1 B parameters with everything on NVMe and durable steps. It saves a checkpoint that
blocks, then one in the background, and is killed with SIGKILL. Another process goes on from its slab, and a third one
loads the checkpoint. Prints a table and writes checkpoint.png into FOLDER.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 20, "num_attention_heads": 16}
VOCABULARY = 16384  # of 1.09 B parameters


def work(given: argparse.Namespace) -> None:
    """Prints a line of JSON for each thing that happens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zero_core
    from zero_core import checkpoint
    from zero_nvme import Slab
    from zero_offload import TieredStore
    from zero_optim_cpu import CpuStep

    def tell(**what: Any) -> None:
        print(json.dumps(what), flush=True)

    begun = time.perf_counter()
    sizes = SIZES | ({"num_hidden_layers": given.layers} if given.layers else {})
    with zero_core.deferred_init():
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **sizes))
    slab = Slab([str(given.folder)], name="loaded" if given.way == "load" else "run")
    store = TieredStore("nvme", "nvme", "nvme", nvme=slab, step=CpuStep(), durable=True)
    optimizer = zero_core.shard(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        store=store,
        max_grad_norm=1.0,
        param_dtype=torch.bfloat16 if given.bf16 else None,
    )
    at, saving = 0, None
    at = zero_core.resume(model, optimizer, extra=lambda: at).step
    if given.way == "load":
        at = checkpoint.load(given.folder / "blocking", model, optimizer).step
    tell(ready=time.perf_counter() - begun, step=at, parameters=sum(p.numel() for p in model.parameters()))

    def step() -> float:
        nonlocal at
        clock = time.perf_counter()
        generator = torch.Generator().manual_seed(at)
        tokens = torch.randint(0, VOCABULARY, (given.micro_batch, given.tokens), generator=generator)
        optimizer.zero_grad()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        at += 1
        return time.perf_counter() - clock

    if given.way != "train":
        step()
        tell(first_step=time.perf_counter() - begun)
        optimizer.close()
        slab.remove()
        return
    for number in range(given.before):
        tell(step=at, seconds=step(), when="before" if number else "first")
    clock = time.perf_counter()
    checkpoint.save(given.folder / "blocking", model, optimizer)
    tell(stall=time.perf_counter() - clock)
    for _ in range(2):
        tell(step=at, seconds=step(), when="between")
    clock = time.perf_counter()
    saving = checkpoint.save(given.folder / "beside", model, optimizer, blocking=False)
    tell(call=time.perf_counter() - clock)
    while not saving.done():
        tell(step=at, seconds=step(), when="during")
    saving.wait()
    tell(copied=time.perf_counter() - clock)
    for _ in range(given.after):
        tell(step=at, seconds=step(), when="after")
    store.committed()
    os.kill(os.getpid(), signal.SIGKILL)


def run(given: argparse.Namespace, way: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--way", way]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    rows = []
    for line in process.stdout:
        sys.stderr.write(line)
        rows.append(json.loads(line))
    code = process.wait()
    assert code == (-signal.SIGKILL if way == "train" else 0), f"{way} ended with {code}"
    return rows


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    steps = [row for row in rows if "when" in row and row["when"] != "first"]
    colours = {"before": "tab:grey", "between": "tab:grey", "during": "tab:orange", "after": "tab:blue"}
    figure, axes = plt.subplots(figsize=(7, 3))
    axes.bar(
        [row["step"] for row in steps], [row["seconds"] for row in steps], color=[colours[r["when"]] for r in steps]
    )
    between = next(row["step"] for row in steps if row["when"] == "between")
    stall = next(row["stall"] for row in rows if "stall" in row)
    axes.bar([between - 0.5], [stall], width=0.3, color="tab:red", label=f"a checkpoint that blocks: {stall:.1f} s")
    axes.bar([between], [0], color="tab:orange", label="steps during one in the background")
    axes.set_xlabel("step")
    axes.set_ylabel("seconds")
    axes.set_ylim(0, 1.3 * max(row["seconds"] for row in steps))
    axes.legend(loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(given: argparse.Namespace) -> None:
    given.folder.mkdir(parents=True, exist_ok=True)
    rows = run(given, "train")
    resumed, loaded = run(given, "resume"), run(given, "load")
    usual = [row["seconds"] for row in rows if row.get("when") in ("before", "between", "after")]
    during = [row["seconds"] for row in rows if row.get("when") == "during"]
    mean = sum(usual) / len(usual)
    facts = {key: value for row in rows for key, value in row.items() if key in ("stall", "call", "copied")}
    found = {
        "parameters": rows[0]["parameters"],
        "step": mean,
        "steps during": during,
        "during over usual": max(during) / mean,
        "extra seconds": sum(during) - mean * len(during) + facts["call"],
        "seconds to the first step after a kill": resumed[-1]["first_step"],
        "the same from a checkpoint": loaded[-1]["first_step"],
        "ready after a kill": resumed[0]["ready"],
        "ready from a checkpoint": loaded[0]["ready"],
        **facts,
    }
    print(json.dumps(found))
    if not given.no_picture:
        draw(rows, given.folder / "checkpoint.png")
    for name in ("blocking", "beside"):
        shutil.rmtree(given.folder / name)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the drive that is measured")
    parser.add_argument("--micro-batch", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--before", type=int, default=3)
    parser.add_argument("--after", type=int, default=2)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--no-picture", action="store_true")
    parser.add_argument("--way", choices=["train", "resume", "load"], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        work(chosen)
    else:
        main(chosen)
