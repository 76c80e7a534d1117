"""The largest model that trains three steps on one machine, by the layout of its states.

    nox -s bench-gpu -- --largest [14b exact bf16-moment 8-bit] [--nvme-gib 24] [--host-gib 124] …

WRITTEN FOR CUDA AND NOT YET RUN ON A GPU: only toy sizes have run, on a CPU (`--tiny`). A Llama of hidden size 5120
with as many layers as the planner accepts on what the machine has free, over device, host and, where room is given,
nvme; each in a process of its own with a time limit, three steps of 4 Ki tokens, clipping 1.0, activations recomputed.
Its weights begin as a constant: what is tried is the room, and whether losses stay finite.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

CANDIDATES = {  # layers (None: as many as fit) and layout of the states
    "14b": (44, "split"),
    "exact": (None, "split"),
    "bf16-moment": (None, "split_bf16m"),
    "8-bit": (None, "split_8bit"),
}
SHAPE = {"hidden_size": 5120, "intermediate_size": 13824, "num_attention_heads": 40, "vocab_size": 8192}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 2, "vocab_size": 256}
MOST_LAYERS = 400
LENGTH, ROWS, STEPS = 2048, 2, 3
PREFETCH_BYTES = 64 << 20
GIB = 1 << 30
PROCESS_GIB = 5.0  # of host memory: interpreter, torch with CUDA, transformers
ENOUGH = 0.93  # of what is free: the kernel's lists of pinned pages, pages of files, fragments


def host_bytes(given_gib: float | None) -> int:
    """Host memory to use: what is given, or what is free."""
    import zero_offload

    return zero_offload.available_host_bytes() if given_gib is None else int(given_gib * GIB)


def machine(nvme_gib: float, host_gib: float | None, tiny: bool) -> dict[str, Any]:
    """What is free here, as `zero_offload.Hardware` has it. tiny: a host of 16 MiB without a device.

    `host_gib`: of host memory, where the machine does not show all that it has.
    """
    if tiny:
        return {"host_gib": 16 / 1024, "host_reserved_gib": 0.0, "nvme_gib": nvme_gib}
    free = torch.cuda.mem_get_info()[0]
    return {
        "device": "cuda",
        "device_gib": free / GIB,
        "device_reserved_gib": 2.0,
        "host_gib": ENOUGH * host_bytes(host_gib) / GIB,
        "host_reserved_gib": PROCESS_GIB,
        "nvme_gib": nvme_gib,
    }


def model_of(layers: int, tiny: bool) -> nn.Module:
    """Without memory. Its initialisation is a constant."""
    import transformers

    import zero_core

    def first_values(self: Any, module: nn.Module) -> None:
        for name, parameter in module.named_parameters(recurse=False):
            nn.init.constant_(parameter, 1.0 if "norm" in type(module).__name__.lower() else 0.01)
            del name

    transformers.PreTrainedModel._init_weights = first_values  # this process has no other models
    for kind in (nn.Linear, nn.Embedding):
        kind.reset_parameters = lambda self: None  # type: ignore[method-assign]
    config = transformers.LlamaConfig(num_hidden_layers=layers, use_cache=False, **(TINY if tiny else SHAPE))
    with zero_core.deferred_init():
        made = transformers.LlamaForCausalLM(config)
    made.gradient_checkpointing_enable({"use_reentrant": False})
    return made.train()


def planned(
    layers: int, layout: str, hardware: dict[str, Any], tiny: bool, cores: Sequence[int] | None = None
) -> tuple[Any, Any]:
    """(plan, bound step) of as many layers. Raises zero_offload.PlanError where they do not fit."""
    import zero_offload
    import zero_optim_cpu

    step = zero_optim_cpu.CpuStep(layout, cores=cores)
    step.bind(torch.optim.AdamW([torch.zeros(1)]))
    from transformers import LlamaConfig, LlamaForCausalLM

    with torch.device("meta"):
        sizes = zero_offload.ModelSizes.of(
            LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **(TINY if tiny else SHAPE))), dtype=torch.bfloat16
        )
    return zero_offload.plan(
        sizes, zero_offload.Hardware(**hardware), activations="recompute", step=step, parameter_dtype=torch.bfloat16,
        tokens=ROWS * (32 if tiny else LENGTH), prefetch_bytes=PREFETCH_BYTES, tile_numel=1 << 20 if tiny else 1 << 22,
    ), step  # fmt: skip


def most_layers(layout: str, hardware: dict[str, Any], tiny: bool) -> int:
    """As many as the planner accepts; 0: none."""
    import zero_offload

    def fits(layers: int) -> bool:
        try:
            planned(layers, layout, hardware, tiny)
        except zero_offload.PlanError:
            return False
        return True

    low, high = 0, 1
    while high <= MOST_LAYERS and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def train(arguments: dict[str, Any]) -> dict[str, Any]:
    """Three steps in this process."""
    import zero_core
    import zero_nvme
    import zero_offload
    from tests.benchmarks.step_worker import beside_gpu, peak_rss_bytes, wait_for_kernels

    tiny, begun = arguments["tiny"], time.monotonic()
    device = "cpu" if tiny else "cuda"
    cores = beside_gpu({"device": device})
    plan, step = planned(arguments["layers"], arguments["layout"], arguments["hardware"], tiny, cores)
    with ExitStack() as stack:
        slab = None
        if plan.total("nvme"):
            folder = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments["folder"]))
            slab = stack.enter_context(zero_nvme.Slab([folder], allow_memory=tiny))
        model = model_of(arguments["layers"], tiny)
        store = zero_offload.TieredStore(plan=plan, nvme=slab, step=step)
        optimizer = zero_core.shard(
            model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda"), stage=3, max_grad_norm=1.0,
            store=store, param_dtype=torch.bfloat16, prefetch_bytes=PREFETCH_BYTES, device=device,
        )  # fmt: skip
        stack.callback(optimizer.close)
        ready, losses, seconds = time.monotonic() - begun, [], []
        tokens = torch.randint(0, 256, (ROWS, 32 if tiny else LENGTH), device=device)
        for _ in range(STEPS):
            begin = time.perf_counter()
            with zero_offload.explained(plan):
                loss = model(input_ids=tokens, labels=tokens).loss
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
            wait_for_kernels()
            seconds.append(time.perf_counter() - begin)
        store.wait()
        return {
            "numel": sum(p.numel() for p in model.parameters()),
            "losses": losses,
            "trained": all(map(math.isfinite, losses)),
            "setup_seconds": ready,
            "step_seconds": seconds,
            "planned_bytes": {tier: plan.total(tier) for tier in ("device", "host", "nvme")},
            "peak_device_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
            "peak_rss_bytes": peak_rss_bytes(os.getpid()),
        }


def run(arguments: Any, facts: dict[str, Any]) -> int:
    """Every candidate that was asked for, one after another. FILE is written after each."""
    begun, rows, tiny = time.monotonic(), list[dict[str, Any]](), arguments.tiny
    file = arguments.json.with_name(f"{arguments.json.stem}_largest.json")
    for name in arguments.largest or CANDIDATES:
        layers, layout = CANDIDATES[name]
        hardware = machine(arguments.nvme_gib, arguments.host_gib, tiny)
        layers = most_layers(layout, hardware, tiny) if layers is None or tiny else layers
        left = arguments.seconds - (time.monotonic() - begun)
        row: dict[str, Any] = {"name": name, "layout": layout, "layers": layers, "hardware": hardware}
        if not layers or left < 30:
            row["missing"] = "nothing fits" if not layers else "no time was left"
        else:
            print(f"{name}: {layers} layers, {layout}", flush=True)
            options = {"layers": layers, "layout": layout, "hardware": hardware, "tiny": tiny}
            row |= _child(options | {"folder": arguments.folder}, left)
        rows.append(row)
        file.write_text(json.dumps(facts | {"rows": rows}, indent=1) + "\n")
    print(facts, table(rows), sep="\n\n")
    return 0


def _child(options: dict[str, Any], seconds: float) -> dict[str, Any]:
    """What a process of its own says, or why it says nothing."""
    command = [sys.executable, "-m", "tests.benchmarks.gpu_largest", json.dumps(options)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    root = Path(__file__).parents[2]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment, cwd=root)
    except subprocess.TimeoutExpired:
        return {"missing": f"not done after {seconds:.0f} s"}
    if done.returncode:
        return {"missing": f"exit {done.returncode}: {done.stderr.strip()[-600:]}"}
    return json.loads(done.stdout.splitlines()[-1])


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| | states | parameters, B | three steps | setup, s; steps, s | planned: HBM, host, nvme, GB | peaks, GB |",
        "|---" * 7 + "|",
    ]
    for row in rows:
        if "missing" in row:
            reason = row["missing"].splitlines()[-1] if row["missing"] else ""
            lines.append(f"| {row['name']} | {row['layout']} | {row['layers']} layers | **no**: {reason} | | | |")
            continue
        cells = [
            *(row["name"], row["layout"], f"{row['numel'] / 1e9:.2f}", "yes" if row["trained"] else "**not finite**"),
            f"{row['setup_seconds']:.0f}; " + ", ".join(f"{seconds:.1f}" for seconds in row["step_seconds"]),
            ", ".join(f"{nbytes / 1e9:.1f}" for nbytes in row["planned_bytes"].values()),
            f"{row['peak_device_bytes'] / 1e9:.1f}, {row['peak_rss_bytes'] / 1e9:.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(json.dumps(train(json.loads(sys.argv[1]))))
