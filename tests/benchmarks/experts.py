"""A mixture of experts whose experts lie whole in their block, and in groups that are units, in turn.

    python -m tests.benchmarks.experts DIRECTORY --model 104m --expert_bytes 2097152 --pairs 16
    python -m tests.benchmarks.experts DIRECTORY --model olmoe-7b --train lora --dtype bfloat16 --tokens 512 \\
        --variants groups,compute --pairs 3
    python -m tests.benchmarks.experts DIRECTORY --model 104m --train none --variants groups

Everything is on NVMe and each block is recomputed. Weights are random. Each variant is a process of its own, and blocks
of `--steps` steps alternate; a block ends when every update is stored. Before them, after every fourth pair and at the
end, fio reads a file of 1 GiB in blocks of 16 MiB, and then reads and writes it, half of the blocks each.

    whole     shard(expert_bytes=None): a block and its experts are one unit; prefetch_bytes is zero-train's 64 MiB
    groups    shard(expert_bytes=--expert_bytes, prefetch_bytes=--prefetch_bytes)
    compute   nothing of ours: plain torch, one block and its experts in memory; its seconds are those of a step of
              models with two layers and with one, and their difference times the layers that are left

`--train lora` trains adapters of rank 16 on the attention's linear layers, and `none` generates: one forward a token,
of which the bytes that were read stand beside those of the dense part and of the groups that were routed. What is
printed is one JSON line a variant: medians of a step's seconds, exposed seconds and bytes, the arena, the peak resident
memory (VmHWM, from the start), and the geometric mean over pairs of its seconds to the first variant's, with its 95 %
interval for 4 pairs and more. The program ends with an error if losses of ours differ by more than rounding.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .commits import DIFFERENCES
from .sft import peak_kib
from .turns import in_turn, report, started

QWEN = dict(  # 104 M parameters in the shape of Qwen3-30B-A3B
    vocab_size=4096, hidden_size=512, intermediate_size=1024, moe_intermediate_size=128, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=2, head_dim=64, num_experts=124, num_experts_per_tok=8,
)  # fmt: skip
OLMOE = dict(  # allenai/OLMoE-1B-7B
    vocab_size=50304, hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_attention_heads=16,
    num_key_value_heads=16, num_experts=64, num_experts_per_tok=8,
)  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "104m": ("Qwen3Moe", QWEN),
    "4b": ("Olmoe", OLMOE | {"num_hidden_layers": 9}),
    "olmoe-7b": ("Olmoe", OLMOE),
}
VARIANTS = ("whole", "groups", "compute")
ADAPTED = ["q_proj", "k_proj", "v_proj", "o_proj"]
FIO_BYTES = 1 << 30
ROUNDING = {"float32": 1e-5, "bfloat16": 1e-2}  # by which losses of the two orders of additions may differ
Block = Callable[[int], float]


def built(given: argparse.Namespace, layers: int | None = None) -> Any:
    """The model, with adapters if they are what is trained. layers: of a smaller one."""
    import torch
    import transformers

    kind, sizes = MODELS[given.model]
    sizes = sizes if layers is None else sizes | {"num_hidden_layers": layers}
    config = getattr(transformers, f"{kind}Config")(use_cache=False, **sizes)
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, given.dtype))
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    if given.train == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules=ADAPTED))
    torch.set_default_dtype(torch.float32)
    return model


def tokens_of(given: argparse.Namespace, count: int) -> Any:
    import torch

    return torch.randint(
        0, MODELS[given.model][1]["vocab_size"], (1, count), generator=torch.Generator().manual_seed(1)
    )


def plain(given: argparse.Namespace) -> tuple[Block, Callable[[], dict[str, float]], Callable[[], None]]:
    """Seconds of a step's arithmetic, and nothing is moved."""
    models = [built(given, layers) for layers in (1, 2)]
    tokens, seconds = tokens_of(given, given.tokens), [0.0]
    for model in models:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.train()

    def block(count: int) -> float:
        for _ in range(count):
            took = []
            for model in models:
                begun = time.perf_counter()
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                took.append(time.perf_counter() - begun)
                model.zero_grad()
            seconds[0] += took[0] + (took[1] - took[0]) * (MODELS[given.model][1]["num_hidden_layers"] - 1)
        return float(loss.detach())

    return block, lambda: {"compute_seconds": seconds[0]}, lambda: None


def ours(given: argparse.Namespace) -> tuple[Block, Callable[[], dict[str, float]], Callable[[], None]]:
    import torch

    import zero_core
    from zero_nvme import Slab
    from zero_offload import TieredStore, offload_activations
    from zero_optim_cpu import CpuStep

    with zero_core.deferred_init():
        model = built(given)
        if given.tile:
            zero_core.tile_linear(model, given.tile)
    tiles = {"slots": given.slots, "tile_numel": given.tile_numel}
    store = TieredStore("nvme", "nvme", "nvme", nvme=Slab([given.directory]), step=CpuStep(), **tiles)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-4) if given.train != "none" else None
    sizes = {"expert_bytes": given.expert_bytes, "prefetch_bytes": given.prefetch_bytes}
    if given.variant == "whole":
        sizes = {"expert_bytes": None, "prefetch_bytes": 64 << 20}
    sharded = zero_core.shard(model, optimizer, store=store, observer=store.timeline, **sizes)
    tokens, seen = tokens_of(given, given.tokens), Routed(model)
    if given.train != "none":
        offload_activations(model, store, "recompute")

    def train(count: int) -> float:
        for _ in range(count):
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            sharded.step()
            sharded.zero_grad()
        store.wait()
        if given.picture:
            from zero_train.report import draw_timeline

            draw_timeline(Path(given.picture), store.timeline.events(), steps=1)
        return float(loss.detach())

    def generate(count: int) -> float:
        with torch.no_grad():
            for at in range(count):
                found = model(input_ids=tokens[:, at : at + 1]).logits
        return float(found.float().logsumexp(-1).mean())

    def stats() -> dict[str, float]:
        kept = {"arena_bytes": store.describe().arena_bytes, "groups": seen.groups, "dense_bytes": seen.dense_bytes}
        return {**store.stats(), "routed_bytes": seen.nbytes, **kept}

    return generate if given.train == "none" else train, stats, sharded.close


class Routed:
    """Bytes of the groups that a forward without gradients routes to, counted at the routers' own outputs; of all units
    but groups; and how many groups a block has, 1 if its experts are not cut."""

    def __init__(self, model: Any) -> None:
        import zero_core

        self.nbytes, self.groups = 0.0, 1
        self.dense_bytes = sum(unit.nbytes for unit in zero_core.units(model) if "[" not in unit.name)
        for path, module in model.named_modules():
            if path.endswith("mlp.experts"):
                units = [unit for unit in zero_core.units(model) if unit.name.startswith(f"{path}[")]
                module.register_forward_pre_hook(self._counting(units))
                self.groups = max(1, len(units))

    def _counting(self, units: list[Any]) -> Callable[[Any, Any], None]:
        edges = [tuple(map(int, unit.name.rpartition("[")[2].rstrip("]").split(":"))) for unit in units]

        def count(module: Any, given: Any) -> None:
            hit = set(given[1].unique().tolist())
            for unit, (low, high) in zip(units, edges, strict=True):
                if hit & set(range(low, high)):
                    self.nbytes += unit.nbytes

        return count


def work(given: argparse.Namespace) -> None:
    """Train; for each line on stdin a block of steps, and what it took on stdout."""
    block, stats, close = (plain if given.variant == "compute" else ours)(given)
    block(1)
    print("ready", flush=True)
    for _ in sys.stdin:
        before, begun = stats(), time.perf_counter()
        row: dict[str, Any] = {"loss": block(given.steps), "seconds": (time.perf_counter() - begun) / given.steps}
        after = stats()
        counted = (*DIFFERENCES, "routed_bytes", "compute_seconds")
        row |= {name: (after[name] - before[name]) / given.steps for name in counted if name in after}
        row |= {name: after[name] for name in ("arena_bytes", "groups", "dense_bytes") if name in after}
        print(json.dumps(row | {"peak_rss_kib": peak_kib()}), flush=True)
    close()


def fio_rate(folder: Path, kind: Any) -> float:
    """Bytes a second."""
    from zero_nvme import fio

    path = folder / "fio"
    if not path.exists():
        with path.open("wb") as file:
            for _ in range(FIO_BYTES >> 24):
                file.write(os.urandom(1 << 24))
    return fio.run(str(path), kind, nbytes=FIO_BYTES, block_bytes=16 << 20, depth=4).gigabytes_per_second * 1e9


def compare(given: argparse.Namespace) -> None:
    workers, folder = {}, Path(given.directory)
    for variant in given.variants.split(","):
        own = folder / variant
        own.mkdir(parents=True, exist_ok=True)
        command = ["-m", "tests.benchmarks.experts", str(own), *sys.argv[2:], "--variant", variant]
        workers[variant] = started(variant, command)
    rates = {kind: [fio_rate(folder, kind)] for kind in ("read", "mixed")}

    def measure_disk(pair: int) -> None:
        if pair % 4 == 3 or pair == given.pairs - 1:
            for kind, found in rates.items():
                found.append(fio_rate(folder, kind))

    taken = in_turn(workers, given.pairs, measure_disk)
    (folder / "fio").unlink()
    losses = {variant: [row["loss"] for row in rows] for variant, rows in taken.items() if variant != "compute"}
    furthest = max(abs(a / b - 1) for rows in losses.values() for a, b in zip(rows, [*losses.values()][0], strict=True))
    if furthest > ROUNDING[given.dtype]:
        raise SystemExit(f"losses differ by {furthest:.1e} of their size: {losses}")
    print(json.dumps({"fio_bytes_per_second": {kind: round(statistics.median(r)) for kind, r in rates.items()}}))
    report(workers, taken)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--model", choices=[*MODELS], default="104m")
    parser.add_argument("--train", choices=["full", "lora", "none"], default="full")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--variants", default="whole,groups")
    parser.add_argument("--expert_bytes", type=int, default=64 << 20)
    parser.add_argument("--prefetch_bytes", type=int, default=64 << 20)
    parser.add_argument("--slots", type=int, default=3)
    parser.add_argument("--tile_numel", type=int, default=1 << 20)
    parser.add_argument("--tile", type=int, default=0, help="linears of more elements in tiles: zero_core.tile_linear")
    parser.add_argument("--tokens", type=int, default=512, help="of the one row of a step")
    parser.add_argument("--pairs", type=int, default=4)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--picture", default="", help="a PNG file: the timeline of the last step; with one variant")
    parser.add_argument("--variant", choices=VARIANTS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    work(given) if given.variant else compare(given)
