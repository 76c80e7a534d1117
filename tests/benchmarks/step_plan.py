"""What the planner says of the step benchmark's model: where it may lie, and how long a step takes."""

from typing import Any

import torch

from tests.benchmarks.step_model import model_of, optimizer_of

KINDS = ("parameters", "gradients", "optimizer")
PREFETCH_BYTES = 64 << 20  # zero-train's default
GIB = 1 << 30
RESERVED_GIB = 5.0  # of the host: interpreter, torch with CUDA, transformers
ENOUGH = 0.93  # of host memory that is free: the kernel's lists of pinned pages, pages of files, fragments


def planned(arguments: dict[str, Any], hardware: dict[str, Any], rows: int, step: Any, placed: dict[str, Any]) -> Any:
    """The planner's plan of the model. Raises zero_offload.PlanError where it does not fit."""
    import zero_offload

    model, batch = model_of(arguments | {"device": "meta", "micro_batch": rows, "deferred": False})
    step = zero_offload.step_for(optimizer_of(model, arguments, fused=False), step)
    dtype = getattr(torch, arguments.get("dtype", "float32"))
    return zero_offload.plan(
        zero_offload.ModelSizes.of(model, dtype=dtype, step=step), zero_offload.Hardware(**hardware), step=step,
        activations="recompute" if arguments.get("checkpointing") else "keep", tokens=batch.tokens.numel(),
        parameter_dtype=dtype, prefetch_bytes=PREFETCH_BYTES, **placed,
    )  # fmt: skip


def automatic(arguments: dict[str, Any], step: Any, tile: dict[str, Any]) -> Any:
    """The plan for what is free here."""
    rows, how = arguments.get("most_rows", arguments["micro_batch"]), dict[str, Any](tile)
    if arguments["name"] == "shared" and arguments.get("device") == "cuda":
        how["update_share"] = arguments["update_share"]
    return planned(arguments, free_here(arguments), rows, step, how)


def free_here(arguments: dict[str, Any]) -> dict[str, Any]:
    """What the planner is given: the figures of `probe`, and the memory that is free now, or that `arguments` say."""
    import zero_offload
    from zero_offload.planning.probing import device_reserves

    figures = arguments.get("probe", {}).items()
    found: dict[str, Any] = {key: value for key, value in figures if key == "tflops" or key.endswith("gbps")}
    if arguments.get("device") == "cuda":
        device = torch.device("cuda", torch.cuda.current_device())
        dtype = getattr(torch, arguments.get("dtype", "float32"))
        total = torch.cuda.mem_get_info()[1] / GIB
        found |= {"device": "cuda", "device_gib": min(total, arguments.get("device_gib") or total)}
        found["device_reserved_gib"] = device_reserves(device, dtype)
    found["host_gib"] = arguments.get("host_gib") or zero_offload.available_host_bytes() / GIB
    found["host_reserved_gib"] = 0.0
    if not arguments.get("tiny"):
        found |= {"host_gib": ENOUGH * found["host_gib"], "host_reserved_gib": RESERVED_GIB}
    return found | {"nvme_gib": 0.0}


def predicted(arguments: dict[str, Any], rows: int, floor_seconds: float) -> dict[str, Any]:
    """The planner's step of `host`, with the figures of `probe` and the TFLOP/s of this floor; {} without figures."""
    import zero_optim_cpu

    figures, step = arguments.get("probe"), zero_optim_cpu.CpuStep("split")
    if not figures:
        return {}
    on_host = dict.fromkeys(KINDS, "host")
    at_one = planned(arguments, figures | {"tflops": 1.0}, rows, step, on_host).prediction
    if at_one is None:
        return {}
    plan = planned(arguments, figures | {"tflops": at_one.compute_seconds / floor_seconds}, rows, step, on_host)
    seconds = {"seconds": plan.step_seconds, "exposed_seconds": plan.exposed_seconds}
    return seconds | {f"{tier}_bytes": plan.total(tier) for tier in ("device", "host")}
