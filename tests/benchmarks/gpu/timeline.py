"""torch's profile of two steps with everything on the host: how much of the copies ran beside kernels, and how many."""

from collections import Counter
from pathlib import Path

from tests.benchmarks import trace
from tests.benchmarks.gpu import tables
from tests.benchmarks.gpu.stage import Piece
from tests.benchmarks.worker import Worker

FILE = "trace.json.gz"


def run(piece: Piece) -> None:
    file = Path(piece.options["out"], FILE)
    worker = Worker("host", tables.worker_options(piece), limit_seconds=piece.left() - 5)
    try:
        answer = worker.told if worker.ready().missing else worker.ask(f"trace {file} {min(tables.ROWS.values())}")
    finally:
        worker.close()
    if "missing" in answer:
        raise SystemExit(f"no trace: {answer['missing']}")
    events = trace.read(file)
    lanes = trace.lanes(events)
    copies: Counter[str] = Counter()
    for event in events:
        if event.get("cat") == "gpu_memcpy":
            copies[event["name"]] += 1
            copies[f"{event['name']}, bytes"] += int(event.get("args", {}).get("bytes", 0))
    piece.keep(
        file=FILE,
        kernels=sum(event.get("cat") == "kernel" for event in events),
        calls=dict(Counter(event["name"] for event in events if event.get("cat") == "cuda_runtime").most_common(20)),
        copies=dict(copies),
        overlap=trace.overlap(lanes) if lanes.kernels else {"missing": "nothing ran on a device"},
    )
