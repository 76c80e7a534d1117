"""One process of the step benchmark: a model under one configuration, which takes steps when it is asked to.

    python -m tests.benchmarks.step_worker '{"name": "nvme", "micro_batch": 2, "folder": "."}'

It says what it is in one line of JSON, then answers each line on stdin with another: `turn N` times N steps, after one
that is not timed, and waits for what runs in the background; `end` leaves. Between turns it does nothing, so that
others can take theirs. A step is timed from the return of one `optimizer.step()` to that of the next, so it holds
exactly one update, wherever that hides.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
KINDS = ("parameters", "gradients", "optimizer")
PREFETCH_BYTES = 64 << 20  # zero-train's default
NVME = {"optimizer": "nvme"}  # what is not named lies on host
TIERS: dict[str, dict[str, Any]] = {
    "host": {},
    "nvme": NVME,
    "nvme-fewest-slots": NVME | {"slots": 3},
    "nvme-8bit": NVME | {"layout": "split_8bit"},
    "parameters-nvme": NVME | {"parameters": "nvme"},
    "everything-nvme": dict.fromkeys(KINDS, "nvme") | {"slots": 3, "prefetch_bytes": 0},
}
FSDP2 = "fsdp2-host"
DEEPSPEED = {"deepspeed-host": "cpu", "deepspeed-nvme": "nvme", "deepspeed-everything-nvme": "nvme"}


class Missing(Exception):
    """The configuration cannot run here; the text says why."""


def model_of(arguments: dict[str, Any]) -> tuple[nn.Module, torch.Tensor]:
    """The 119.6 M Llama, or one of `sizes`, in the benchmark's dtype, and a micro-batch of (rows, sequence) tokens.

    `device` is where both are made; `length` the sequence's; `checkpointing` recomputes each block.
    """
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tiny, device = arguments.get("tiny"), arguments.get("device", "cpu")
    sizes = TINY if tiny else arguments.get("sizes", SIZES)
    default = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, arguments.get("dtype", "float32")))
    try:
        with torch.device(device):
            made = LlamaForCausalLM(LlamaConfig(vocab_size=256 if tiny else 8192, use_cache=False, **sizes))
    finally:
        torch.set_default_dtype(default)
    if arguments.get("checkpointing"):
        made.gradient_checkpointing_enable({"use_reentrant": False})
    made.train()
    length = 32 if tiny else arguments.get("length", 256)
    return made, torch.randint(0, 256, (arguments["micro_batch"], length), device=device)


def backward(model: nn.Module, tokens: torch.Tensor) -> None:
    model(input_ids=tokens, labels=tokens).loss.backward()


def floor(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """Forward and backward alone; then one pass of CpuStep over the model's elements, states in memory."""
    model, tokens = model_of(arguments)
    tiles: list[Any] = []

    def step() -> None:
        backward(model, tokens)
        for parameter in model.parameters():
            parameter.grad = None

    def update() -> None:
        if not tiles:
            tiles.append(pass_of_cpu_step(model, arguments))
        tiles[0]()

    return {"step": step, "extra": update}


def pass_of_cpu_step(model: nn.Module, arguments: dict[str, Any]) -> Callable[[], None]:
    """Updates as many elements as the model has, in tiles of 4 Mi."""
    import zero_optim_cpu

    numel, tile_numel = sum(p.numel() for p in model.parameters()), 1 << 22
    optimizer = torch.optim.AdamW([torch.zeros(1)], lr=1e-4)
    step = zero_optim_cpu.CpuStep(layout=arguments.get("layout", "split"))
    step.bind(optimizer)
    options = {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    dtype = next(model.parameters()).dtype
    tiles = [_Tile(step, min(tile_numel, numel - start), dtype, options) for start in range(0, numel, tile_numel)]

    def update() -> None:
        for tile in tiles:
            step.update(tile, [tile], 1.0)

    return update


class _Tile:
    """A tile and its only segment."""

    def __init__(self, step: Any, numel: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
        self.states = {f.name: torch.zeros(f.numel, dtype=f.dtype) for f in step.layout(numel, dtype)}
        self.parameter, self.gradient = torch.zeros(numel, dtype=dtype), torch.full((numel,), 1e-3, dtype=dtype)
        self.start, self.stop, self.options, self.step = 0, numel, options, 1
        step.initialise(self, torch.linspace(-1, 1, numel))


def choices(name: str) -> tuple[dict[str, str], str, int | None, int]:
    """Tier by kind, layout of the states, slots (None: the default) and prefetch_bytes of one of TIERS."""
    tiers = dict(TIERS[name])
    layout, slots = tiers.pop("layout", "split"), tiers.pop("slots", None)
    prefetch_bytes = tiers.pop("prefetch_bytes", PREFETCH_BYTES)
    return dict.fromkeys(KINDS, "host") | tiers, layout, slots, prefetch_bytes


def ours(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """zero_core.shard, with a TieredStore where the name is one of TIERS."""
    import zero_core
    import zero_nvme
    import zero_offload
    import zero_optim_cpu

    model, tokens = model_of(arguments)
    dtype = next(model.parameters()).dtype
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=arguments["name"] == "none")
    store, prefetch_bytes = None, PREFETCH_BYTES
    if arguments["name"] != "none":
        placed, layout, slots, prefetch_bytes = choices(arguments["name"])
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments["folder"]))
        slab = stack.enter_context(zero_nvme.Slab([folder])) if "nvme" in placed.values() else None
        step = zero_optim_cpu.CpuStep(layout=layout)
        store = zero_offload.TieredStore(**placed, nvme=slab, step=step, slots=slots)
    optimizer = zero_core.shard(
        model, optimizer, stage=3, max_grad_norm=1.0, store=store, prefetch_bytes=prefetch_bytes,
        param_dtype=None if dtype == torch.float32 else dtype,
    )  # fmt: skip
    stack.callback(optimizer.close)
    zero_core.keep_freed_memory()

    def train() -> None:
        backward(model, tokens)
        optimizer.step()
        optimizer.zero_grad()

    if store is None:
        return {"step": train}
    return {"step": train, "wait": store.wait, "exposed": lambda: store.stats()["exposed_seconds"]}


def deepspeed(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """DeepSpeed's stage 3 with the same kinds on the same tiers. Raises Missing where it cannot be had."""
    os.environ.update({"DS_ACCELERATOR": arguments.get("device", "cpu"), "DS_SKIP_CUDA_CHECK": "1"})
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1"})
    os.environ.update({"LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(arguments["port"])})
    try:
        import deepspeed as package
    except ImportError as error:
        raise Missing(f"DeepSpeed cannot be imported: {error}") from error
    package.utils.logging.logger.setLevel("ERROR")
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments["folder"]))
    model, tokens = model_of(arguments)
    tier = DEEPSPEED[arguments["name"]]
    place = {"device": tier, "nvme_path": folder}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": place | {"buffer_count": 5}}
    if arguments["name"] != "deepspeed-nvme":
        zero["offload_param"] = place | {"buffer_count": 8, "buffer_size": 16 << 20}
    config = {
        "train_micro_batch_size_per_gpu": arguments["micro_batch"],
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "bf16": {"enabled": arguments.get("dtype") == "bfloat16"},
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }
    try:
        engine, *_ = package.initialize(model=model, config=config)
    except Exception as error:
        raise Missing(f"DeepSpeed does not start: {type(error).__name__}: {str(error)[:400]}") from error

    def train() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()

    return {"step": train}


def fsdp2(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """FSDP2 with CPUOffloadPolicy on one GPU: fp32 shards and fused AdamW on the host, `dtype` on the device."""
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if arguments.get("device") != "cuda":
        raise Missing("FSDP2's CPUOffloadPolicy needs a GPU")
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
    os.environ["MASTER_PORT"] = str(arguments["port"])
    dist.init_process_group("cpu:gloo,cuda:nccl")
    stack.callback(dist.destroy_process_group)
    wanted = getattr(torch, arguments.get("dtype", "float32"))
    model, tokens = model_of(arguments | {"dtype": "float32", "device": "cpu"})  # its shards are its fp32 masters
    options: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=wanted),
        "offload_policy": CPUOffloadPolicy(pin_memory=True),
    }
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for buffer in model.buffers():  # the policy moves parameters only
        buffer.data = buffer.data.cuda()
    tokens = tokens.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train() -> None:
        backward(model, tokens)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return {"step": train}


def turn(parts: dict[str, Callable[[], Any]], count: int) -> dict[str, Any]:
    """One step untimed, `count` timed, then the end of the background, untimed.

    The first step after others had their turns is up to half again as long, updates in the background or not.
    """
    exposed = parts.get("exposed", lambda: 0.0)
    parts["step"]()
    wait_for_kernels()
    before, begin = exposed(), time.perf_counter()
    for _ in range(count):
        parts["step"]()
    wait_for_kernels()
    seconds, hidden_not = (time.perf_counter() - begin) / count, (exposed() - before) / count
    parts.get("wait", lambda: None)()
    answer = {"seconds": seconds, "exposed_seconds": hidden_not, "peak_rss_bytes": peak_rss_bytes(os.getpid())}
    if torch.cuda.is_initialized():
        answer["peak_device_bytes"] = torch.cuda.max_memory_allocated()
    if "extra" in parts:  # after the peak was read: these states are not the floor's
        parts["extra"]()
        begin = time.perf_counter()
        parts["extra"]()
        answer["extra_seconds"] = time.perf_counter() - begin
    return answer


def wait_for_kernels() -> None:
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def peak_rss_bytes(process: int) -> int:
    """VmHWM of a process and of the children that it has now."""
    total = 0
    try:
        with open(f"/proc/{process}/status") as file:
            total = next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
        with open(f"/proc/{process}/task/{process}/children") as file:
            return total + sum(peak_rss_bytes(int(child)) for child in file.read().split())
    except (OSError, StopIteration):
        return total


def main() -> None:
    arguments = json.loads(sys.argv[1])
    answers, sys.stdout = sys.stdout, sys.stderr  # whatever libraries print does not mix with the answers

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    name = arguments["name"]
    build = {"floor": floor, FSDP2: fsdp2, **dict.fromkeys(DEEPSPEED, deepspeed)}.get(name, ours)
    with ExitStack() as stack:
        try:
            parts = build(arguments, stack)
        except Missing as reason:
            say({"missing": str(reason)})
            return
        say({"name": name})
        for line in sys.stdin:
            if line.strip() == "end":
                break
            say(turn(parts, int(line.split()[1])))


if __name__ == "__main__":
    main()
