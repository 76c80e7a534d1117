"""LoRA by plain PEFT and by us in turn: seconds of a step, peak memory, and what the plan says of it.

    python -m tests.benchmarks.lora DIRECTORY --model 135m --pairs 9

Each variant (plain PEFT, FSDP2 or DeepSpeed on one rank, everything on the host, everything on NVMe) is a process of
its own that trains r = 16 on all linear layers of a Llama with random weights. Blocks of `--steps` steps alternate, and
a block ends when every update is stored. `loaded` is a process that has only imported what the others import, and
`predicted` one that measures the machine afterwards and plans with that. What is printed is one JSON line a variant.
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
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

from .commits import ask
from .intervals import mean_ratio

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
KINDS = ("parameters", "gradients", "optimizer")
Train = Callable[[Any], Any]  # takes (1, tokens) numbers, trains a step with them, and returns the loss
LINEARS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def built(given: argparse.Namespace) -> tuple[Any, int]:
    """The model with its adapters, and its vocabulary's size. Deferred, unless the base is quantised or for a peer."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM

    import zero_core

    dtype = getattr(torch, given.dtype)
    config = LlamaConfig(use_cache=False, **MODELS[given.model])
    adapters = LoraConfig(r=16, lora_alpha=32, target_modules=LINEARS)
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    with nullcontext() if given.base == "nf4" else zero_core.deferred_init():
        base = LlamaForCausalLM(config)
        if given.base == "nf4":
            quantise(base)
        model = get_peft_model(base, adapters, autocast_adapter_dtype=False)
    torch.set_default_dtype(torch.float32)
    if given.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if given.variant == "plain" or given.variant in PEERS:
        zero_core.materialise(model)
    return model, config.vocab_size


def quantise(base: Any) -> None:
    """Make every linear layer but the head one of bitsandbytes' nf4, stored as numbers of the default dtype.

    FSDP2 cuts only floating-point numbers, which bitsandbytes offers quant_storage= for.
    """
    import torch
    from bitsandbytes.nn import Linear4bit

    for layer in [module for module in base.modules() if not isinstance(module, torch.nn.Linear)]:
        for name, linear in list(layer.named_children()):
            if not isinstance(linear, torch.nn.Linear) or name == "lm_head":
                continue
            kind = torch.get_default_dtype()
            made = Linear4bit(
                linear.in_features, linear.out_features, False, kind, quant_type="nf4", quant_storage=kind
            )
            made.weight.data, made.support_avx512bf16_for_cpu = linear.weight.data, False
            setattr(layer, name, made.to("cpu"))


def plain(model: Any, given: argparse.Namespace) -> Train:
    return by_torch(model, adamw(model))


def fsdp2(model: Any, given: argparse.Namespace) -> Train:
    from torch.distributed import HashStore, init_process_group
    from torch.distributed.fsdp import fully_shard

    init_process_group("gloo", rank=0, world_size=1, store=HashStore())
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return by_torch(model, adamw(model))


def deepspeed(model: Any, given: argparse.Namespace) -> Train:
    """Stage 3 with the same kinds on the same tier, and no gradient clipping."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    where = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update({"DS_ACCELERATOR": "cpu", **where})
    import deepspeed as package

    package.utils.logging.logger.setLevel("ERROR")
    tier: dict[str, Any] = {"device": "nvme" if given.variant.endswith("nvme") else "cpu", "nvme_path": given.directory}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": tier | {"buffer_count": 5},
            "offload_param": tier | {"buffer_count": 8, "buffer_size": 32 << 20},
        },
        "bf16": {"enabled": given.dtype == "bfloat16"},
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    engine, *_ = package.initialize(model=model, config=config)

    def train(tokens: Any) -> Any:
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        return loss

    return train


PEERS: dict[str, Callable[[Any, argparse.Namespace], Train]] = {
    "plain": plain,
    "fsdp2": fsdp2,
    "deepspeed-host": deepspeed,
    "deepspeed-nvme": deepspeed,
}


def adamw(model: Any) -> Any:
    import torch

    return torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=1e-4)


def by_torch(model: Any, optimizer: Any) -> Train:
    def train(tokens: Any) -> Any:
        optimizer.zero_grad()
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        return loss

    return train


def work(given: argparse.Namespace) -> None:
    """Train; for each line on stdin a block of steps, and what it took on stdout."""
    out = os.fdopen(os.dup(1), "w")  # answers alone: DeepSpeed logs on stdout
    os.dup2(2, 1)
    import torch

    import zero_core  # and what follows: all variants have the same imports
    from zero_nvme import Slab
    from zero_offload import TieredStore, plan
    from zero_optim_cpu import CpuStep

    if given.variant == "loaded":
        print(json.dumps({"peak_rss_kib": peak()}), file=out, flush=True)
        return
    model, vocabulary = built(given)
    numbers = {"numel": sum(p.numel() for p in model.parameters())}
    numbers["trained"] = sum(p.numel() for p in model.parameters() if p.requires_grad)
    if given.variant == "predicted":
        print(json.dumps(predicted(model, given)), file=out, flush=True)
        return
    store, optimizer = None, None
    if given.variant in PEERS:
        train = PEERS[given.variant](model, given)
    else:
        optimizer, step = adamw(model), CpuStep()
        step.bind(optimizer)
        made = plan(model, **dict.fromkeys(KINDS, given.variant), **options(given, step))
        numbers["planned_kib"] = (made.total("host") + made.total("device")) >> 10
        store = TieredStore(plan=made, nvme=Slab([given.directory]), step=step)
        optimizer = zero_core.shard(model, optimizer, store=store, prefetch_bytes=given.prefetch)
        train = by_torch(model, optimizer)
    generator = torch.Generator().manual_seed(0)  # what deferred construction draws comes from nobody's generator
    tokens = torch.randint(0, vocabulary, (1, given.tokens), generator=generator)

    def block(count: int) -> float:
        loss = [train(tokens) for _ in range(count)][-1]
        if store is not None:
            store.wait()
        return float(loss.detach())

    block(1)
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        begin, loss = time.perf_counter(), block(given.steps)
        row = {"seconds": (time.perf_counter() - begin) / given.steps, "loss": loss, **numbers}
        if store is not None:
            row["held"] = {" ".join(key): nbytes for key, nbytes in store.describe().held.items()}
        print(json.dumps(row | {"peak_rss_kib": peak()}), file=out, flush=True)
    if store is not None:
        if given.checkpoint:
            print(json.dumps(checkpoint(Path(given.directory, "checkpoint"), model, optimizer)), file=out, flush=True)
        store.close()


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def options(given: argparse.Namespace, step: Any) -> dict[str, Any]:
    return {"step": step, "tile_numel": 1 << 20, "prefetch_bytes": given.prefetch}


def predicted(model: Any, given: argparse.Namespace) -> dict[str, Any]:
    """What plans on each tier say of a step, after the machine was measured."""
    import torch

    from zero_nvme import Slab
    from zero_offload import plan, probe
    from zero_optim_cpu import CpuStep

    with closing(Slab([given.directory])) as slab:
        sizes = {"hidden_size": MODELS[given.model]["hidden_size"], "tokens": given.tokens}
        machine = probe(nvme=slab, step=CpuStep(), parameter_dtype=getattr(torch, given.dtype), **sizes)
    step = CpuStep()
    step.bind(adamw(model))
    given_to = options(given, step) | {"tokens": given.tokens}
    given_to["activations"] = "recompute" if given.checkpointing else "keep"
    found = {tier: plan(model, machine, **dict.fromkeys(KINDS, tier), **given_to) for tier in ("host", "nvme")}
    seconds = {tier: each.prediction and each.prediction.step_seconds for tier, each in found.items()}
    return {"seconds": seconds, "tflops": machine.tflops}


def checkpoint(folder: Path, model: Any, optimizer: Any) -> dict[str, Any]:
    """Save and load what is trained."""
    import zero_core

    begin = time.perf_counter()
    zero_core.checkpoint.save(folder, model, optimizer, trained_only=True)
    saved = time.perf_counter()
    zero_core.checkpoint.load(folder, model, optimizer)
    nbytes = sum(file.stat().st_size for file in folder.iterdir())
    row = {"checkpoint_bytes": nbytes, "save": saved - begin, "load": time.perf_counter() - saved}
    return row | {"peak_rss_kib": peak()}


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
            found["ratio"] = mean_ratio(*([row["seconds"] for row in each] for each in (taken, first)))
            found["loss_of_first"] = first[-1]["loss"]
        print(json.dumps(found), flush=True)
    if given.base == "same":
        alone("predicted", given)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--model", choices=list(MODELS), default="135m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--variants", default="plain,host,nvme", help="fsdp2, deepspeed-host, deepspeed-nvme too")
    parser.add_argument("--base", choices=["same", "nf4"], default="same", help="what is not trained")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--prefetch", type=int, default=32 << 20, help="prefetch_bytes")
    parser.add_argument("--checkpointing", action="store_true", help="recompute activations in backward")
    parser.add_argument("--checkpoint", action="store_true", help="save and load what is trained at the end")
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--variant", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    work(chosen) if chosen.variant else compare(chosen)
