"""A GPU's first hour, and any other: what the machine is, whether everything runs there, and how fast.

    nox -s bench-gpu -- [--stages NAME …] [--again] [--seconds 570] [--out runs/bench_gpu] [--folder .]
    nox -s bench-gpu -- --dry                       every stage at toy size on the CPU

All stages have run on an H200. It needs torch with CUDA, transformers and the packages, and no network. What else is
missing (matplotlib, DeepSpeed, pytest) is said where it would be used.

Each stage is a process with a limit of its own (see frame.py). After each one OUT has results.json, summary.md, a JSON
file and a log a stage, and a picture; OUT.tar.gz has all of it, to be sent back.
"""

import argparse
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.benchmarks.gpu import frame, tables
from tests.benchmarks.gpu.frame import Stage

STAGES = (  # the limits add up to four calls of ten minutes
    Stage("facts", "facts", 120, 300, "device, memory, link, and what the planner is given"),
    Stage("smoke", "smoke", 90, 300, "a small Llama on three placements"),
    Stage("device", "device_tests", 240, 300, "tests/device"),
    Stage("placements", "tables", 300, 300, "a step by where its states lie"),
    Stage("peers", "tables", 440, 300, "a step of others: plain torch, FSDP2, DeepSpeed"),
    Stage("large", "tables", 300, 300, "a step of 6.5 B, or of --model 8b, by where its states lie"),
    Stage("timeline", "timeline", 100, 300, "kernels and copies of two steps"),
)
FIRST = {"facts": 95, "placements": 155, "peers": 140, "large": 165}  # with `--first`: one call of less than 570 s
GPU = "import sys, torch; sys.exit(not torch.cuda.is_available())"


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nox -s bench-gpu --", description=__doc__.splitlines()[0])
    names = [stage.name for stage in STAGES]
    parser.add_argument("--stages", nargs="+", default=names, choices=names, help="which; left out: all")
    parser.add_argument("--again", action="store_true", help="also those that an earlier call has ended")
    parser.add_argument("--first", action="store_true", help="what matters most, in nine minutes: a card of 24 GiB")
    parser.add_argument("--seconds", type=float, default=570, help="of this call; what does not fit waits for the next")
    parser.add_argument("--dry", action="store_true", help="toy sizes on the CPU, to try the program")
    parser.add_argument("--out", type=Path, help="a folder; left out: runs/bench_gpu, or runs/bench_gpu_dry")
    parser.add_argument("--folder", default=".", help="where slabs lie: on a drive, not in memory")
    parser.add_argument("--model", default="3b", choices=tables.MODELS, help="of the tables and the timeline")
    parser.add_argument("--tokens", type=int, nargs="+", default=list(tables.ROWS), choices=tables.ROWS)
    parser.add_argument("--others", nargs="*", choices=tables.OTHERS, help="configurations beside host and floor")
    parser.add_argument("--optimizer", default="adamw", choices=["adamw", "muon"], help="of ours and plain torch")
    parser.add_argument("--rounds", type=int, default=4, help="of the tables, as far as the time goes")
    parser.add_argument("--tile-numel", type=int, help="elements of a tile; left out: zero-offload's own")
    parser.add_argument("--device-gib", type=float, help="of the card that ours may use, to play a smaller one")
    parser.add_argument("--host-gib", type=float, help="of memory; left out: what is free, which in a VM may grow")
    parser.add_argument(
        "--stub", nargs=2, action="append", default=[], metavar=("STAGE", "HOW"), help=argparse.SUPPRESS
    )
    given = parser.parse_args(arguments)
    if given.first:
        given.stages, given.tokens, given.rounds = list(FIRST), [8192], 2
        given.others = ["auto", "shared", "deepspeed-host"]
        given.device_gib = given.device_gib or 24.0
    if wrong := [how for name, how in given.stub if name not in names or how not in frame.STUBS]:
        parser.error(f"--stub: a stage and one of {', '.join(frame.STUBS)}, not {wrong}")
    return given


def main(arguments: list[str] | None = None) -> int:
    given = parsed(arguments)
    if not given.dry and subprocess.run([sys.executable, "-c", GPU], timeout=120).returncode:
        print("no GPU: torch.cuda.is_available() is False; --dry tries the program on the CPU", file=sys.stderr)
        return 1
    options: dict[str, Any] = {
        "device": "cpu" if given.dry else "cuda",
        "dtype": "float32" if given.dry else "bfloat16",
        "out": str((given.out or Path("runs", "bench_gpu_dry" if given.dry else "bench_gpu")).absolute()),
    }
    for name in (
        "dry",
        "folder",
        "model",
        "tokens",
        "others",
        "rounds",
        "tile_numel",
        "optimizer",
        "host_gib",
        "device_gib",
    ):
        options[name] = getattr(given, name)
    limits = FIRST if given.first else {}
    stages = [replace(each, limit=limits.get(each.name, each.limit)) for each in STAGES if each.name in given.stages]
    well = frame.run(stages, options, seconds=given.seconds, again=given.again, stubs=dict(given.stub))
    print(f"\n{Path(options['out'], 'summary.md').read_text()}\nto send back: {options['out']}.tar.gz")
    return 0 if well else 1


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that a stage is ended too
    raise SystemExit(main())
