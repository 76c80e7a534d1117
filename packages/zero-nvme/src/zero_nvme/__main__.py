"""Runs the command line, `python -m zero_nvme tune|bench|doctor PATH`. No other module prints."""

from __future__ import annotations

import argparse
import statistics
import sys

from zero_nvme.errors import NvmeError
from zero_nvme.io.io_queue import BACKENDS, Options
from zero_nvme.tools import doctor, measure
from zero_nvme.tools.measure import KINDS, MIB, Testbed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zero_nvme", description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("tune", "find block size and bytes in flight; prints YAML"),
        ("bench", "sequential reads, writes and both at once"),
        ("doctor", "what this kernel, filesystem and container allow"),
    ):
        command = commands.add_parser(name, help=text)
        command.add_argument("path", help="a folder on the disk in question")
        if name != "doctor":
            command.add_argument("--backend", default="auto", choices=("auto", *BACKENDS))
            command.add_argument("--mib", type=int, default=256, help="size of the file, freed at the end")
        if name == "bench":
            command.add_argument("--block-mib", type=int, default=4)
            command.add_argument("--inflight-mib", type=int, default=16)
            command.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args(arguments)
    try:
        return {"tune": _tune, "bench": _bench, "doctor": _doctor}[options.command](options)
    except (NvmeError, ValueError) as error:
        print(error, file=sys.stderr)
        return 1


def _tune(options: argparse.Namespace) -> int:
    found = measure.tune(
        options.path, options.backend, options.mib * MIB, report=lambda line: print(line, file=sys.stderr)
    )
    print(found.yaml(options.path))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    findings = doctor.examine(options.path)
    for verdict, what, fact in findings:
        print(f"{verdict:>4}  {what:<18}  {fact}")
    return int(any(what in ("filesystem", "files") and verdict == "no" for verdict, what, _ in findings))


def _bench(options: argparse.Namespace) -> int:
    block, in_flight = options.block_mib * MIB, options.inflight_mib * MIB
    chosen = Options(backend=options.backend, block_bytes=block, inflight_bytes=in_flight)
    with Testbed(options.path, options.mib * MIB, chosen) as bed:
        rounds = [[bed.gigabytes_per_second(bed.seconds(kind)[0]) for kind in KINDS] for _ in range(options.rounds)]
        print(f"{bed.options.backend}: {bed.reason}; {options.mib} MiB, medians of {options.rounds}, GB/s")
    for kind, rates in zip(KINDS, zip(*rounds, strict=True), strict=True):
        print(f"{kind:6} {statistics.median(rates):6.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
