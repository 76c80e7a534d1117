"""One model trained in several ways that take turns: ratios of the seconds of a step, its bytes, and peak memory.

    python -m tests.benchmarks.compare DIRECTORY muon --pairs 12 --steps 4
    python -m tests.benchmarks.compare DIRECTORY lora --options '{"checkpointing": true}' --before CHECKOUT

Each side is a process of step_worker.py; in every pair each takes one turn, in the other order in the next one. A turn
has one step that is not timed, and then `--steps` that are, the last of which ends when every update is stored. Before
the first pair, in the middle and at the end, fio reads and writes at once in blocks of 16 MiB. What is printed is one
line of JSON a side: medians over pairs, and the geometric mean of the ratio of its seconds to those of the first side
and to its bound, with 95 % intervals for 4 pairs and more. The bound is the larger of the first side's seconds and of
the side's own bytes at fio's best rate. `floor` is forward and backward alone; the ratios add one pass of CpuStep over
as many elements. `losses` is the largest relative difference from the first side's.

    tiers     119.6 M: nothing offloaded, the floor, each placement, and DeepSpeed: as many `--sides` as memory holds
    deep      119.6 M and 438 M in bf16, recomputed: the floor, and both with everything on NVMe
    muon      119.6 M, torch.optim.Muon for matrices: plain torch, and everything in host memory or on NVMe
    lora      SmolLM2-135M's shape, r = 16 on all linear layers: plain PEFT, and everything in host memory or on NVMe
    rows      119.6 M, 16 rows recomputed in one piece, two at a time, or as micro-batches of two, by DeepSpeed too
    tokens    119.6 M in bf16, one row of 8 Ki tokens recomputed in one piece, or 4 Ki tokens at a time
    durable   119.6 M on NVMe: not durable, durable without syncs, and durable
    compiled  119.6 M, 8 rows, in host memory (or where `{"name": ...}` of `--options` says): eager, each block compiled
    experts   104 M in the shape of Qwen3-30B-A3B, on NVMe, recomputed: experts whole in their block, or in groups

`--options` has more arguments of step_worker.py for all sides, as JSON. `--before` names another checkout of this
repository, with its native modules built in place: each side of ours has one more process, with its packages.
"""

import argparse
import json
import os
import statistics
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.benchmarks import fio
from tests.benchmarks.intervals import mean_ratio
from tests.benchmarks.worker import Worker

SMOLLM2 = {
    "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True,
}  # fmt: skip
QWEN3 = {
    "vocab_size": 4096, "hidden_size": 512, "intermediate_size": 1024, "moe_intermediate_size": 128,
    "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "num_experts": 124,
    "num_experts_per_tok": 8,
}  # fmt: skip
WHOLE = {"policy": "recompute"}
FLOOR, PLAIN, HOST, NVME = ({"name": name} for name in ("floor", "plain", "host", "everything-nvme"))
DEEP = NVME | {"deferred": True}
AHEAD = NVME | {"prefetch_bytes": 64 << 20}
Sides = dict[str, dict[str, Any]]
PLACES = "host nvme nvme-fewest-slots nvme-8bit parameters-nvme everything-nvme".split()
PEERS = ["deepspeed-host", "deepspeed-nvme", "deepspeed-everything-nvme"]
COMPARISONS: dict[str, tuple[dict[str, Any], Sides]] = {  # arguments of all sides, and of each
    "tiers": ({"micro_batch": 2}, {name: {"name": name} for name in ("none", "floor", *PLACES, *PEERS)}),
    "deep": (
        {"dtype": "bfloat16", "checkpointing": True, "micro_batch": 2},
        {"floor": FLOOR, "8 layers": DEEP, "32 layers": DEEP | {"sizes": {"num_hidden_layers": 32}}},
    ),
    "muon": ({"optimizer": "muon", "micro_batch": 2}, {"plain": PLAIN, "host": HOST, "nvme": AHEAD}),
    "lora": (
        {"adapters": 16, "deferred": True, "sizes": SMOLLM2, "micro_batch": 1, "length": 128, "tile_numel": 1 << 20},
        {"plain": PLAIN, "host": HOST, "nvme": NVME | {"prefetch_bytes": 32 << 20}},
    ),
    "rows": (
        {"deferred": True, "micro_batch": 16},
        {
            "whole": NVME | {"activations": WHOLE},
            "rows": NVME | {"activations": WHOLE | {"rows": 2}},
            "accumulate": NVME | {"activations": WHOLE, "accumulate": 8},
            "small": NVME | {"activations": WHOLE, "micro_batch": 2},
            "deepspeed": {"name": "deepspeed-everything-nvme", "checkpointing": True, "accumulate": 8},
        },
    ),
    "tokens": (
        {"deferred": True, "micro_batch": 1, "length": 8192, "dtype": "bfloat16"},
        {"whole": NVME | {"activations": WHOLE}, "parts": NVME | {"activations": WHOLE | {"tokens": 4096}}},
    ),
    "durable": (
        AHEAD | {"micro_batch": 2, "slots": None},
        {"plain": {}, "process": {"durable": "process"}, "power": {"durable": True}},
    ),
    "compiled": ({"name": "host", "micro_batch": 8}, {"eager": {}, "blocks": {"compiled": True}}),
    "experts": (
        {"deferred": True, "kind": "Qwen3Moe", "sizes": QWEN3, "micro_batch": 1, "length": 512, "activations": WHOLE},
        {"whole": AHEAD | {"expert_bytes": None}, "groups": AHEAD | {"expert_bytes": 64 << 20}},
    ),
}  # fmt: skip
FIO_BYTES, BLOCK_BYTES = 1 << 30, 16 << 20


def disk_rate(folder: str) -> float:
    """Bytes a second of two runs of fio at once: one reads its file, one writes its own."""

    def one(kind: fio.Kind) -> float:
        path = os.path.join(folder, f"fio-{kind}")
        if not os.path.exists(path):
            with open(path, "wb", 0) as file:
                for _ in range(FIO_BYTES // BLOCK_BYTES):
                    file.write(os.urandom(BLOCK_BYTES))
                os.fsync(file.fileno())
        return fio.run(path, kind, nbytes=FIO_BYTES, block_bytes=BLOCK_BYTES, depth=4).gigabytes_per_second * 1e9

    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(one, ("read", "write")))


def started(given: argparse.Namespace, folder: str) -> dict[str, Worker]:
    """A process of each side. Ends the program if one cannot begin, but for a peer, which is left out and told of."""
    common, sides = COMPARISONS[given.comparison]
    workers: dict[str, Worker] = {}
    for name in given.sides or sides:
        options = common | sides[name] | given.options | {"folder": folder, "settled": True}
        workers[name] = Worker(options["name"], options)
        if given.before and not options["name"].startswith(("plain", "deepspeed")):
            workers[f"{name}, before"] = Worker(options["name"], options, checkout=given.before)
    for name, worker in list(workers.items()):
        if worker.ready().missing:
            if "deepspeed" not in name:
                raise SystemExit(f"{name} does not begin: {worker.missing}")
            print(f"{name} is left out: {worker.missing}", flush=True)
            workers.pop(name).close()
    return workers


def measured(given: argparse.Namespace, folder: str) -> dict[str, dict[str, Any]]:
    workers, rates = started(given, folder), list[float]()
    try:
        for number in range(given.pairs):
            if number in (0, (given.pairs + 1) // 2) and fio.available():
                rates.append(disk_rate(folder))
            for name in list(workers)[:: 1 if number % 2 else -1]:
                workers[name].turn(given.steps)
        rates += [disk_rate(folder)] if fio.available() else []
    finally:
        for worker in workers.values():
            worker.close()
    first = next(iter(workers.values())).answers
    return {name: row(worker.answers, first, max(rates, default=None)) for name, worker in workers.items()}


def row(turns: list[dict[str, Any]], first: list[dict[str, Any]], rate: float | None) -> dict[str, Any]:
    """What is printed of a side. first: the first side's turns; rate: fio's, bytes a second."""
    numbers = [key for key, value in turns[0].items() if isinstance(value, (int, float))]
    found: dict[str, Any] = {key: statistics.median(turn[key] for turn in turns) for key in numbers}
    moved = found.get("nvme_read_bytes", 0) + found.get("nvme_write_bytes", 0)
    disk_seconds = moved / rate if rate else 0.0
    seconds, base = ([turn["seconds"] + turn.get("extra_seconds", 0.0) for turn in each] for each in (turns, first))
    losses, others = ([loss for turn in each for loss in turn["losses"]] for each in (turns, first))
    return {
        "pairs": len(turns),
        **found,
        "disk_seconds": disk_seconds,
        "ratio": mean_ratio(seconds, base),
        "to_bound": mean_ratio(seconds, [max(each, disk_seconds) for each in base]),
        "losses": max(abs(a - b) / abs(b) for a, b in zip(losses, others, strict=True)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("comparison", choices=COMPARISONS)
    parser.add_argument("--sides", nargs="+", help="of the comparison; left out: all")
    parser.add_argument("--pairs", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--options", type=json.loads, default={})
    parser.add_argument("--before", metavar="CHECKOUT")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=given.directory) as folder:
        for name, row in measured(given, folder).items():
            print(json.dumps({"side": name, **row}), flush=True)


if __name__ == "__main__":
    main()
