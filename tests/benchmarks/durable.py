"""What durable steps cost: a run without them, with them, and with them but without syncs, in turns.

    python -m tests.benchmarks.durable FOLDER --placement nvme --micro-batch 8 --pairs 15

Three processes train the 119.6 M Llama of `commits.py`, one block of steps each in turn; a block ends when every update
is stored. Before, between and after the blocks fio reads and writes at the same time, with the blocks of 16 MiB that a
step uses. What is printed is one JSON line: seconds and bytes of a step, and the ratios with their 95 % intervals. The
last ones are those over the larger of the step without durability and its durable bytes at fio's rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tests.benchmarks.commits import PLACEMENTS, SIZES, VOCABULARY, ask
from tests.benchmarks.intervals import mean_ratio

WAYS = {"plain": False, "process": "process", "power": True}
FIO_BYTES = 2 << 30


def work(given: argparse.Namespace) -> None:
    """Train; for each line on stdin a block of steps, and what it took on stdout."""
    import time

    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zero_core
    from zero_nvme import Slab
    from zero_offload import TieredStore
    from zero_optim_cpu import CpuStep

    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **SIZES))
    tokens = torch.randint(0, VOCABULARY, (given.micro_batch, given.tokens))
    kinds = dict(zip(("parameters", "gradients", "optimizer"), PLACEMENTS[given.placement], strict=True))
    durable = WAYS[given.way]
    slab = Slab([str(given.folder)], name=f"bench-{given.way}" if durable else None)
    store = TieredStore(**kinds, nvme=slab, step=CpuStep(), durable=durable)
    optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), store=store, max_grad_norm=1.0)
    if durable:
        zero_core.resume(model, optimizer)

    def block(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
        store.wait()
        return float(loss.detach())

    block(3)
    print("ready", flush=True)
    for _ in sys.stdin:
        before, begun = store.stats(), time.perf_counter()
        row: dict[str, Any] = {"loss": block(given.steps), "seconds": (time.perf_counter() - begun) / given.steps}
        after = store.stats()
        for key in ("exposed_seconds", "nvme_read_bytes", "nvme_write_bytes"):
            row[key] = (after[key] - before[key]) / given.steps
        print(json.dumps(row), flush=True)
    optimizer.close()
    slab.remove() if durable else slab.close()


def fio_rate(folder: Path) -> float:
    """Bytes a second, read and written together by one job each."""
    from zero_nvme import fio

    rates = {}

    def run(kind: Any) -> None:
        path = str(folder / f"fio-{kind}")
        rates[kind] = fio.run(path, kind, nbytes=FIO_BYTES, block_bytes=16 << 20, depth=4).gigabytes_per_second

    threads = [threading.Thread(target=run, args=(kind,)) for kind in ("read", "write")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(rates.values()) * 1e9


def compare(given: argparse.Namespace) -> dict[str, Any]:
    given.folder.mkdir(parents=True, exist_ok=True)
    for kind in ("read", "write"):
        with open(given.folder / f"fio-{kind}", "wb") as file:
            for _ in range(FIO_BYTES >> 24):
                file.write(bytes(1 << 24))
    workers = {}
    for way in WAYS:
        command = [sys.executable, "-m", __spec__.name, *sys.argv[1:], "--way", way]
        workers[way] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert workers[way].stdout.readline().strip() == "ready"  # type: ignore[union-attr]
        ask(workers[way])  # not counted
    rows: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    rates = [fio_rate(given.folder)]
    for pair in range(given.pairs):
        for way in WAYS if pair % 2 else reversed(WAYS):
            rows[way].append(ask(workers[way]))
        if pair % 5 == 4:
            rates.append(fio_rate(given.folder))
    for worker in workers.values():
        worker.communicate()
    for kind in ("read", "write"):
        (given.folder / f"fio-{kind}").unlink()
    rate = statistics.median(rates)
    found: dict[str, Any] = {"fio_bytes_per_second": rates}
    for way, taken in rows.items():
        found[way] = {key: statistics.median(row[key] for row in taken) for key in taken[0] if key != "loss"}
        moved = found[way]["nvme_read_bytes"] + found[way]["nvme_write_bytes"]
        found[way]["seconds_at_fios_rate"] = moved / rate
        bounds = [max(row["seconds"], moved / rate) for row in rows["plain"]]
        seconds = [row["seconds"] for row in taken]
        found[way]["over_plain"] = mean_ratio(seconds, [row["seconds"] for row in rows["plain"]])
        found[way]["over_bound"] = mean_ratio(seconds, bounds)
    plain = found["plain"]["nvme_write_bytes"]
    found["written_over_plain"] = {way: found[way]["nvme_write_bytes"] / plain for way in WAYS if plain}
    found["equal_losses"] = len({tuple(row["loss"] for row in taken) for taken in rows.values()}) == 1
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="on the drive that is measured")
    parser.add_argument("--placement", choices=PLACEMENTS, default="nvme")
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--pairs", type=int, default=15)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.way:
        work(chosen)
    else:
        print(json.dumps(compare(chosen)))
