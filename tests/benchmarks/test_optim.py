"""AdamW on the CPU against the memory's limit and against its peers: ``nox -s bench -- optim``, or run this file.

Paired rounds in one process: every round runs each contestant once, in an order that alternates, over buffers that were
written before. Reported are medians of the ratios within a round, with a 95 % interval of the median (order
statistics). The roofline moves the same streams through the same threads and does no arithmetic.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_optim_cpu
from zero_optim_cpu import CpuStep, available_isas
from zero_optim_cpu.engine import Engine

# layout, bytes a parameter that one step reads and writes (parameter and states twice, a bf16 gradient once; fp32's
# gradient is fp32), share of the roofline and speed against DeepSpeed that are aimed at.
LAYOUTS = {
    "fp32": (28, 0.97, 1.03),
    "split": (26, 0.97, 1.07),
    "split_bf16m": (22, 0.95, 1.2),
    "split_8bit": (14, 0.8, 1.4),
}


@dataclass
class Tile:
    parameter: Tensor
    gradient: Tensor
    states: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    start: int
    stop: int
    options: dict[str, Any]
    step: int


@dataclass
class Row:
    """One line of the table: `seconds` of the contestant, ratios of other / contestant in each round."""

    name: str
    seconds: list[float]
    against: dict[str, list[float]]
    aims: dict[str, float]


def interval(values: list[float]) -> tuple[float, float, float]:
    """Median, and the order statistics that hold it with 95 % probability."""
    ordered = sorted(values)
    n = len(ordered)
    reach = int(0.98 * n**0.5) + 1
    return statistics.median(ordered), ordered[max(0, n // 2 - reach)], ordered[min(n - 1, n // 2 + reach)]


def paired(contestants: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; the order is reversed every other round. One round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        names = list(contestants)[:: -1 if number % 2 else 1]
        for name in names:
            start = time.perf_counter()
            contestants[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def options() -> dict[str, Any]:
    return dict(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-5).param_groups[0])


def tile_of(step: CpuStep, layout: str, numel: int) -> Tile:
    dtype = torch.float32 if layout == "fp32" else torch.bfloat16
    tile = Tile(torch.zeros(numel, dtype=dtype), torch.full((numel,), 1e-3, dtype=dtype))
    for f in step.layout(numel, dtype):
        tile.states[f.name] = torch.zeros(f.numel, dtype=f.dtype)
    step.initialise(tile, torch.full((numel,), 0.5))
    return tile


def kernel(
    layout: str, numel: int, threads: int, isa: str | None = None
) -> tuple[Callable[[], None], Callable[[], None]]:
    """The update of one tile, and its roofline over the same buffers."""
    step = CpuStep(layout, threads=threads, isa=isa)
    step.bind(torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))]))
    tile = tile_of(step, layout, numel)
    segments = [Segment(0, numel, options(), 7)]
    batch, engine = step._batch(tile, segments), step._engine

    def roofline(buffers: Tile = tile) -> None:  # the batch holds addresses only
        batch.run(engine.pool, 1.0, True)

    return lambda: step.update(tile, segments, 0.9), roofline


def fused_torch(numel: int) -> Callable[[], None]:
    p = torch.nn.Parameter(torch.full((numel,), 0.5))
    p.grad = torch.full((numel,), 1e-3)
    optimizer = torch.optim.AdamW([p], lr=1e-5, fused=True)
    return lambda: optimizer.step()


def deepspeed_adam() -> Any:
    """The class, or None: it is compiled at its first use, which may not work here."""
    try:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:
        sys.stderr.write(f"DeepSpeedCPUAdam is left out: {type(error).__name__}: {error}\n")
        return None
    return DeepSpeedCPUAdam


def deepspeed_steps(cls: Any, numel: int) -> dict[str, Callable[[], None]]:
    """Its fp32 step, and its whole flow: unscale a bf16 gradient into fp32, step, cast to bf16."""
    p = torch.nn.Parameter(torch.full((numel,), 0.5))
    p.grad = torch.full((numel,), 1e-3)
    optimizer = cls([p], lr=1e-5, adamw_mode=True)
    low, low_gradient = torch.zeros(numel, dtype=torch.bfloat16), torch.full((numel,), 1e-3, dtype=torch.bfloat16)

    def flow() -> None:
        p.grad.copy_(low_gradient)
        p.grad.mul_(0.9)
        optimizer.step()
        low.copy_(p.data)

    return {"deepspeed": lambda: optimizer.step(), "deepspeed flow": flow}


def memory_probe(numel: int) -> float:
    """Bandwidth of two threads over that of one: this says which regime a shared machine is in."""
    one, two = kernel("fp32", numel // 4, 1)[1], kernel("fp32", numel // 4, 2)[1]
    seconds = paired({"one": one, "two": two}, 5)
    return statistics.median(a / b for a, b in zip(seconds["one"], seconds["two"], strict=True))


def large(numel: int, threads: int, rounds: int, deepspeed: Any) -> list[Row]:
    """One tile of `numel`: each layout against its roofline, AVX2, torch fused and DeepSpeed."""
    torch.set_num_threads(threads)
    rows = []
    for layout, (_, share, speed) in LAYOUTS.items():
        ours, roofline = kernel(layout, numel, threads)
        contestants = {"ours": ours, "roofline": roofline}
        aims = {"roofline": share, "deepspeed": speed}
        if "avx512" in available_isas():
            contestants["avx2"] = kernel(layout, numel, threads, "avx2")[0]
            aims["avx2"] = 0.0
        if layout == "fp32":
            contestants["torch fused"] = fused_torch(numel)
            aims["torch fused"] = 1.0
        if deepspeed is not None:
            peers = deepspeed_steps(deepspeed, numel)
            contestants["deepspeed"] = peers["deepspeed"]
            if layout == "split":
                contestants["deepspeed flow"] = peers["deepspeed flow"]
                aims["deepspeed flow"] = 1.3
        rows.append(row_of(layout, contestants, rounds, aims))
    return rows


def small(threads: int, rounds: int, deepspeed: Any) -> Row:
    """A thousand tensors of ten thousand elements, through the optimizer class."""

    def params() -> list[torch.nn.Parameter]:
        result = [torch.nn.Parameter(torch.full((10_000,), 0.5)) for _ in range(1000)]
        for p in result:
            p.grad = torch.full_like(p, 1e-3)
        return result

    optimizer = zero_optim_cpu.AdamW(params(), lr=1e-5, threads=threads)
    fused = torch.optim.AdamW(params(), lr=1e-5, fused=True)
    contestants: dict[str, Callable[[], None]] = {"ours": lambda: optimizer.step(), "torch fused": lambda: fused.step()}
    if deepspeed is not None:
        peer = deepspeed(params(), lr=1e-5, adamw_mode=True)
        contestants["deepspeed"] = lambda: peer.step()
    return row_of("1,000 x 10,000", contestants, rounds, {"deepspeed": 3.0, "torch fused": 1.0})


def row_of(name: str, contestants: dict[str, Callable[[], None]], rounds: int, aims: dict[str, float]) -> Row:
    seconds = paired(contestants, rounds)
    ours = seconds.pop("ours")
    against = {other: [b / a for a, b in zip(ours, times, strict=True)] for other, times in seconds.items()}
    return Row(name, ours, against, aims)


def report(rows: list[Row], header: str, numel: int) -> str:
    lines = [
        header,
        "",
        "| AdamW | ms | GB/s | time of the other / ours: median (95 % interval), aim |",
        "|---|---|---|---|",
    ]
    for row in rows:
        median = statistics.median(row.seconds)
        rate = f"{LAYOUTS[row.name][0] * numel / median / 1e9:.1f}" if row.name in LAYOUTS else ""
        cells = []
        for other, ratios in row.against.items():
            middle, low, high = interval(ratios)
            aim = row.aims.get(other, 0.0)
            cells.append(f"{other} {middle:.3f} ({low:.3f}-{high:.3f})" + (f", aim {aim}" if aim else ""))
        lines.append(f"| {row.name} | {median * 1e3:.2f} | {rate} | {'; '.join(cells)} |")
    return "\n".join(lines)


def machine() -> str:
    model = platform.processor() or platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    return f"{model}, {Engine().threads} cores, torch {torch.__version__}, {datetime.date.today().isoformat()}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", type=Path, default=None, help="where to save all seconds and ratios")
    chosen = parser.parse_args(arguments)
    deepspeed = deepspeed_adam()
    probe = memory_probe(chosen.numel)
    rows = large(chosen.numel, chosen.threads, chosen.rounds, deepspeed)
    rows.append(small(chosen.threads, chosen.rounds, deepspeed))
    header = f"{machine()}; {chosen.numel:,} parameters, {chosen.threads} threads, {chosen.rounds} rounds; "
    header += f"two threads move {probe:.2f} x what one does"
    print(report(rows, header, chosen.numel))
    if chosen.json is not None:
        results = {row.name: {"seconds": row.seconds, "ratios": row.against, "aims": row.aims} for row in rows}
        chosen.json.write_text(json.dumps({"header": header, "probe": probe, "results": results}, indent=1))


def test_the_program_runs_and_saves(tmp_path: Path, capsys: Any) -> None:
    """A small run of all of it. Ratios are for a quiet machine and are not asserted."""
    main(["--numel", "100000", "--rounds", "2", "--json", str(tmp_path / "optim.json")])
    table = capsys.readouterr().out
    saved = json.loads((tmp_path / "optim.json").read_text())
    assert set(saved["results"]) == {*LAYOUTS, "1,000 x 10,000"}
    assert all(f"| {name} |" in table for name in saved["results"])


if __name__ == "__main__":
    main()
