"""zero-core's step against its floor and against FSDP2; ratios taken alternately in one run.

    python -m tests.benchmarks.test_core [--json FILE] [--dtype bfloat16 float32] [--micro-batch 2 8] [--rounds 7]
                                          [--only one-rank two-ranks]

Floor: forward and backward alone in that dtype, plus one fused AdamW pass over fp32 tensors of the same sizes. A CPU
without bf16 arithmetic spends nearly all of a bf16 step in its matrix products, which hides what a library adds: there
the fp32 rows say more. Under pytest a tiny model runs once, to keep the program alive; nothing is asserted about time.
"""

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_core
from tests.benchmarks.intervals import interval_of_median
from zero_core.testing import RankPool

LLAMA_120M = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
TINY = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
_runs: dict[str, Callable[[], float]] = {}  # in a rank: what is measured there


def build(shape: dict[str, int], dtype: torch.dtype) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=8192 if shape is LLAMA_120M else 128, **shape)
    return LlamaForCausalLM(config).to(dtype)


def batch(shape: dict[str, int], rows: int) -> torch.Tensor:
    return torch.randint(0, 128, (rows, 256 if shape["hidden_size"] > 100 else 8))


def timed(step: Callable[[], Any]) -> Callable[[], float]:
    def run() -> float:
        start = time.perf_counter()
        step()
        return time.perf_counter() - start

    return run


def floor_step(shape: dict[str, int], rows: int, dtype: torch.dtype) -> Callable[[], float]:
    model = build(shape, dtype)
    parameters = list(model.parameters())
    masters = [nn.Parameter(torch.zeros(p.shape)) for p in parameters]
    for master in masters:
        master.grad = torch.zeros_like(master)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=True)
    tokens = batch(shape, rows)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        for p in parameters:
            p.grad = None
        optimizer.step()

    return timed(step)


def our_step(shape: dict[str, int], rows: int, dtype: torch.dtype) -> Callable[[], float]:
    model = build(shape, torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    optimizer = zero_core.shard(model, inner, stage=3, param_dtype=dtype, max_grad_norm=1.0)
    tokens = batch(shape, rows)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def fsdp_step(shape: dict[str, int], rows: int, dtype: torch.dtype) -> Callable[[], float]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model = build(shape, torch.float32)
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
    for block in model.model.layers:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = batch(shape, rows)

    def step() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return timed(step)


def alternate(steps: dict[str, Callable[[], float]], rounds: int) -> dict[str, Any]:
    """Each in turn, `rounds` times after two for warmth: medians, median ratio of neighbours with its 95 % interval."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(rounds + 2):
        for name, step in steps.items():
            times[name].append(step())
    kept = {name: values[2:] for name, values in times.items()}
    first, second = list(kept)
    ratios = [b / a for a, b in zip(kept[first], kept[second], strict=True)]
    medians = {f"{name}_seconds": statistics.median(values) for name, values in kept.items()}
    low, high = interval_of_median(ratios)
    return {**medians, "ratio": statistics.median(ratios), "ratio_low": low, "ratio_high": high, "pairs": rounds}


def one_rank(shape: dict[str, int], rows: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    steps = {"floor": floor_step(shape, rows, dtype), "zero_core": our_step(shape, rows, dtype)}
    return alternate(steps, rounds)


def start_in_rank(kind: str, shape_name: str, rows: int, dtype: torch.dtype) -> None:
    zero_core.keep_freed_memory()
    make = {"fsdp2": fsdp_step, "zero_core": our_step}[kind]
    _runs[kind] = make(globals()[shape_name], rows, dtype)


def run_in_rank(kind: str) -> tuple[float, float]:
    """(seconds of one step, peak RSS of this process in GB)."""
    seconds = _runs[kind]()
    return seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def two_ranks(shape_name: str, rows: int, rounds: int, dtype: torch.dtype) -> dict[str, Any]:
    """FSDP2 and zero-core, two gloo ranks of one thread each, each library in processes of its own."""
    pools = {kind: RankPool(2) for kind in ("fsdp2", "zero_core")}
    peaks = dict.fromkeys(pools, 0.0)

    def step_of(kind: str) -> Callable[[], float]:
        def step() -> float:
            found = pools[kind].run(run_in_rank, kind)
            peaks[kind] = max(peaks[kind], *(peak for _, peak in found))
            return max(seconds for seconds, _ in found)

        return step

    try:
        for kind, pool in pools.items():
            pool.run(start_in_rank, kind, shape_name, rows, dtype)
        report = alternate({kind: step_of(kind) for kind in pools}, rounds)
    finally:
        for pool in pools.values():
            pool.close()
    return {**report, **{f"{kind}_peak_gb": peak for kind, peak in peaks.items()}}


def processor() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as lines:
        return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "unknown")


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", type=Path)
    options.add_argument("--dtype", nargs="+", default=["bfloat16", "float32"], choices=["bfloat16", "float32"])
    options.add_argument("--micro-batch", type=int, nargs="+", default=[2, 8])
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--only", nargs="+", default=["one-rank", "two-ranks"], choices=["one-rank", "two-ranks"])
    chosen = options.parse_args()
    zero_core.keep_freed_memory()
    report: dict[str, Any] = {
        "machine": processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
    }
    for name in chosen.dtype:
        dtype = getattr(torch, name)
        if "one-rank" in chosen.only:
            for rows in chosen.micro_batch:
                found = one_rank(LLAMA_120M, rows, chosen.rounds, dtype)
                report[f"{name}, one rank, stage 3, micro-batch {rows}, against the floor"] = found
        if "two-ranks" in chosen.only:
            found = two_ranks("LLAMA_120M", 1, chosen.rounds, dtype)
            report[f"{name}, two ranks, micro-batch 1, against FSDP2"] = found
    text = json.dumps(report, indent=2)
    print(text)
    if chosen.json is not None:
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(text)


def test_the_program_measures():
    report = one_rank(TINY, 1, 1, torch.bfloat16)
    assert set(report) == {"floor_seconds", "zero_core_seconds", "ratio", "ratio_low", "ratio_high", "pairs"}


def test_the_interval_of_a_median_leaves_out_only_what_it_may():
    assert interval_of_median([3.0, 1.0, 2.0]) == (1.0, 3.0)
    assert interval_of_median([float(k) for k in range(8)]) == (0.0, 7.0)  # 2 / 256 outside
    assert interval_of_median([float(k) for k in range(9)]) == (1.0, 7.0)  # 20 / 512 outside


if __name__ == "__main__":
    main()
