"""AdamW on the CPU against the memory's limit and against its peers: ``nox -s bench -- optim``, or run this file.

Paired rounds in one process: every round runs each contestant once, in an order that alternates, over the same buffers,
which were written before. Reported are medians of the ratios within a round, with a 95 % interval of the median (order
statistics). The roofline moves the same streams through the same threads, with the same cuts and prefetches, and does
no arithmetic. The wheel does not have its kernels: install with ``ZERO_OPTIM_ROOFLINE=ON`` in the environment.

DeepSpeed is wanted and not required; the program prints what was missing. To have it:
``pip install --no-deps --target FOLDER deepspeed==0.19.8 py-cpuinfo hjson einops msgpack ninja psutil pydantic
pydantic_core annotated-types typing-inspection tqdm packaging``, then ``--site FOLDER`` with ``DS_ACCELERATOR=cpu`` and
``DS_SKIP_CUDA_CHECK=1`` in the environment (it compiles its kernel at first use).
"""

import argparse
import datetime
import json
import mmap
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import zero_optim_cpu
from tests.benchmarks.gpu.facts import line_of
from tests.benchmarks.intervals import interval_of_median
from tests.tables import markdown
from tests.unit.zero_optim_cpu.tiles import Segment, Tile
from zero_optim_cpu import CpuStep, _native, available_isas
from zero_optim_cpu.kernels import Kernels

HAS_ROOFLINE = hasattr(_native.Batch, "run_roofline")
HUGE = 2 << 20  # bytes of a huge page
SETTLE_SECONDS = 0.02  # OpenMP's threads spin this long after their work, on the core that the next contestant wants
Run = Callable[[], Any]


# Bytes a parameter that a step moves (parameter and states read and written, gradient read), and what is wanted of the
# layout: its share of the roofline, and its speed over DeepSpeed's.
AIMS = {
    "fp32": (28, 0.97, 1.03),
    "split": (26, 0.97, 1.07),
    "split_bf16m": (22, 0.95, 1.2),
    "split_8bit": (14, 0.8, 1.4),
}
OVER_FLOW, OVER_FUSED, OF_AVX512, OVER_DEEPSPEED_SMALL = 1.3, 1.0, 0.9, 3.0
SMALL = "1,000 x 10,000"


@dataclass
class Row:
    """One line of the table: seconds of ours, and per round the ratios, all of them better when larger."""

    name: str
    seconds: list[float]
    ratios: dict[str, list[float]]
    aims: dict[str, float]


class Memory:
    """Buffers by name and dtype, each made and written once: every contestant that asks for one gets the same."""

    def __init__(self, numel: int, huge: bool) -> None:
        """Parameters and gradients are ordinary numbers: a denormal or a NaN costs arithmetic that training has not."""
        self._numel, self._huge = numel, huge
        self._made: dict[tuple[str, torch.dtype], Tensor] = {}
        generator = torch.Generator().manual_seed(0)
        for dtype in (torch.float32, torch.bfloat16):
            parts = (self.get(name, dtype).split(1 << 20) for name in ("parameter", "gradient"))
            for parameter, gradient in zip(*parts, strict=True):
                parameter.copy_(torch.randn(parameter.numel(), generator=generator))
                gradient.copy_(parameter.flip(0) * 1e-3)

    def get(self, name: str, dtype: torch.dtype, numel: int | None = None) -> Tensor:
        key = (name, dtype)
        if key not in self._made:
            nbytes = (numel or self._numel) * dtype.itemsize
            raw = mmap.mmap(-1, nbytes + 2 * HUGE)
            raw.madvise(mmap.MADV_HUGEPAGE if self._huge else mmap.MADV_NOHUGEPAGE)
            whole = torch.frombuffer(raw, dtype=torch.uint8)
            start = -whole.data_ptr() % HUGE
            self._made[key] = whole[start : start + nbytes].zero_().view(dtype)
        return self._made[key]


def paired(contestants: dict[str, Run], rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant in each round; the order is reversed every other round. One round is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        names = list(contestants)[:: -1 if number % 2 else 1]
        for name in names:
            time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            contestants[name]()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def row_of(name: str, contestants: dict[str, Run], rounds: int, aims: dict[str, float]) -> Row:
    """Times of the others over ours; for "avx2", ours over its: its share of the widest set's speed."""
    seconds = paired(contestants, rounds)
    ours = seconds.pop("ours")
    ratios = {other: [b / a for a, b in zip(ours, times, strict=True)] for other, times in seconds.items()}
    if "avx2" in ratios:
        ratios["avx2"] = [1 / ratio for ratio in ratios["avx2"]]
    return Row(name, ours, ratios, {other: aims[other] for other in ratios if other in aims})


def kernel(memory: Memory, layout: str, threads: int, isa: str | None = None) -> tuple[Run, Run]:
    """The update of one tile, and its roofline over the same buffers."""
    step = CpuStep(layout, threads=threads, isa=isa)
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=1e-5)
    step.bind(optimizer)
    dtype = torch.float32 if layout == "fp32" else torch.bfloat16
    tile = Tile(memory.get("parameter", dtype), memory.get("gradient", dtype))
    numel = tile.parameter.numel()
    for f in step.layout(numel, dtype):
        tile.states[f.name] = memory.get(f.name, f.dtype, f.numel)
    segments = [Segment(0, numel, dict(optimizer.param_groups[0]), 7)]
    batch, pool = step._batch(tile, segments), step._kernels.pool

    def roofline(buffers: Tile = tile) -> None:  # the batch holds addresses only
        batch.run_roofline(pool)

    return lambda: step.update(tile, segments, 0.9), roofline


def over(optimizer: torch.optim.Optimizer, states: list[tuple[Tensor, Tensor]], step: Any) -> torch.optim.Optimizer:
    """Let an optimizer of any of the libraries use these moments, which have the parameters' shapes."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for p, (m, v) in zip(params, states, strict=True):
        optimizer.state[p].update({"step": step(), "exp_avg": m, "exp_avg_sq": v})
    return optimizer


def large_peers(memory: Memory, deepspeed: Any) -> dict[str, Run]:
    """The fp32 steps of the peers, and DeepSpeed's whole flow: unscale, step, cast to bf16."""
    p = torch.nn.Parameter(memory.get("parameter", torch.float32))
    p.grad = memory.get("gradient", torch.float32)
    states = [(memory.get("exp_avg", torch.float32), memory.get("exp_avg_sq", torch.float32))]
    fused = over(torch.optim.AdamW([p], lr=1e-5, fused=True), states, lambda: torch.tensor(0.0))
    peers: dict[str, Run] = {"torch fused": fused.step}
    if deepspeed is not None:
        theirs = over(deepspeed([p], lr=1e-5, adamw_mode=True), states, lambda: 0)
        low = memory.get("parameter", torch.bfloat16)

        def flow() -> None:
            p.grad.mul_(0.999)
            theirs.step()
            low.copy_(p.data)

        peers |= {"deepspeed": theirs.step, "deepspeed flow": flow}
    return peers


def large(memory: Memory, threads: int, rounds: int, deepspeed: Any) -> list[Row]:
    """Each layout against its roofline, AVX2, torch fused and DeepSpeed's fp32 step."""
    peers = large_peers(memory, deepspeed)
    rows = []
    for layout, (_, of_roofline, over_deepspeed) in AIMS.items():
        ours, roofline = kernel(memory, layout, threads)
        contestants: dict[str, Run] = {"ours": ours} | ({"roofline": roofline} if HAS_ROOFLINE else {})
        aims = {"roofline": of_roofline, "avx2": OF_AVX512, "torch fused": OVER_FUSED}
        aims |= {"deepspeed": over_deepspeed, "deepspeed flow": OVER_FLOW}
        if "avx512" in available_isas():
            contestants["avx2"] = kernel(memory, layout, threads, "avx2")[0]
        wanted = {"fp32": ("torch fused", "deepspeed"), "split": ("deepspeed", "deepspeed flow")}
        for name in wanted.get(layout, ("deepspeed",)):
            if name in peers:
                contestants[name] = peers[name]
        rows.append(row_of(layout, contestants, rounds, aims))
    return rows


def small(threads: int, rounds: int, deepspeed: Any) -> Row:
    """A thousand fp32 tensors of ten thousand elements, through the optimizer classes; one set of tensors for all."""
    generator = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(10_000, generator=generator)) for _ in range(1000)]
    for p in params:
        p.grad = torch.randn(10_000, generator=generator) * 1e-3
    states = [(torch.zeros(10_000), torch.zeros(10_000)) for _ in params]
    ours = over(zero_optim_cpu.AdamW(params, lr=1e-5, threads=threads), states, lambda: 0)
    fused = over(torch.optim.AdamW(params, lr=1e-5, fused=True), states, lambda: torch.tensor(0.0))
    batch, pool = ours._prepare()[0].batch, ours._kernels.pool
    contestants: dict[str, Run] = {"ours": ours.step, "torch fused": fused.step}
    if HAS_ROOFLINE:
        contestants["roofline"] = lambda: batch.run_roofline(pool)  # of the same tensors, and without Python
    if deepspeed is not None:
        contestants["deepspeed"] = over(deepspeed(params, lr=1e-5, adamw_mode=True), states, lambda: 0).step
    return row_of(SMALL, contestants, rounds, {"deepspeed": OVER_DEEPSPEED_SMALL, "torch fused": OVER_FUSED})


def deepspeed_adam() -> tuple[Any, str]:
    """The class, or None and why: it is compiled at its first use, which may not work here."""
    try:
        import deepspeed
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        DeepSpeedCPUAdam([torch.nn.Parameter(torch.zeros(8))])
    except Exception as error:
        return None, f"DeepSpeedCPUAdam ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"
    return DeepSpeedCPUAdam, f"deepspeed {deepspeed.__version__}"


def memory_probe(memory: Memory) -> tuple[float, float]:
    """GB/s of the fp32 roofline on two threads, and that over one thread's: which regime a shared machine is in."""
    one, two = (kernel(memory, "fp32", threads)[1] for threads in (1, 2))
    seconds = paired({"one": one, "two": two}, 5)
    nbytes = AIMS["fp32"][0] * memory.get("parameter", torch.float32).numel()
    return nbytes / statistics.median(seconds["two"]) / 1e9, statistics.median(
        a / b for a, b in zip(seconds["one"], seconds["two"], strict=True)
    )


def cell(row: Row, other: str) -> str:
    if other not in row.ratios:
        return ""
    middle, (low, high) = statistics.median(row.ratios[other]), interval_of_median(row.ratios[other])
    text = f"{middle:.3f} ({low:.3f}-{high:.3f})"
    if other in row.aims:
        text += f", {'met' if middle >= row.aims[other] else '**missed**'}: {row.aims[other]}"
    return text


def report(rows: list[Row], header: str, numel: int) -> str:
    """Markdown. Each cell: median (95 % interval), whether the aim is met: the aim."""
    columns = {"roofline": "of its roofline", "deepspeed": "x DeepSpeed fp32", "deepspeed flow": "x DeepSpeed flow"}
    columns |= {"torch fused": "x torch fused fp32", "avx2": "AVX2 of AVX-512"}
    for row in rows:
        if row.name == SMALL and {"deepspeed", "roofline"} <= row.ratios.keys():
            pairs = zip(row.ratios["deepspeed"], row.ratios["roofline"], strict=True)
            header += f"; memory allows {statistics.median(a / b for a, b in pairs):.2f} x DeepSpeed over {SMALL}"
    cells = []
    for row in rows:
        median = statistics.median(row.seconds)
        rate = f"{AIMS[row.name][0] * numel / median / 1e9:.1f}" if row.name in AIMS else ""
        cells.append([row.name, f"{median * 1e3:.2f}", rate, *(cell(row, other) for other in columns)])
    return f"{header}\n\n{markdown(('AdamW', 'ms', 'GB/s', *columns.values()), cells)}"


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pages", choices=("huge", "small"), default="huge", help="huge: as zero-offload's arena")
    parser.add_argument("--site", type=Path, default=None, help="folder that has DeepSpeed")
    parser.add_argument("--json", type=Path, default=None, help="where to save all seconds and ratios")
    chosen = parser.parse_args(arguments)
    if chosen.site is not None:
        sys.path.append(str(chosen.site))
    torch.set_num_threads(chosen.threads)
    deepspeed, peer = deepspeed_adam()
    memory = Memory(chosen.numel, chosen.pages == "huge")
    moved = "no roofline: built without ZERO_OPTIM_ROOFLINE=ON"
    rate, probe = memory_probe(memory) if HAS_ROOFLINE else (None, None)
    if HAS_ROOFLINE:
        moved = f"two threads move {rate:.1f} GB/s, {probe:.2f} x what one does"
    rows = [*large(memory, chosen.threads, chosen.rounds, deepspeed), small(chosen.threads, chosen.rounds, deepspeed)]
    header = f"{line_of('/proc/cpuinfo', 'model name')}, {Kernels().threads} cores, torch {torch.__version__}, "
    header += (
        f"{datetime.date.today()}, {peer if deepspeed else 'peers missing: ' + peer}; {chosen.numel:,} parameters, "
    )
    header += f"{chosen.pages} pages, {chosen.threads} threads, {chosen.rounds} rounds; {moved}"
    print(report(rows, header, chosen.numel))
    if chosen.json is not None:
        results = {row.name: {"seconds": row.seconds, "ratios": row.ratios, "aims": row.aims} for row in rows}
        saved = {"header": header, "gigabytes_per_second": rate, "probe": probe, "results": results}
        chosen.json.write_text(json.dumps(saved, indent=1))


def test_the_program_runs_and_saves(tmp_path: Path, capsys: Any) -> None:
    """A small run of all of it. Ratios are for a quiet machine and are not asserted."""
    threads = torch.get_num_threads()
    try:
        main(["--numel", "100000", "--rounds", "2", "--json", str(tmp_path / "optim.json")])
    finally:
        torch.set_num_threads(threads)
    table = capsys.readouterr().out
    saved = json.loads((tmp_path / "optim.json").read_text())
    assert set(saved["results"]) == {*AIMS, SMALL}
    assert all(f"| {name} |" in table for name in saved["results"])


if __name__ == "__main__":
    main()
