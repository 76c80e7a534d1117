"""A large batch in one piece, a few rows at a time inside each block, and as accumulated micro-batches, in turn.

    python -m tests.benchmarks.rows DIRECTORY --batch 16 --rows 2 --pairs 5

A Llama of 119.6 M or 3 B parameters, everything on NVMe, three slots, each block recomputed. Each variant is a process
of its own, and blocks of `--steps` steps alternate. A block ends when every update is stored.

    whole       one batch, each block computes all of it: offload_activations(model, store, policy)
    rows        one batch, each block takes `--rows` rows at a time: offload_activations(..., rows=)
    accumulate  micro-batches of `--rows` rows, whose gradients are added
    small       a batch of `--rows` rows alone, for its memory and its rate
    tokens      one batch, modules inside of blocks take `--part` tokens of each row at a time: (..., tokens=)
    deepspeed   DeepSpeed's stage 3 on NVMe, which accumulates micro-batches of `--rows` rows; it must be installed

What is printed is one JSON line a variant: medians of tokens per second, of a step's seconds, processor time, page
faults, exposed seconds and bytes; the peak resident memory (VmHWM, from the start), the size of the blocks' inputs, and
what autograd saves in the attention of one block, in KiB; the loss of the last micro-batch; and the geometric mean over
pairs of its tokens per second to those of the first variant, with its 95 % interval for 4 pairs and more. What is
measured with --picture includes the drawing.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from .commits import DIFFERENCES
from .lora import MODELS
from .sft import peak_kib
from .step_worker import deepspeed_config
from .turns import Worker, in_turn, report, started

VARIANTS = ("whole", "rows", "accumulate", "small")
LONG = "tokens"
PEER = "deepspeed"
Block = Callable[[int], float]


def work(given: argparse.Namespace) -> None:
    """Train; for each line on stdin a block of steps, and what it took on stdout."""
    import torch

    from zero_core import deferred_init

    out = os.fdopen(os.dup(1), "w")  # answers alone: DeepSpeed logs on stdout
    os.dup2(2, 1)
    torch.manual_seed(0)
    sizes = MODELS[given.model]
    torch.set_default_dtype(getattr(torch, given.dtype))
    with nullcontext() if given.variant == PEER else deferred_init():
        from transformers import LlamaConfig, LlamaForCausalLM

        model = LlamaForCausalLM(LlamaConfig(use_cache=False, **sizes))
    torch.set_default_dtype(torch.float32)
    batch = given.rows if given.variant == "small" else given.batch
    parts = given.batch // given.rows if given.variant in ("accumulate", PEER) else 1
    tokens = torch.randint(0, sizes["vocab_size"], (batch, given.tokens))
    block, stats, close = (deepspeed if given.variant == PEER else ours)(given, model, tokens, parts)
    block(1)
    print("ready", file=out, flush=True)
    for _ in sys.stdin:
        before, usage, begin = stats(), resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        row: dict[str, Any] = {"loss": block(given.steps)}
        row["seconds"] = (time.perf_counter() - begin) / given.steps
        used = resource.getrusage(resource.RUSAGE_SELF)
        row["user_seconds"] = (used.ru_utime - usage.ru_utime) / given.steps
        row["system_seconds"] = (used.ru_stime - usage.ru_stime) / given.steps
        row["page_faults"] = (used.ru_minflt - usage.ru_minflt) / given.steps
        row["tokens_per_second"] = tokens.numel() / row["seconds"]
        row |= {name: (stats()[name] - before[name]) / given.steps for name in DIFFERENCES if name in before}
        inputs = batch * given.tokens * sizes["hidden_size"] * sizes["num_hidden_layers"]
        row["attention_kib"] = attention_kib(sizes, getattr(torch, given.dtype)) * batch * given.tokens // parts
        row["input_kib"] = inputs * getattr(torch, given.dtype).itemsize // parts >> 10
        print(json.dumps(row | {"peak_rss_kib": peak_kib()}), file=out, flush=True)
    close()


def attention_kib(sizes: dict[str, Any], dtype: Any) -> float:
    """KiB a token that autograd saves in the attention of one block, its parameters left out."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    tokens, saved = 256, {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        saved[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    config = LlamaConfig(use_cache=False, **sizes | {"num_hidden_layers": 1})
    inner = LlamaForCausalLM(config).to(dtype).model
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=dtype, requires_grad=True)
    places = inner.rotary_emb(hidden, torch.arange(tokens)[None])
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output, _ = inner.layers[0].self_attn(hidden, position_embeddings=places, attention_mask=None)
    parameters = {parameter.untyped_storage().data_ptr() for parameter in inner.parameters()}
    assert output.requires_grad
    return sum(each.untyped_storage().nbytes() for at, each in saved.items() if at not in parameters) / tokens / 1024


def deepspeed(given: argparse.Namespace, model: Any, tokens: Any, parts: int) -> tuple[Block, Any, Any]:
    """As step_worker trains it, with everything on NVMe, and the blocks recomputed by transformers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({"DS_ACCELERATOR": "cpu", "DS_SKIP_CUDA_CHECK": "1", **where})
    import deepspeed as package

    package.utils.logging.logger.setLevel("ERROR")
    arguments = {"name": "deepspeed-everything-nvme", "micro_batch": given.rows, "dtype": given.dtype}
    config = deepspeed_config(arguments, model.config.hidden_size, given.directory)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    engine, *_ = package.initialize(model=model, config=config | {"gradient_accumulation_steps": parts})

    def block(count: int) -> float:
        for _ in range(count):
            for part in tokens.chunk(parts):
                loss = engine(input_ids=part, labels=part).loss
                engine.backward(loss)
                engine.step()
        return float(loss.detach())

    return block, dict, engine.destroy


def ours(given: argparse.Namespace, model: Any, tokens: Any, parts: int) -> tuple[Block, Any, Any]:
    import torch

    import zero_core
    from zero_nvme import Slab
    from zero_offload import TieredStore, offload_activations
    from zero_optim_cpu import CpuStep

    batch = len(tokens)
    places = dict.fromkeys(("parameters", "gradients", "optimizer"), "nvme")
    store = TieredStore(**places, nvme=Slab([given.directory]), step=CpuStep(), slots=3, accumulate=parts)
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4)
    span, more = store.timeline.span, {"max_grad_norm": 1.0, "prefetch_bytes": given.prefetch_bytes}
    optimizer = zero_core.shard(model, adamw, store=store, observer=store.timeline, **more)
    parts_of = {"rows": {"rows": given.rows}, LONG: {"tokens": given.part}}.get(given.variant, {})
    offload_activations(model, store, given.policy, **parts_of)
    if given.keep_freed_memory:
        zero_core.keep_freed_memory()

    def block(count: int) -> float:
        for _ in range(count):
            with span("step", f"with {batch} rows"):
                for part in tokens.chunk(parts):
                    with span("forward", ""):
                        loss = model(input_ids=part, labels=part).loss / parts
                    with span("backward", ""):
                        loss.backward()
                with span("optimizer", ""):
                    optimizer.step()
                    optimizer.zero_grad()
        store.wait()
        if given.picture:
            from zero_train.report import draw_timeline

            draw_timeline(Path(given.picture), store.timeline.events(), steps=1)
        return float(loss.detach()) * parts

    return block, store.stats, optimizer.close


def start(variant: str, given: argparse.Namespace) -> Worker:
    folder = Path(given.directory, variant)
    folder.mkdir(parents=True, exist_ok=True)
    told = {key: value for key, value in vars(given).items() if key not in ("directory", "variant", "variants")}
    keep = ["--keep_freed_memory"] if told.pop("keep_freed_memory") else []
    options = [f"--{key}={value}" for key, value in told.items()]
    command = ["-m", "tests.benchmarks.rows", str(folder), "--variant", variant, *options, *keep]
    return started(variant, command)


def compare(given: argparse.Namespace) -> None:
    workers = {variant: start(variant, given) for variant in given.variants.split(",")}
    report(workers, in_turn(workers, given.pairs), "tokens_per_second")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", help="on the drive that is measured")
    parser.add_argument("--variants", default=",".join(VARIANTS))
    parser.add_argument("--model", choices=["120m", "3b"], default="120m")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step, a multiple of --rows")
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=256, help="of a row")
    parser.add_argument("--part", type=int, default=2048, help="tokens of a row at a time")
    parser.add_argument("--policy", choices=["recompute", "host", "nvme"], default="recompute")
    parser.add_argument("--prefetch_bytes", type=int, default=0)
    parser.add_argument("--keep_freed_memory", action="store_true", help="zero_core.keep_freed_memory()")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--picture", default="", help="a PNG file: the timeline of the last step; with one variant")
    parser.add_argument("--variant", choices=[*VARIANTS, LONG, PEER], help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    work(chosen) if chosen.variant else compare(chosen)
