"""Two checkouts of this repository train one model in turn: the ratio of their step times, with its 95 % interval.

    python tests/benchmarks/commits.py OLD NEW DIRECTORY --placement nvme --slots 8 --pairs 15

Each checkout is a process of its own (`--worker` below) with the packages of its `packages/*/src` on its path; native
modules must have been built into them. Blocks of `--steps` steps alternate, and a block ends when every update is
stored. With `--ranks 2` each checkout is two processes, and figures are of the first one. What is printed is one JSON
line.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
VOCABULARY = 8192  # a Llama of 119.6 M parameters
PLACEMENTS = {"host": ("host", "host", "host"), "states": ("host", "host", "nvme"), "nvme": ("nvme", "nvme", "nvme")}
DIFFERENCES = ("exposed_seconds", "nvme_read_bytes", "nvme_write_bytes")


def work(given: argparse.Namespace) -> None:
    """Train; for each line on stdin a block of steps, and what it took on stdout."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from zero_core import shard
    from zero_nvme import Slab
    from zero_offload import TieredStore
    from zero_optim_cpu import CpuStep

    others = join(given)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **SIZES))
    tokens = torch.randint(0, VOCABULARY, (given.micro_batch, given.tokens))
    store = None
    if given.placement != "none":
        kinds = dict(zip(("parameters", "gradients", "optimizer"), PLACEMENTS[given.placement], strict=True))
        sized = {"tile_numel": given.tile_numel, "slots": given.slots}
        folder = Path(given.directory, os.environ.get("RANK", "0"))
        folder.mkdir(exist_ok=True)
        store = TieredStore(**kinds, nvme=Slab([str(folder)]), step=CpuStep(), **sized)
    options = {} if given.prefetch_bytes is None else {"prefetch_bytes": given.prefetch_bytes}
    optimizer = shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), store=store, max_grad_norm=1.0, **options)

    def block(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
        if store is not None:
            store.wait()
        return float(loss.detach())

    block(3)
    print("ready", flush=True)
    for line in sys.stdin:
        for other in others:
            other.stdin.write(line)  # type: ignore[union-attr]
            other.stdin.flush()  # type: ignore[union-attr]
        before = store.stats() if store is not None else {}
        begin = time.perf_counter()
        loss = block(given.steps)
        row = {"seconds": (time.perf_counter() - begin) / given.steps, "loss": loss}
        after = store.stats() if store is not None else {}
        row |= {key: (after[key] - before[key]) / given.steps for key in DIFFERENCES if key in after}
        print(json.dumps(row | {"peak_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}), flush=True)
    if store is not None:
        store.close()
    for other in others:
        other.communicate()


def join(given: argparse.Namespace) -> list[subprocess.Popen[str]]:
    """Become a rank, and start the other ones if this is the first."""
    if given.ranks == 1:
        return []
    import torch.distributed as dist

    others = []
    if "RANK" not in os.environ:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        os.environ |= {"RANK": "0", "WORLD_SIZE": str(given.ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for rank in range(1, given.ranks):
            environment, pipe = {**os.environ, "RANK": str(rank)}, subprocess.PIPE
            command = [sys.executable, *sys.argv]
            others.append(subprocess.Popen(command, env=environment, stdin=pipe, stdout=subprocess.DEVNULL, text=True))
    dist.init_process_group("gloo")
    return others


def start(checkout: str, name: str, given: argparse.Namespace) -> subprocess.Popen[str]:
    folder = Path(given.directory, name)
    folder.mkdir(parents=True, exist_ok=True)
    sources = os.pathsep.join(str(path) for path in sorted(Path(checkout).glob("packages/*/src")))
    options = [f"--{key.replace('_', '-')}={value}" for key, value in vars(given).items() if value is not None]
    options = [option for option in options if not option.startswith(("--old", "--new", "--directory", "--worker"))]
    command = [sys.executable, __file__, checkout, checkout, str(folder), "--worker", *options]
    environment = {**os.environ, "PYTHONPATH": sources}
    return subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdin is not None and worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    return dict(json.loads(worker.stdout.readline()))


def compare(given: argparse.Namespace) -> dict[str, Any]:
    workers = {name: start(checkout, name, given) for name, checkout in (("old", given.old), ("new", given.new))}
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in workers}
    for worker in workers.values():
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "ready":
            raise SystemExit("a worker ended before it trained; its error is above")
        ask(worker)  # not counted
    for pair in range(given.pairs):
        for name in ("old", "new") if pair % 2 else ("new", "old"):
            rows[name].append(ask(workers[name]))
    for worker in workers.values():
        worker.communicate()
    from intervals import mean_ratio  # which lies beside this file, and the file runs as a script

    ratio = mean_ratio(*([row["seconds"] for row in rows[name]] for name in ("new", "old")))
    found: dict[str, Any] = {"ratio": ratio}
    for name, taken in rows.items():
        found[name] = {key: statistics.median(row[key] for row in taken) for key in taken[0] if key != "loss"}
    return found | {"equal_losses": [row["loss"] for row in rows["old"]] == [row["loss"] for row in rows["new"]]}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old")
    parser.add_argument("new")
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--placement", choices=["none", *PLACEMENTS], default="nvme")
    parser.add_argument("--slots", type=int)
    parser.add_argument("--tile-numel", type=int, default=1 << 22)
    parser.add_argument("--prefetch-bytes", type=int)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.worker:
        work(chosen)
    else:
        print(json.dumps(compare(chosen)))
