"""LoRA by plain PEFT and by us in turn: seconds of a step, peak memory, and what the plan says of it.

    python -m tests.benchmarks.lora DIRECTORY --model 135m --pairs 9

Each variant (plain PEFT, FSDP2 on one rank, everything on the host, everything on NVMe) is a process of its own that
trains r = 16 on all linear layers of a Llama with random weights. Blocks of `--steps` steps alternate, and a block
ends when every update is stored. `loaded` is a process that has only imported what the others import, and `predicted`
one that measures the machine afterwards and plans with that. What is printed is one JSON line a variant.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import statistics
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path
from typing import Any

from .commits import ask

MODELS: dict[str, dict[str, Any]] = {
    "135m": dict(  # SmolLM2-135M
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9,
        num_key_value_heads=3, tie_word_embeddings=True,
    ),
    "120m": dict(
        vocab_size=8192, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8, num_attention_heads=16,
    ),
    "3b": dict(
        vocab_size=32000, hidden_size=2560, intermediate_size=6912, num_hidden_layers=36, num_attention_heads=32,
    ),
}  # fmt: skip
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def work(given: argparse.Namespace) -> None:
    """Train; for each line on stdin a block of steps, and what it took on stdout."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import zero_core
    from zero_nvme import Slab
    from zero_offload import TieredStore, plan, probe
    from zero_optim_cpu import CpuStep

    peak_loaded = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if given.variant == "loaded":
        print(json.dumps({"peak_rss_kib": peak_loaded}), flush=True)
        return
    torch.manual_seed(0)
    dtype = getattr(torch, given.dtype)
    config = LlamaConfig(use_cache=False, **MODELS[given.model])
    torch.set_default_dtype(dtype)
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS)
    with zero_core.deferred_init():
        model = get_peft_model(LlamaForCausalLM(config), adapters, autocast_adapter_dtype=False)
    torch.set_default_dtype(torch.float32)
    if given.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if given.variant in ("plain", "fsdp2"):
        zero_core.materialise(model)
    if given.variant == "fsdp2":
        torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
        for layer in model.base_model.model.model.layers:
            torch.distributed.fsdp.fully_shard(layer)
        torch.distributed.fsdp.fully_shard(model)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(trained, lr=1e-4)
    store, planned, step = None, 0, CpuStep()
    step.bind(optimizer)
    kinds = ("parameters", "gradients", "optimizer")
    options: dict[str, Any] = {"step": step, "tile_numel": 1 << 20, "prefetch_bytes": given.prefetch}
    if given.variant == "predicted":
        with closing(Slab([given.directory])) as slab:
            sizes = {"hidden_size": config.hidden_size, "tokens": given.tokens}
            machine = probe(nvme=slab, step=CpuStep(), parameter_dtype=dtype, **sizes)
        policy = "recompute" if given.checkpointing else "keep"
        options |= {"tokens": given.tokens, "activations": policy}
        found = {tier: plan(model, machine, **dict.fromkeys(kinds, tier), **options) for tier in ("host", "nvme")}
        seconds = {tier: each.prediction and each.prediction.step_seconds for tier, each in found.items()}
        print(json.dumps({"seconds": seconds, "tflops": machine.tflops}), flush=True)
        return
    if given.variant in ("host", "nvme"):
        made = plan(model, **dict.fromkeys(kinds, given.variant), **options)
        planned = made.total("host") + made.total("device")
        store = TieredStore(plan=made, nvme=Slab([given.directory]), step=CpuStep())
        optimizer = zero_core.shard(model, optimizer, store=store, prefetch_bytes=given.prefetch)
    generator = torch.Generator().manual_seed(0)  # what deferred construction draws comes from nobody's generator
    tokens = torch.randint(0, config.vocab_size, (1, given.tokens), generator=generator)

    def block(count: int) -> float:
        for _ in range(count):
            optimizer.zero_grad()
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
        if store is not None:
            store.wait()
        return float(loss.detach())

    block(1)
    print("ready", flush=True)
    for _ in sys.stdin:
        begin, loss = time.perf_counter(), block(given.steps)
        row = {"seconds": (time.perf_counter() - begin) / given.steps, "loss": loss, "planned_kib": planned >> 10}
        held = dict(store.describe().held) if store is not None else {}
        row |= {
            "held": {" ".join(key): nbytes for key, nbytes in held.items()},
            "trained": sum(p.numel() for p in trained),
        }
        row |= {"numel": sum(p.numel() for p in model.parameters())}
        print(json.dumps(row | {"peak_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}), flush=True)
    if store is not None and given.checkpoint:
        folder, begin = Path(given.directory, "checkpoint"), time.perf_counter()
        zero_core.checkpoint.save(folder, model, optimizer, trained_only=True)
        saved = time.perf_counter()
        zero_core.checkpoint.load(folder, model, optimizer)
        nbytes = sum(file.stat().st_size for file in folder.iterdir())
        row = {"checkpoint_bytes": nbytes, "save": saved - begin, "load": time.perf_counter() - saved}
        print(json.dumps(row | {"peak_rss_kib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}), flush=True)
    if store is not None:
        store.close()


def start(variant: str, given: argparse.Namespace) -> subprocess.Popen[str]:
    folder = Path(given.directory, variant)
    folder.mkdir(parents=True, exist_ok=True)
    told = {key: value for key, value in vars(given).items() if key not in ("directory", "variant", "variants")}
    options = [f"--{flag}" for flag in ("checkpointing", "checkpoint") if told.pop(flag)]
    options += [f"--{key}={value}" for key, value in told.items()]
    command = [sys.executable, "-m", "tests.benchmarks.lora", str(folder), "--variant", variant, *options]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def alone(variant: str, given: argparse.Namespace) -> None:
    print(json.dumps({"variant": variant, **json.loads(start(variant, given).communicate()[0])}), flush=True)


def compare(given: argparse.Namespace) -> None:
    alone("loaded", given)
    workers = {variant: start(variant, given) for variant in given.variants.split(",")}
    for worker in workers.values():
        assert worker.stdout is not None
        if worker.stdout.readline().strip() != "ready":
            raise SystemExit("a worker ended before it trained; its error is above")
        ask(worker)  # not counted
    rows: dict[str, list[dict[str, Any]]] = {variant: [] for variant in workers}
    for pair in range(given.pairs):
        for variant in list(workers)[:: 1 if pair % 2 else -1]:
            rows[variant].append(ask(workers[variant]))
    for variant, worker in workers.items():
        if last := worker.communicate()[0]:
            print(json.dumps({"variant": variant, **json.loads(last)}), flush=True)
    first = next(iter(rows.values()))
    for variant, taken in rows.items():
        found = {"variant": variant, **taken[-1], "seconds": statistics.median(row["seconds"] for row in taken)}
        if len(taken) > 1 and taken is not first:
            logs = [math.log(a["seconds"] / b["seconds"]) for a, b in zip(taken, first, strict=True)]
            mean, half = statistics.mean(logs), 2.3 * statistics.stdev(logs) / math.sqrt(len(logs))
            found["ratio"] = [round(math.exp(value), 3) for value in (mean, mean - half, mean + half)]
            found["loss_of_first"] = first[-1]["loss"]
        print(json.dumps(found), flush=True)
    alone("predicted", given)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--model", choices=list(MODELS), default="135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--variants", default="plain,host,nvme", help="fsdp2 too")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prefetch", type=int, default=32 << 20, help="prefetch_bytes")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--checkpoint", action="store_true", help="save and load what is trained at the end")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    work(chosen) if chosen.variant else compare(chosen)
