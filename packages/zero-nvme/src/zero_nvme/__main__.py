"""The command line: `python -m zero_nvme tune|bench|doctor PATH`. No other module prints."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile

from zero_nvme import doctor, fio, tune
from zero_nvme.errors import NvmeError
from zero_nvme.measure import MIB, Testbed
from zero_nvme.options import BACKENDS, Options


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m zero_nvme", description=__doc__.splitlines()[0] if __doc__ else "")
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("tune", "find block size and bytes in flight; prints YAML"),
        ("bench", "sequential reads, writes and both at once, beside fio's if it is installed"),
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
    found = tune.tune(
        options.path,
        options.backend,
        options.mib * MIB,
        report=lambda line: print(line, file=sys.stderr),
    )
    print(found.yaml(options.path))
    return 0


def _doctor(options: argparse.Namespace) -> int:
    findings = doctor.examine(options.path)
    for verdict, what, fact in findings:
        print(f"{verdict:>4}  {what:<18}  {fact}")
    return int(any(what in ("filesystem", "files") and verdict == "no" for verdict, what, _ in findings))


def _bench(options: argparse.Namespace) -> int:
    """Alternates with fio, so that both are measured under the same load of the machine."""
    block, in_flight, nbytes = options.block_mib * MIB, options.inflight_mib * MIB, options.mib * MIB
    chosen = Options(backend=options.backend, block_bytes=block, inflight_bytes=in_flight)
    ours: dict[fio.Kind, list[float]] = {kind: [] for kind in tune.KINDS}
    theirs: dict[fio.Kind, list[float]] = {kind: [] for kind in tune.KINDS}
    with Testbed(options.path, nbytes, chosen) as bed, tempfile.TemporaryDirectory(dir=options.path) as folder:
        name = os.path.join(folder, "fio")
        if fio.available():
            with open(name, "wb") as file:
                for _ in range(0, nbytes, MIB):
                    file.write(os.urandom(MIB))
                os.fsync(file.fileno())
        for _ in range(options.rounds):
            for kind in tune.KINDS:
                ours[kind].append(bed.gigabytes_per_second(bed.seconds(kind)[0]))
                if fio.available():
                    depth = max(1, in_flight // block)
                    peer = fio.run(name, kind, nbytes=nbytes, block_bytes=block, depth=depth)
                    theirs[kind].append(peer.gigabytes_per_second)
        print(f"{bed.options.backend}: {bed.reason}; {options.mib} MiB, medians of {options.rounds}, GB/s")
    print(f"{'':6} {'zero_nvme':>10} {'fio':>10} {'ratio':>7}")
    for kind in tune.KINDS:
        row = f"{kind:6} {statistics.median(ours[kind]):10.2f}"
        if theirs[kind]:
            ratio = statistics.median(a / b for a, b in zip(ours[kind], theirs[kind], strict=True))
            row += f" {statistics.median(theirs[kind]):10.2f} {ratio:7.2f}"
        else:
            row += f" {'not found':>10}"
        print(row)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
