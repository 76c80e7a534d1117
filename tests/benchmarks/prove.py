"""Five minutes of proof: a model that plain torch cannot train in this memory is trained, killed, and gone on with.

    python -m tests.benchmarks.prove             # or: nox -s prove

A Llama of 119.6 M parameters is trained five times, each time in a process of its own, on the same tokens: by plain
torch, by plain torch with too little memory, by this library in that memory, once more but killed with SIGKILL in the
middle of a step, and from there to the end. The last weights have to be those of the run that nobody killed, bit for
bit. Writes a table to the terminal. The disk of the folder is what stands for the memory.
"""

import argparse
import hashlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30
SIZES = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8, "num_attention_heads": 16}
VOCABULARY, TOKENS = 8192, 256


def work(given: argparse.Namespace) -> None:
    """One process: a line of JSON for each step, and the digest of the weights at the end."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zero_core
    from zero_nvme import Slab
    from zero_offload import TieredStore
    from zero_optim_cpu import CpuStep

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCABULARY, use_cache=False, **SIZES)
    if given.limit:  # of what this process may allocate from here on
        status = Path("/proc/self/status").read_text()
        used = int(status.partition("VmData:")[2].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + given.limit, used + given.limit))
    first, step = 1, 0
    with zero_core.deferred_init():  # so that weights exist one unit at a time, the same in each process
        model = LlamaForCausalLM(config)
    if given.plain:
        zero_core.materialise(model)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-4)
    else:
        slab = Slab([given.folder], name=given.name, allow_memory=True)
        store = TieredStore("nvme", "nvme", "nvme", nvme=slab, step=CpuStep(), durable=True)
        optimizer = zero_core.shard(model, torch.optim.AdamW(model.parameters(), lr=1e-4), store=store)
        first = zero_core.resume(model, optimizer, extra=lambda: step).step + 1
    print(json.dumps({"first": first}), flush=True)
    for step in range(first, given.steps + 1):
        begun, generator = time.perf_counter(), torch.Generator().manual_seed(step)
        tokens = torch.randint(0, VOCABULARY, (1, TOKENS), generator=generator)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        if step == given.die_in:
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps({"step": step, "loss": loss.item(), "seconds": time.perf_counter() - begun}), flush=True)
    digest = hashlib.sha256()
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        with zero_core.gathered(module) if own and not given.plain else torch.no_grad():
            for parameter in own:
                digest.update(parameter.detach().contiguous().view(torch.uint8).numpy().tobytes())
    print(json.dumps({"digest": digest.hexdigest()[:16]}), flush=True)
    if not given.plain:
        optimizer.close()
        slab.close()


@dataclass
class Run:
    """What one process did."""

    what: str
    limited: bool
    lines: list[dict[str, Any]]
    peak: int  # RSS, bytes
    ended: str

    def of(self, key: str) -> list[Any]:
        return [line[key] for line in self.lines if key in line]


def run(given: argparse.Namespace, what: str, *options: str, limited: bool = True) -> Run:
    """A process with these options."""
    print(f"{what} ...", flush=True)
    command = [sys.executable, __file__, str(given.folder), "--worker", f"--steps={given.steps}", *options]
    command += [f"--limit={int(given.memory_gib * GIB)}"] if limited else []
    log, said = given.folder / "prove.log", given.folder / "prove.out"
    with open(log, "w") as errors, open(said, "w") as out:
        worker = subprocess.Popen(command, stdout=out, stderr=errors, env={**os.environ, "MALLOC_ARENA_MAX": "2"})
        _, status, used = os.wait4(worker.pid, 0)
    worker.returncode = os.waitstatus_to_exitcode(status)
    lines = [json.loads(line) for line in said.read_text().splitlines() if line.startswith("{")]
    last = max((line["step"] for line in lines if "step" in line), default=0)
    if worker.returncode == -signal.SIGKILL:
        ended = f"killed in step {last + 1}"
    elif worker.returncode:
        ended = f"failed in step {last + 1}: {log.read_text().strip().splitlines()[-1]}"
    else:
        ended = f"steps {lines[0]['first']} to {last}"
    print(f"    {ended[:110]}", flush=True)
    return Run(what, limited, lines, used.ru_maxrss * 1024, ended)


def table(runs: list[Run], limit_gib: float) -> str:
    rows = [("run", "may allocate", "peak RSS", "s a step", "last loss", "weights", "ended")]
    for each in runs:
        seconds, losses = sorted(each.of("seconds")), each.of("loss")
        memory = (f"{limit_gib:g} GiB" if each.limited else "any", f"{each.peak / GIB:.2f} GiB")
        steps = (f"{seconds[len(seconds) // 2]:.2f}", f"{losses[-1]:.6f}") if losses else ("", "")
        ended = each.ended if len(each.ended) < 60 else f"{each.ended[:57]}..."
        rows.append((each.what, *memory, *steps, *(each.of("digest") or [""]), ended))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def clear(folder: Path) -> None:
    for name in ("whole", "killed"):
        for left in folder.glob(f"{name}.slab*"):
            left.unlink()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path("prove"), help="on a disk with 4 GiB free")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--memory-gib", type=float, default=1.5, help="for a process to allocate beside its libraries")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--name", default="whole", help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--die-in", type=int, default=0, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given)
        return
    given.folder.mkdir(parents=True, exist_ok=True)
    clear(given.folder)
    begun, middle = time.perf_counter(), given.steps // 2 + 1
    runs = [
        run(given, "plain torch", "--plain", limited=False),
        run(given, "plain torch, little memory", "--plain"),
        run(given, "this library", "--name=whole"),
        run(given, "the same, killed", "--name=killed", f"--die-in={middle}"),
        run(given, "gone on from there", "--name=killed"),
    ]
    print(f"\n{table(runs, given.memory_gib)}\n")
    plain, little, whole, killed, rest = runs
    checks = {
        "plain torch fails in this memory": not little.of("digest") and bool(plain.of("digest")),
        "this library trains in it, and its last loss is plain torch's within 1e-3": bool(whole.of("digest"))
        and abs(whole.of("loss")[-1] - plain.of("loss")[-1]) < 1e-3,
        "it was killed in the middle of a step": killed.ended.startswith("killed"),
        "the run that went on ends in the bits of the one that nobody killed": bool(rest.of("digest"))
        and rest.of("digest") == whole.of("digest"),
    }
    for text, holds in checks.items():
        print(f"{'yes' if holds else 'NO '}  {text}")
    print(f"{time.perf_counter() - begun:.0f} s")
    clear(given.folder)
    if not all(checks.values()):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
