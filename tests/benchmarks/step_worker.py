"""One process of the step benchmark: a model under one configuration, which takes steps when it is asked to.

    python -m tests.benchmarks.step_worker '{"name": "nvme", "micro_batch": 2, "folder": "."}'

It says what it is in one line of JSON, then answers each line on stdin with another: `turn N [ROWS]` times N steps of
as many rows (micro_batch where left out), after one that is not timed, and waits for what runs in the background;
`trace FILE [ROWS]` writes torch's profile of two steps; `predict ROWS SECONDS` says what the planner predicts of `host`
where forward and backward take these seconds; `end` leaves. Between turns it does nothing, so that others can
take theirs. A step is timed from the return of one `optimizer.step()` to that of the next, so it holds exactly one
update, wherever that hides.
"""

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import cache
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from tests.benchmarks.step_model import Batch, Missing, model_of, optimizer_of, repeat_values, skip_first_values
from tests.benchmarks.step_plan import GIB, KINDS, PREFETCH_BYTES, automatic, predicted

NVME = {"optimizer": "nvme"}  # what is not named lies on host
TIERS: dict[str, dict[str, Any]] = {
    "host": {},
    "nvme": NVME,
    "nvme-fewest-slots": NVME | {"slots": 3},
    "nvme-8bit": NVME | {"layout": "split_8bit"},
    "parameters-nvme": NVME | {"parameters": "nvme"},
    "everything-nvme": dict.fromkeys(KINDS, "nvme") | {"slots": 3, "prefetch_bytes": 0},
}
STATS = ("exposed_seconds", "nvme_read_bytes", "nvme_write_bytes")  # told of a step
FSDP2 = "fsdp2-host"
DEEPSPEED = {
    "deepspeed-host": "cpu",
    "deepspeed-super-host": "cpu",
    "deepspeed-nvme": "nvme",
    "deepspeed-everything-nvme": "nvme",
}


def backward(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Forward, too, of each micro-batch. Returns the mean loss, which is not waited for."""
    losses = []
    for part in batch.parts():
        loss = model(input_ids=part, labels=part).loss / batch.accumulate
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def floor(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """Forward and backward alone; on the CPU then one pass of CpuStep over the model's elements, states in memory."""
    model, batch = model_of(arguments)

    def step() -> torch.Tensor:
        loss = backward(model, batch)
        for parameter in model.parameters():
            parameter.grad = None
        return loss

    if arguments.get("device") == "cuda":
        return {"step": step, "rows": batch.take}
    update = cache(lambda: pass_of_cpu_step(model, arguments))
    return {"step": step, "rows": batch.take, "extra": lambda: update()()}


def pass_of_cpu_step(model: nn.Module, arguments: dict[str, Any]) -> Callable[[], None]:
    """Updates as many elements as the model has, in tiles of 4 Mi."""
    import zero_optim_cpu
    from tests.unit.zero_optim_cpu.tiles import Segment, adamw, make_tile

    numel, dtype = sum(p.numel() for p in model.parameters()), next(model.parameters()).dtype
    optimizer, step = adamw(lr=1e-4), zero_optim_cpu.CpuStep(layout=arguments.get("layout", "split"))
    step.bind(optimizer)
    masters = torch.linspace(-1, 1, numel).split(1 << 22)
    tiles = [make_tile(step, master, dtype, dtype) for master in masters]
    segments = [Segment(0, len(master), dict(optimizer.param_groups[0])) for master in masters]
    for tile in tiles:
        tile.gradient.fill_(1e-3)

    def update() -> None:
        for tile, segment in zip(tiles, segments, strict=True):
            step.update(tile, [segment], 1.0)

    return update


def choices(name: str) -> tuple[dict[str, str], str, int | None, int]:
    """Tier by kind, layout of the states, slots (None: the default) and prefetch_bytes of one of TIERS."""
    tiers = dict(TIERS[name])
    layout, slots = tiers.pop("layout", "split"), tiers.pop("slots", None)
    prefetch_bytes = tiers.pop("prefetch_bytes", PREFETCH_BYTES)
    return dict.fromkeys(KINDS, "host") | tiers, layout, slots, prefetch_bytes


def plain(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """torch alone: fp32 parameters, autocast to `dtype`, fused AdamW, clipping. 16 bytes a parameter, and the casts."""
    model, batch = model_of(arguments | {"dtype": "float32"})
    if arguments.get("deferred"):
        from zero_core import materialise

        materialise(model)
    device, dtype = arguments.get("device", "cpu"), getattr(torch, arguments.get("dtype", "float32"))
    optimizer = optimizer_of(model, arguments, fused=True)

    def train() -> torch.Tensor:
        with torch.autocast(device, dtype, enabled=dtype != torch.float32):
            loss = model(input_ids=batch.tokens, labels=batch.tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return {"step": train, "rows": batch.take}


def ours(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """zero_core.shard: with a TieredStore where the name is one of TIERS, as the planner says for `auto` and `shared`.

    Arguments that others do not know: `slots` and `prefetch_bytes` in place of the tiers' own; `durable` steps;
    `activations`, what zero_offload.offload_activations is given; `expert_bytes`.
    """
    import zero_core
    import zero_nvme
    import zero_offload
    import zero_optim_cpu

    name, device, deferred = arguments["name"], arguments.get("device", "cpu"), arguments.get("deferred")
    by_rows = arguments.get("logits_by_rows") and name != "none"
    if by_rows:
        arguments = arguments | {"checkpointing": False, "activations": {"policy": "recompute", "rows": 1}}
    if device == "cuda" and name != "none" and (most := arguments.get("device_gib")):
        torch.cuda.set_per_process_memory_fraction(min(1.0, most * GIB / torch.cuda.mem_get_info()[1]))
    store, told, prefetch_bytes, plan = None, dict[str, Any](), PREFETCH_BYTES, None
    durable = arguments.get("durable", False)

    def slab() -> Any:
        folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments["folder"]))
        kept = {"name": "durable" if durable else None, "allow_memory": bool(arguments.get("tiny"))}
        return stack.enter_context(zero_nvme.Slab([folder], **kept))

    tile = {"tile_numel": arguments["tile_numel"]} if arguments.get("tile_numel") else {}
    if name in ("auto", "shared"):
        step = zero_optim_cpu.CpuStep(layout=arguments.get("layout", "split"), cores=beside_gpu(arguments))
        plan = automatic(arguments, step, tile)
        told = {"predicted_seconds": plan.step_seconds}
        if plan.needs_store:
            store = zero_offload.TieredStore(plan=plan, nvme=slab() if plan.total("nvme") else None, step=step)
    elif name != "none":
        placed, layout, slots, prefetch_bytes = choices(name)
        prefetch_bytes = arguments.get("prefetch_bytes", prefetch_bytes)
        step = zero_optim_cpu.CpuStep(layout=layout, cores=beside_gpu(arguments))
        on_nvme = slab() if "nvme" in placed.values() else None
        sizes = {"slots": arguments.get("slots", slots), "accumulate": arguments.get("accumulate", 1), **tile}
        store = zero_offload.TieredStore(**placed, nvme=on_nvme, step=step, durable=durable, **sizes)
    model, batch = model_of(arguments)
    dtype = next(model.parameters()).dtype
    optimizer: Any = optimizer_of(model, arguments, fused=name in ("none", "auto", "shared"))
    optimizer = zero_core.shard(
        model, optimizer, stage=3, store=store, prefetch_bytes=prefetch_bytes,
        max_grad_norm=1.0, expert_bytes=arguments.get("expert_bytes", 64 << 20),
        param_dtype=None if dtype == torch.float32 else dtype, device=device if deferred else None,
    )  # fmt: skip
    stack.callback(optimizer.close)
    if durable:
        zero_core.resume(model, optimizer)
    if activations := arguments.get("activations"):
        zero_offload.offload_activations(model, store, **activations)
    if device == "cpu":
        zero_core.keep_freed_memory()

    def train() -> torch.Tensor:
        with zero_offload.explained(plan) if plan is not None else nullcontext():
            loss = backward(model, batch)
            optimizer.step()
            optimizer.zero_grad()
        return loss

    parts: dict[str, Any] = {"step": train, "rows": batch.take, "told": told}
    if name == "host":
        parts["predict"] = lambda rows, seconds: predicted(arguments, rows, seconds)
    if store is None:
        return parts
    return parts | {"wait": store.wait, "stats": store.stats}


def beside_gpu(arguments: dict[str, Any]) -> tuple[int, ...] | None:
    """The update's cores on a GPU's host, this process bound to the others, as zero-train does it. None on the CPU."""
    if arguments.get("device") != "cuda":
        return None
    chosen = _cores()
    os.sched_setaffinity(0, chosen.rest)
    torch.set_num_threads(chosen.rest_cores)
    return chosen.pool


def all_beside_gpu(arguments: dict[str, Any]) -> None:
    """The same cores for a peer: its update's OpenMP threads take all of them, as its documentation advises."""
    if arguments.get("device") == "cuda":
        chosen = _cores()
        os.sched_setaffinity(0, {*chosen.pool, *chosen.rest})
        torch.set_num_threads(len(chosen.pool) + chosen.rest_cores)


def _cores() -> Any:
    from zero_optim_cpu import cores

    return cores.beside_gpus([cores.seat_of(torch.device("cuda", torch.cuda.current_device()))], 0)


def one_rank(arguments: dict[str, Any]) -> None:
    """What a peer reads of its only rank."""
    rank = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    os.environ.update(rank | {"MASTER_PORT": str(arguments["port"])})


def deepspeed(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """DeepSpeed's stage 3 with the same kinds on the same tiers. Raises Missing where it cannot be had."""
    os.environ.update({"DS_ACCELERATOR": arguments.get("device", "cpu"), "DS_SKIP_CUDA_CHECK": "1"})
    one_rank(arguments)
    try:
        import deepspeed as package
    except ImportError as error:
        raise Missing(f"DeepSpeed cannot be imported: {error}") from error
    package.utils.logging.logger.setLevel("ERROR")
    folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments["folder"]))
    all_beside_gpu(arguments)
    model, batch = model_of(arguments | {"deferred": False})
    config = deepspeed_config(arguments, model.config.hidden_size, folder)
    try:
        engine, *_ = package.initialize(model=model, config=config)
    except Exception as error:
        raise Missing(f"DeepSpeed does not start: {type(error).__name__}: {str(error)[:400]}") from error

    def train() -> torch.Tensor:
        losses = []
        for part in batch.parts():
            losses.append(engine(input_ids=part, labels=part).loss)
            engine.backward(losses[-1])
            engine.step()
        return torch.stack(losses).mean().detach()

    return {"step": train, "rows": batch.take}


def deepspeed_config(arguments: dict[str, Any], hidden: int, folder: str) -> dict[str, Any]:
    """On a GPU what its documentation advises for offload: pinned memory, overlap, buckets of the model's width.

    super: its SuperOffload, made for hosts that the GPU reaches faster than over PCIe.
    """
    name, on_gpu = arguments["name"], arguments.get("device") == "cuda"
    place: dict[str, Any] = {"device": DEEPSPEED[name], "nvme_path": folder}
    zero: dict[str, Any] = {"stage": 3, "offload_optimizer": place | {"buffer_count": 5}}
    if name != "deepspeed-nvme":
        zero["offload_param"] = place | {"buffer_count": 8, "buffer_size": 16 << 20}
    if on_gpu:
        for part in ("offload_optimizer", "offload_param"):
            zero.get(part, {})["pin_memory"] = True
        zero |= {
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 10**9,
            "reduce_bucket_size": hidden * hidden,
            "stage3_prefetch_bucket_size": int(0.9 * hidden * hidden),
            "stage3_param_persistence_threshold": 10 * hidden,
            "stage3_max_live_parameters": 10**9,
            "stage3_max_reuse_distance": 10**9,
        }
    if "super" in name:
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.8}
    return {
        "train_micro_batch_size_per_gpu": arguments["micro_batch"] // arguments.get("accumulate", 1),
        "gradient_accumulation_steps": arguments.get("accumulate", 1),
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "bf16": {"enabled": arguments.get("dtype") == "bfloat16"},
        "aio": {"block_size": 8 << 20, "queue_depth": 8, "intra_op_parallelism": 1, "single_submit": False},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
    }


def fsdp2(arguments: dict[str, Any], stack: ExitStack) -> dict[str, Callable[[], Any]]:
    """FSDP2 on one GPU: fp32 shards and fused AdamW, `dtype` in computation and in the reduction of gradients.

    With CPUOffloadPolicy and pinned memory; each block prefetches the next one, in both directions.
    """
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if arguments.get("device") != "cuda":
        raise Missing("FSDP2's CPUOffloadPolicy needs a GPU")
    wanted = getattr(torch, arguments.get("dtype", "float32"))
    options: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=wanted, reduce_dtype=wanted)}
    options["offload_policy"] = CPUOffloadPolicy(pin_memory=True)
    one_rank(arguments)
    all_beside_gpu(arguments)
    dist.init_process_group("cpu:gloo,cuda:nccl")
    stack.callback(dist.destroy_process_group)
    skip_first_values()
    model, _ = model_of(arguments | {"dtype": "float32", "device": "cpu"})  # its shards are its fp32 masters
    repeat_values(model)
    for block in model.model.layers:
        fully_shard(block, **options)
    fully_shard(model, **options)
    for block, following in pairwise(model.model.layers):
        block.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([block])
    batch = Batch(arguments, "cuda")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def train() -> torch.Tensor:
        loss = backward(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return {"step": train, "rows": batch.take}


def turn(parts: dict[str, Callable[..., Any]], count: int, rows: int | None = None) -> dict[str, Any]:
    """One step untimed, `count` timed, then the end of the background, untimed unless `settled`.

    The first step after others had their turns is up to half again as long, updates in the background or not.
    """
    settled, wait = parts.get("settled", False), parts.get("wait", lambda: None)
    stats = parts.get("stats", dict)
    if rows is not None:
        parts["rows"](rows)
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    losses = [parts["step"]()]
    wait() if settled else None
    wait_for_kernels()
    before, moved, begin = stats(), drive_bytes(), time.perf_counter()
    for _ in range(count):
        losses.append(parts["step"]())
    wait() if settled else None
    wait_for_kernels()
    seconds, after = (time.perf_counter() - begin) / count, stats()
    wait()
    answer = {"seconds": seconds, "exposed_seconds": 0.0, "peak_rss_bytes": peak_rss_bytes(os.getpid())}
    answer |= {key: (after[key] - before[key]) / count for key in STATS if key in after}
    answer |= {key: (nbytes - moved[key]) / count for key, nbytes in drive_bytes().items()}
    answer["losses"] = [loss.item() for loss in losses]
    if torch.cuda.is_initialized():
        held = torch.cuda.memory_stats()
        answer["peak_device_bytes"] = torch.cuda.max_memory_allocated()
        answer |= {"reserved_bytes": held["reserved_bytes.all.peak"], "retries": held["num_alloc_retries"]}
        answer["peak_rss_bytes"] += pinned_beside_rss()
        torch.cuda.empty_cache()  # the others want the room
    if "extra" in parts:  # after the peak was read: these states are not the floor's
        parts["extra"]()
        begin = time.perf_counter()
        parts["extra"]()
        answer["extra_seconds"] = time.perf_counter() - begin
    return answer


def drive_bytes() -> dict[str, int]:
    """What this process has read from drives and written to them, a peer's bytes too; {} where Linux does not count."""
    try:
        with open("/proc/self/io") as file:
            counted = dict(line.split(": ") for line in file)
    except FileNotFoundError:
        return {}
    return {f"drive_{key}": int(counted[key]) for key in ("read_bytes", "write_bytes")}


def trace(parts: dict[str, Callable[..., Any]], file: str, rows: int | None) -> dict[str, Any]:
    """torch's profile of two steps after one that is not profiled. On a GPU of kernels and copies only."""
    from torch.profiler import ProfilerActivity, profile

    if rows is not None:
        parts["rows"](rows)
    parts["step"]()
    wait_for_kernels()
    where = ProfilerActivity.CUDA if torch.cuda.is_initialized() else ProfilerActivity.CPU
    with profile(activities=[where]) as profiled:
        parts["step"]()
        parts["step"]()  # the update of the first hides in the forward of the second
        wait_for_kernels()
    parts.get("wait", lambda: None)()
    profiled.export_chrome_trace(file)
    return {"trace": file}


@cache
def _rss_has_pinned() -> bool:
    """Whether the kernel counts memory that the driver pins in a process's resident set: tried out once."""

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before, size = resident(), 64 << 20
    pinned = torch.ones(size, dtype=torch.uint8, pin_memory=True)
    return resident() - before > size // 2 and pinned.is_pinned()


def pinned_beside_rss() -> int:
    """Most bytes of torch's pinned memory, where the resident set leaves them out. FSDP2 and DeepSpeed have much."""
    statistics = getattr(torch.cuda, "host_memory_stats", dict)()
    most = max((n for key, n in statistics.items() if "bytes" in key and "peak" in key), default=0)
    return 0 if not most or _rss_has_pinned() else int(most)


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
    build = {"floor": floor, "plain": plain, FSDP2: fsdp2, **dict.fromkeys(DEEPSPEED, deepspeed)}.get(name, ours)
    with ExitStack() as stack:
        begun = time.monotonic()
        try:
            if build in (fsdp2, deepspeed) and arguments.get("optimizer", "adamw") != "adamw":
                raise Missing(f"{name} is measured with AdamW alone")
            parts = build(arguments, stack)
        except Missing as reason:
            say({"missing": str(reason)})
            return
        parts["settled"] = arguments.get("settled", False)
        say({"name": name, "setup_seconds": time.monotonic() - begun} | parts.pop("told", {}))
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "end":
                break
            if word == "predict":
                say(parts["predict"](int(rest[0]), float(rest[1])))
                continue
            rows = int(rest[1]) if len(rest) > 1 else None
            say(trace(parts, rest[0], rows) if word == "trace" else turn(parts, int(rest[0]), rows))


if __name__ == "__main__":
    main()
