"""A step on one GPU: everything in its memory, everything on the host, and what others make of the host.

    nox -s bench-gpu -- [--json FILE] [--rounds 4] [--seconds 570] [--others none fsdp2-host …] [--trace FILE]
    nox -s bench-gpu -- --largest [NAME …]          the largest models that train: gpu_largest.py

WRITTEN FOR CUDA AND NOT YET RUN ON A GPU: only the tiny sizes have run, on a CPU (`--tiny`). bf16, activation
checkpointing, exact fp32 states, clipping 1.0. Needs no network: torch with CUDA, a C++ compiler for zero-optim-cpu,
transformers. DeepSpeed (with ninja and nvcc, for its CPUAdam) is left out, with the reason, where it cannot be imported
or started.

Each configuration is a process (step_worker.py) that takes turns of one untimed and two timed steps with the others, at
8 Ki tokens and at 32 Ki, so that all see the same minutes. A peer whose host memory does not fit beside ours has its
turns after the others have gone; its row says so. FILE is written after every round, and no round begins that may not
end in time. Claims (BOUNDS) are of tokens per second: ours over the other's.

exposed: the step less forward and backward alone (`floor`, another process), against the planner's, which is given the
figures of a probe and the TFLOP/s of that floor.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import gpu_largest, step_worker, trace
from tests.benchmarks.intervals import interval_of_median
from tests.benchmarks.test_step import Worker

LLAMA_3B = {"hidden_size": 2560, "intermediate_size": 8960, "num_hidden_layers": 32, "num_attention_heads": 20}
LENGTH = 2048
ROWS = {8192: 4, 32768: 16}  # rows of a step, by its tokens
BOUNDS = {  # least tokens/s of ours over the other's, by tokens of a step
    "none": {8192: 0.6, 32768: 0.90},
    "fsdp2-host": {8192: 2.0, 32768: 2.0},
    "deepspeed-host": {8192: 1.5, 32768: 1.5},
    "deepspeed-super-host": {},
}
OURS = ("host", "none", "floor")
HOST_BYTES = {"host": 16, "fsdp2-host": 20, "deepspeed-host": 22, "deepspeed-super-host": 26}  # a parameter, about
SPARE_BYTES = 12 << 30  # of interpreters, libraries and what the estimates above leave out
TURN = 2  # timed steps
LONGEST_ANSWER = 240  # seconds: to be built, or of a turn
PREDICTION = 0.2
Turn = dict[str, Any]


@dataclass
class Found:
    """What has been measured so far: turns by name and tokens, in order, and what does not depend on a round."""

    turns: dict[str, dict[int, list[Turn]]] = field(default_factory=dict)
    apart: list[str] = field(default_factory=list)  # peers that had their turns after ours
    missing: dict[str, str] = field(default_factory=dict)
    probe: dict[str, Any] = field(default_factory=dict)
    trace: dict[str, Any] = field(default_factory=dict)

    def add(self, name: str, tokens: int, turn: Turn) -> None:
        self.turns.setdefault(name, {}).setdefault(tokens, []).append(turn)

    def median(self, name: str, tokens: int, key: str = "seconds") -> float | None:
        values = [turn.get(key, 0.0) for turn in self.turns.get(name, {}).get(tokens, [])]
        return statistics.median(values) if values else None


def groups(others: list[str], numel: int, available: int) -> list[list[str]]:
    """Who takes turns with whom: ours, and each peer beside it as far as host memory goes, the rest one by one."""
    first, last = list(OURS), list[list[str]]()
    room = available - SPARE_BYTES - numel * HOST_BYTES["host"]
    for name in others:
        if name in OURS:
            continue
        if numel * HOST_BYTES[name] <= room:
            first.append(name)
            room -= numel * HOST_BYTES[name]
        else:
            last.append([name])
    return [[name for name in first if name not in OURS[1:2] or "none" in others], *last]


def run(
    found: Found,
    names: list[str],
    options: dict[str, Any],
    rows: dict[int, int],
    rounds: int,
    until: float,
    save: Callable[[], None],
    trace_file: Path | None = None,
) -> None:
    """Turns of one group. The first round is for the caches."""
    workers: list[Worker] = []
    begun = time.monotonic()
    try:
        workers = [Worker(each, options, limit_seconds=LONGEST_ANSWER) for each in names]
        for worker in workers:
            if reason := worker.ready().missing:
                found.missing[worker.name] = reason
                print(f"{worker.name} is left out: {reason}", flush=True)
        there = [worker for worker in workers if not worker.missing]
        print(f"  {', '.join(w.name for w in there)} after {time.monotonic() - begun:.0f} s", flush=True)
        for number in range(rounds + 1):
            begun = time.monotonic()
            for tokens, count in rows.items():
                for k in range(len(there)):
                    _turn(found, there[(k + number) % len(there)], tokens, count, keep=number > 0)
                there = [worker for worker in there if not worker.missing]
            save()
            lasted = time.monotonic() - begun
            print(f"  {number}/{rounds} in {lasted:.0f} s", flush=True)
            if time.monotonic() + 1.2 * lasted > until:
                print("  no time for another round", flush=True)
                break
        ours = next((worker for worker in there if worker.name == "host"), None)
        if trace_file is not None and ours is not None:
            ours.ask(f"trace {trace_file} {rows[min(rows)]}")
    finally:
        for worker in workers:
            worker.leave()
        for worker in workers:
            worker.close()


def _turn(found: Found, worker: Worker, tokens: int, rows: int, *, keep: bool) -> None:
    if worker.missing:
        return
    worker.turn(TURN, rows)
    answer = worker.answers[-1]
    if reason := answer.get("missing"):
        worker.missing = found.missing[worker.name] = f"at {tokens} tokens: {reason}"
        print(f"  {worker.name} is gone {worker.missing}", flush=True)
    elif keep:
        found.add(worker.name, tokens, answer)
    print(f"    {worker.name} {tokens}: {answer.get('seconds', float('nan')):.3f} s", flush=True)


def predicted(found: Found, tokens: int, options: dict[str, Any]) -> dict[str, float]:
    """The planner's step of `host`, its TFLOP/s those of the floor; empty where a figure is missing."""
    import zero_offload
    import zero_optim_cpu

    floor = found.median("floor", tokens)
    if not found.probe or floor is None:
        return {}
    model, batch = step_worker.model_of(options | {"device": "meta", "micro_batch": 1})
    sizes = zero_offload.ModelSizes.of(model, dtype=getattr(torch, options["dtype"]))
    real = tokens if not options.get("tiny") else ROWS[tokens] * batch.tokens.shape[1]
    step = zero_optim_cpu.CpuStep("split")
    step.bind(torch.optim.AdamW([torch.zeros(1)]))

    def planned(tflops: float) -> zero_offload.Plan:
        hardware = zero_offload.Hardware(**found.probe | {"tflops": tflops})
        return zero_offload.plan(
            sizes, hardware, **dict.fromkeys(step_worker.KINDS, "host"),
            activations="recompute" if options.get("checkpointing") else "keep", step=step, tokens=real,
            parameter_dtype=getattr(torch, options["dtype"]), prefetch_bytes=step_worker.PREFETCH_BYTES,
        )  # fmt: skip

    try:
        at_one = planned(1.0).prediction
        if at_one is None:
            return {}
        plan = planned(at_one.compute_seconds / floor)
    except zero_offload.PlanError as error:
        print(f"nothing is predicted: {error}", flush=True)
        return {}
    assert plan.prediction is not None
    return {
        "seconds": plan.prediction.step_seconds,
        "exposed_seconds": plan.prediction.exposed_seconds,
        "device_bytes": plan.total("device"),
        "host_bytes": plan.total("host"),
    }


def report(found: Found, tokens: list[int], options: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for each peer and number of tokens that both have been measured at."""
    rows = []
    for count in tokens:
        guess = predicted(found, count, options)
        for other in BOUNDS:
            ours, theirs = (found.turns.get(name, {}).get(count, []) for name in ("host", other))
            if not ours or not theirs:
                continue
            pairs = list(zip(ours, theirs, strict=False))
            if other in found.apart:
                middle = statistics.median(turn["seconds"] for turn in ours)
                ratios = [turn["seconds"] / middle for turn in theirs]
            else:
                ratios = [b["seconds"] / a["seconds"] for a, b in pairs]
            row = {
                "tokens": count,
                "other": other,
                "pairs": len(ratios),
                "apart": other in found.apart,
                "ratio": statistics.median(ratios),
                "interval": interval_of_median(ratios),
                "bound": BOUNDS[other].get(count),
                "floor_seconds": found.median("floor", count),
                "predicted": guess,
            }
            for name in ("host", other):
                for key in ("seconds", "peak_device_bytes", "peak_rss_bytes"):
                    row[f"{key}_{name}"] = found.median(name, count, key)
            if row["floor_seconds"] is not None:
                row["exposed_seconds"] = row["seconds_host"] - row["floor_seconds"]
            rows.append(row)
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| tokens a step | to | ours, tokens/s | theirs | ratio (95 %) | bound "
        "| peak HBM: ours, theirs, GB | peak host: ours, theirs, GB |",
        "|---" * 8 + "|",
    ]
    for each in rows:
        other, (low, high) = each["other"], each["interval"]
        rates = [each["tokens"] / each[f"seconds_{name}"] for name in ("host", other)]
        bound = "-"
        if each["bound"] is not None:
            bound = f"{each['bound']:.2f}: {'met' if high >= each['bound'] else '**missed**'}"
        cells = [
            *(str(each["tokens"]), other, *(f"{rate:.0f}" for rate in rates)),
            f"{each['ratio']:.2f} ({low:.2f}-{high:.2f}), {each['pairs']} {'apart' if each['apart'] else 'pairs'}",
            bound,
        ]
        for key in ("peak_device_bytes", "peak_rss_bytes"):
            cells.append(", ".join(f"{each[f'{key}_{name}'] / 1e9:.1f}" for name in ("host", other)))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def exposed_table(rows: list[dict[str, Any]]) -> str:
    """What the planner says of `host` beside what was measured, once for each number of tokens."""
    lines = [
        "| tokens a step | forward + backward, s | host, s | exposed, s | predicted, s | off by | HBM, planned, GB |",
        "|---" * 7 + "|",
    ]
    for each in {row["tokens"]: row for row in rows if row["predicted"] and "exposed_seconds" in row}.values():
        guess, exposed = each["predicted"], each["exposed_seconds"]
        off = guess["exposed_seconds"] / exposed - 1 if exposed > 0 else float("inf")
        verdict = "met" if abs(off) <= PREDICTION else "**missed**"
        cells = [
            *(str(each["tokens"]), f"{each['floor_seconds']:.3f}", f"{each['seconds_host']:.3f}", f"{exposed:.3f}"),
            *(f"{guess['exposed_seconds']:.3f}", f"{off:+.0%}, 20 %: {verdict}"),
            f"{each['peak_device_bytes_host'] / 1e9:.2f}, {guess['device_bytes'] / 1e9:.2f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def traced(file: Path, picture: Path) -> dict[str, Any]:
    """The overlap in a trace, and its picture; empty where there is none or nothing ran on a device."""
    if not file.exists():
        return {}
    lanes = trace.lanes(trace.read(file))
    if not lanes.kernels:
        return {}
    trace.draw(lanes, picture, "two steps with everything on the host")
    return trace.overlap(lanes) | {"file": str(file), "picture": str(picture)}


def probed(options: dict[str, Any]) -> dict[str, Any]:
    """The machine's figures, from a process that gives its memory back."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.test_gpu", "--probe", options["device"], options["dtype"]],
        capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )  # fmt: skip
    if done.returncode:
        print(f"the probe failed, so nothing is predicted: {done.stderr.strip()[-400:]}", flush=True)
        return {}
    return json.loads(done.stdout.splitlines()[-1])


def probe_here(device: str, dtype: str) -> None:
    import zero_offload
    import zero_optim_cpu

    step = zero_optim_cpu.CpuStep("split", cores=step_worker.beside_gpu({"device": device}))
    figures = zero_offload.probe(
        device=device, step=step, parameter_dtype=getattr(torch, dtype), hidden_size=2560 if device == "cuda" else 256
    )
    print(json.dumps(figures.to_dict()))


def test_the_report_has_its_shape(tmp_path, monkeypatch):
    """On the CPU, in small: the program, not the GPU."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # in processes of toy sizes, threads would wait for each other
    files = ["--folder", str(tmp_path), "--json", str(tmp_path / "gpu.json"), "--trace", str(tmp_path / "step.json")]
    code = main(["--tiny", "--rounds", "1", "--tokens", "8192", "--others", "none", "fsdp2-host", *files])
    saved = json.loads((tmp_path / "gpu.json").read_text())
    assert code == 0
    assert [(row["other"], row["tokens"]) for row in saved["rows"]] == [("none", 8192)]
    assert "needs a GPU" in saved["missing"]["fsdp2-host"]
    row = saved["rows"][0]
    assert row["ratio"] > 0 and row["peak_rss_bytes_host"] > 0 and row["predicted"]["seconds"] > 0
    assert (tmp_path / "step.json").exists()
    assert table(saved["rows"]).splitlines()[2].startswith("| 8192 | none | ")
    assert exposed_table(saved["rows"]).count("\n") == 2


def test_peers_take_turns_with_ours_as_far_as_memory_goes():
    others, numel = list(BOUNDS), 3 * 10**9
    everything = groups(others, numel, 1 << 40)
    assert everything == [["host", "none", "floor", "fsdp2-host", "deepspeed-host", "deepspeed-super-host"]]
    beside = groups(others, numel, 127 << 30)
    assert beside == [["host", "none", "floor", "fsdp2-host"], ["deepspeed-host"], ["deepspeed-super-host"]]
    assert groups(["deepspeed-host"], numel, 118 << 30) == [["host", "floor"], ["deepspeed-host"]]


def test_the_largest_models_of_a_tiny_machine_train(tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    folder, file = str(tmp_path), str(tmp_path / "g.json")
    code = main(["--tiny", "--largest", "exact", "8-bit", "--folder", folder, "--json", file])
    exact, small = json.loads((tmp_path / "g_largest.json").read_text())["rows"]
    assert code == 0
    assert exact["trained"] and small["trained"] and len(exact["losses"]) == 3
    assert small["numel"] > exact["numel"] > 0
    assert "| 8-bit | split_8bit | " in gpu_largest.table([exact, small])


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=Path("runs/bench_gpu.json"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=570, help="no round begins that may not end by then")
    parser.add_argument("--folder", default=".", help="where slabs lie")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(ROWS), choices=ROWS)
    parser.add_argument("--others", nargs="+", default=list(BOUNDS)[:3], choices=BOUNDS)
    parser.add_argument("--tile-numel", type=int, help="elements of a tile; left out: zero-offload's own")
    parser.add_argument("--trace", type=Path, default=Path("runs/bench_gpu_step.json.gz"))
    parser.add_argument("--largest", nargs="*", choices=gpu_largest.CANDIDATES, help="instead: the largest models")
    parser.add_argument("--nvme-gib", type=float, default=0.0, help="of --folder that the largest models may take")
    parser.add_argument("--host-gib", type=float, help="of memory; left out: MemAvailable, which in a VM may grow")
    parser.add_argument("--tiny", action="store_true", help="toy sizes on the CPU, to try the program")
    parser.add_argument("--probe", nargs=2, metavar=("DEVICE", "DTYPE"), help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(given: list[str] | None = None) -> int:
    begun, arguments = time.monotonic(), parsed(given)
    if arguments.probe:
        probe_here(*arguments.probe)
        return 0
    if not arguments.tiny and not torch.cuda.is_available():
        print("no GPU: torch.cuda.is_available() is False; --tiny tries the program on the CPU", file=sys.stderr)
        return 1
    device = {"device": "cpu", "dtype": "float32"} if arguments.tiny else {"device": "cuda", "dtype": "bfloat16"}
    facts = {
        "date": time.strftime("%Y-%m-%d"),
        "torch": torch.__version__,
        "machine": "cpu" if arguments.tiny else torch.cuda.get_device_name(),
    }
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.trace.parent.mkdir(parents=True, exist_ok=True)
    if arguments.largest is not None:
        return gpu_largest.run(arguments, facts)
    options: dict[str, Any] = device | {
        "sizes": LLAMA_3B, "length": LENGTH, "checkpointing": True, "tiny": arguments.tiny, "micro_batch": 1,
    }  # fmt: skip
    if arguments.tile_numel:
        options["tile_numel"] = arguments.tile_numel
    numel = sum(p.numel() for p in step_worker.model_of(options | {"device": "meta"})[0].parameters())
    found = Found(probe=probed(options))

    def save() -> None:
        rows = report(found, arguments.tokens, options)
        kept = {"turns": found.turns, "missing": found.missing, "probe": found.probe, "trace": found.trace}
        arguments.json.write_text(json.dumps(facts | {"rows": rows} | kept, indent=1) + "\n")

    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        options["folder"] = str(Path(folder).absolute())
        rows = {tokens: ROWS[tokens] for tokens in arguments.tokens}
        for names in groups(arguments.others, numel, gpu_largest.host_bytes(arguments.host_gib)):
            found.apart += [name for name in names if "host" not in names]
            if time.monotonic() - begun > arguments.seconds - 60:
                found.missing |= dict.fromkeys(names, "no time was left")
                continue
            print(f"{', '.join(names)}:", flush=True)
            until = begun + arguments.seconds
            run(
                found, names, options, rows, arguments.rounds, until, save, arguments.trace if "host" in names else None
            )
    found.trace = traced(arguments.trace, arguments.json.with_suffix(".svg"))
    save()
    rows_found = report(found, arguments.tokens, options)
    print(facts, table(rows_found), exposed_table(rows_found), found.trace or "no kernels in the trace", sep="\n\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
